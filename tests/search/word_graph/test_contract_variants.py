"""The checks of tests/contract on the CPU for options that change how the searches of word graphs go about it."""

import pytest

from tests.contract.checks import *
from tests.contract.subjects import rows

pytestmark = pytest.mark.slow
NAMES = (
    "cuda_wfst lattices", "cuda_wfst new words", "paged_biglm let", "paged_biglm let lattices",
    "paged_biglm new words", "paged_biglm open vocabulary", "paged_biglm let new words", "paged_biglm difference",
)  # fmt: skip
TABLE = rows("cpu", *NAMES)
