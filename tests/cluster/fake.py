"""A model that needs no NeMo: its text is the file's name, and its processes can be found and killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from nemo_gpu_decoding.cluster.workers import Loaded
from nemo_gpu_decoding.nemo_plugin.model import Transcript

SECONDS = 0.05  # of a batch


class FakeModel:
    def transcribe(self, files, *, batch_size, second, phrases=(None,)):
        assert batch_size == len(files)
        time.sleep(SECONDS)
        if any("fail" in str(file) for file in files):
            raise ValueError("this audio is no good")
        for file, own in zip(files, phrases, strict=True):
            yield Transcript(" ".join([file.stem, *(own or ())]), -1.0)


def load(pids: str) -> Loaded:
    """The model; its process is written down as a file in a folder."""
    (Path(pids) / str(os.getpid())).touch()
    return Loaded(FakeModel())


def broken() -> Loaded:
    raise ValueError("beam.beam_size is 0, expected an integer >= 1")
