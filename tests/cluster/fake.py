"""A model that needs no NeMo: its text is the place of the audio, and its processes can be found and killed."""

import os
import time
from pathlib import Path

import numpy as np
import torch

from nemo_gpu_decoding.audio import part_of
from nemo_gpu_decoding.fusion.phrases import WrittenRequest
from nemo_gpu_decoding.transcript import Transcript

SECONDS = 0.05  # of a batch


class FakeModel:
    def encode(self, files, batch_size):
        assert batch_size == len(files)
        time.sleep(SECONDS)
        parts = [part_of(__file__ if isinstance(file, np.ndarray) else file) for file in files]  # samples: no name
        if any("encoder_fails" in str(part) for part in parts):
            raise ValueError("this audio is no good")
        stems = [list(f"{part.path.stem}{part.place}".encode().ljust(64)) for part in parts]
        yield {
            "names": torch.tensor(stems, dtype=torch.uint8),
            "sizes": torch.tensor([os.path.getsize(part.path) for part in parts]),
        }

    def check_request(self, written):
        if written.lm not in ("news", None):
            raise ValueError(f"lm is {written.lm!r}, expected one of news, none")

    def decode(self, outputs, requests=()):
        names = [bytes(row.tolist()).decode().rstrip() for row in outputs["names"]]
        if any("search_fails" in name for name in names):
            raise RuntimeError("no such state")
        for name, own in zip(names, requests or [None] * len(names), strict=True):
            given = own or WrittenRequest()
            phrases = [phrase.text for phrase in given.phrases or ()]
            yield Transcript(" ".join([name, *phrases, *filter(None, [given.lm])]), -1.0)


def load(pids: str) -> FakeModel:
    """The model; its process is written down as a file in a folder."""
    (Path(pids) / str(os.getpid())).touch()
    return FakeModel()


def broken() -> FakeModel:
    raise ValueError("beam.beam_size is 0, expected an integer >= 1")
