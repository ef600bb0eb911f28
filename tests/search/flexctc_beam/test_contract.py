"""The checks of tests/contract for this search on the CPU."""

from tests.contract.checks import *
from tests.contract.subjects import rows

TABLE = rows(
    "cpu", "flexctc_beam", "flexctc_beam density ratio", "flexctc_beam lm pool", "flexctc_beam allowed tokens"
)
