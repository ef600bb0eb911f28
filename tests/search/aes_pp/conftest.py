"""The emulator for tests of the kernels."""

from tests.search.transducer.conftest import emulated_runtime, small_blocks

__all__ = ["emulated_runtime", "small_blocks"]
