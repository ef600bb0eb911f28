"""The checks of tests/contract for the kernels, in the emulator."""

import pytest

from tests.contract.checks import *
from tests.contract.subjects import rows

pytestmark = pytest.mark.slow
TABLE = rows(
    "cuda", "flexctc_beam", "flexctc_beam density ratio", "flexctc_beam lm pool", "flexctc_beam allowed tokens"
)
