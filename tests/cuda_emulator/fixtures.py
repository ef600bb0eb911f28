"""Fixtures for tests that run kernels: import them in the test's file or conftest."""

import os
from collections.abc import Iterator

import pytest

from nemo_gpu_decoding.cuda.launch import use_runtime
from tests.cuda_emulator.build import why_no_compiler
from tests.cuda_emulator.emulator import EmulatedRuntime


@pytest.fixture
def emulated_runtime(request: pytest.FixtureRequest) -> Iterator[EmulatedRuntime]:
    """The emulator in the place of the GPU, for the whole test; skips where kernels can't be compiled.

    Options other than the defaults, as keywords of `EmulatedRuntime`:

        @pytest.mark.parametrize("emulated_runtime", [{"check": True, "seed": 3}], indirect=True)
    """
    reason = why_no_compiler()
    if reason:
        pytest.skip(reason)
    with use_runtime(new_runtime(request, **getattr(request, "param", {}))) as runtime:
        yield runtime


def new_runtime(request: pytest.FixtureRequest, **options) -> EmulatedRuntime:
    """An emulator that keeps what it compiles in pytest's cache; EMULATOR=nvrtc says what compiles kernels."""
    options = {"by_nvrtc": os.environ.get("EMULATOR") == "nvrtc", **options}
    cache = getattr(request.config, "cache", None)  # -p no:cacheprovider: the emulator's own folder
    return EmulatedRuntime(**({"cache": cache.mkdir("cuda_emulator")} if cache else {}), **options)


# the race and bounds checker on schedules of all kinds
on_any_schedule = pytest.mark.parametrize(
    "emulated_runtime",
    [
        {"check": True, "seed": 0},
        {"check": True, "seed": 100, "yield_percent": 50, "resident": 1},
        {"check": True, "order": "descending"},
    ],
    indirect=True,
)
