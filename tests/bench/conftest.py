from __future__ import annotations

import pytest

from nemo_gpu_decoding.bench import cache
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.sources import make_task
from nemo_gpu_decoding.bench.task import Task


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What the benchmark keeps between runs goes to a folder of the tests, not to the user's home."""
    folder = tmp_path_factory.mktemp("bench-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_dir", lambda: folder)
        yield folder


@pytest.fixture(scope="session")
def tiny_options() -> BenchOptions:
    """B=2, T about 30, V=32, a token trigram."""
    return BenchOptions(
        peers=[],
        beams=[4],
        repeats=1,
        vocab_size=32,
        batch=2,
        min_frames=20,
        max_frames=40,
        sentences=200,
        lm_order=3,
        phrases=4,
        many_phrases=0,
        probes=False,
    )


@pytest.fixture(scope="session")
def tiny_task(own_cache, tiny_options) -> Task:
    return make_task(tiny_options)
