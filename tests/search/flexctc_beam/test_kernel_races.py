"""The kernels under the race and bounds checker: clean on any schedule, and no barrier is idle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nemo_gpu_decoding.cuda.launch import use_runtime
from nemo_gpu_decoding.cuda.sources import read_source
from nemo_gpu_decoding.search.flexctc_beam import launch_shape
from tests.cuda_emulator.emulator import EmulatedRuntime, EmulatorError
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import assert_equal, on_cuda, random_fusion

V = 30
MERGES = ("max", "sum", "prefix")
KERNELS = ("search/flexctc_beam/kernel.cu", "search/flexctc_beam/finish.cu")
BARRIER = re.compile(r"__syncthreads\(\);")


@pytest.fixture
def short_lists(monkeypatch):
    """Lists so short that every frame goes through each of the kernel's loops."""
    for name, size in {"THREADS": 64, "FINISH_THREADS": 64, "MOST_LABELS": 20, "PAIRS": 48}.items():
        monkeypatch.setattr(launch_shape, name, size)
    monkeypatch.setattr(launch_shape, "TILE_BYTES", 400)


def search_everything(merge: str = "max") -> None:
    """Flat and peaked rows, several frames, several utterances, an empty one."""
    for sharpness, beam_size in ((0.3, 16), (3.0, 5)):
        assert_equal(
            random_log_probs(3, 7, V + 1, seed=1, sharpness=sharpness), [7, 0, 4],
            fusion=random_fusion(V), merge=merge, beam_size=beam_size, n_best=beam_size,
            beam_threshold=float("inf"),
        )  # fmt: skip


def search_in_chunks() -> None:
    """Beams come back from global memory."""
    decoder = on_cuda(
        V, V, random_fusion(V), merge="sum", beam_size=16, n_best=16, beam_threshold=float("inf")
    )
    for sharpness in (0.3, 3.0):
        log_probs = random_log_probs(2, 7, V + 1, seed=1, sharpness=sharpness)
        streams = decoder.open(2)
        decoder.push(streams, log_probs[:, :5], [5, 4])
        decoder.push(streams, log_probs[:, 5:], [2, 0])
        decoder.close(streams)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize(
    "emulated_runtime",
    [
        {"check": True, "seed": 0},
        {"check": True, "seed": 100, "yield_percent": 50, "resident": 1},
        {"check": True, "order": "ascending"},
        {"check": True, "order": "descending"},
    ],
    indirect=True,
)
def test_no_races_and_no_stray_accesses(emulated_runtime, short_lists, merge):
    search_everything(merge)
    assert emulated_runtime.launches == 4


@pytest.mark.parametrize("threads", [32, 96, 256])
@pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True)
def test_no_races_in_blocks_of_any_size(emulated_runtime, monkeypatch, threads):
    monkeypatch.setattr(launch_shape, "THREADS", threads)
    monkeypatch.setattr(launch_shape, "FINISH_THREADS", min(threads, 256))
    for merge in MERGES:
        search_everything(merge)


@dataclass
class AlteredRuntime(EmulatedRuntime):
    """Runs altered copies of some kernels."""

    copies: Mapping[str, Path] = field(default_factory=dict)

    def load(self, source, device, defines=None):
        return super().load(str(self.copies.get(source, source)), device, defines)


def in_one_file(name: str) -> str:
    """A kernel with the headers of its own folder and of search/ in the places of their #includes."""
    source = read_source(name)
    seen: set[str] = set()

    def body(match: re.Match[str]) -> str:
        header = match[1]
        if not header.startswith("search/"):
            return match[0]
        if header in seen:
            return ""
        seen.add(header)
        text = source.headers[header].replace("#pragma once", "")
        return INCLUDE.sub(body, text)

    return INCLUDE.sub(body, source.text)


INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def barriers(name: str) -> list[tuple[str, int]]:
    return [(name, i) for i in range(len(BARRIER.findall(in_one_file(name))))]


@pytest.mark.parametrize(("name", "number"), [case for name in KERNELS for case in barriers(name)])
def test_every_barrier_is_needed(request, tmp_path, short_lists, name, number):
    text = in_one_file(name)
    barrier = list(BARRIER.finditer(text))[number]
    altered = tmp_path / Path(name).name
    altered.write_text(text[: barrier.start()] + ";" + text[barrier.end() :])
    cache = request.config.cache.mkdir("cuda_emulator")
    runtime = AlteredRuntime(cache=cache, check=True, yield_percent=30, copies={name: altered})
    with use_runtime(runtime), pytest.raises(EmulatorError):
        search_in_chunks()
