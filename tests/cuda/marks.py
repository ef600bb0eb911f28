"""Marks for tests that need more than every machine has."""

import pytest

from nemo_gpu_decoding.cuda import nvrtc


def _why_no_compiler() -> str:
    try:
        nvrtc.version()
    except Exception as error:  # the loader raises many types for a missing library
        return f"no NVRTC here: {type(error).__name__}"
    return ""


needs_nvrtc = pytest.mark.skipif(bool(_why_no_compiler()), reason=_why_no_compiler() or "NVRTC is there")
