"""The emulator's own tests use its fixture like everyone else's."""

from tests.cuda_emulator.fixtures import emulated_runtime

__all__ = ["emulated_runtime"]
