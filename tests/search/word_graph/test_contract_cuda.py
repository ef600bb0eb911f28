"""The checks of tests/contract for the kernels, in the emulator."""

import pytest

from tests.contract.checks import *
from tests.contract.subjects import rows

pytestmark = pytest.mark.slow
NAMES = (
    "cuda_wfst", "cuda_wfst lattices", "cuda_wfst new words", "paged_biglm", "paged_biglm new words",
    "paged_biglm difference",
)  # fmt: skip
TABLE = rows("cuda", *NAMES)
