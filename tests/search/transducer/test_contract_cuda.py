"""The checks of tests/contract for the kernels, in the emulator."""

import pytest

from tests.contract.checks import *
from tests.contract.subjects import rows

pytestmark = pytest.mark.slow
TABLE = rows(
    "cuda",
    "alsd_pp",
    "alsd_pp density ratio",
    "alsd_pp lm pool",
    "alsd_pp allowed tokens",
    "aes_pp",
    "aes_pp density ratio",
    "aes_pp lm pool",
    "aes_pp allowed tokens",
)
