"""The checks of tests/contract for this search on the CPU."""

from tests.contract.checks import *
from tests.contract.subjects import fused, rows

TABLE = rows("cpu", *fused("flexctc_beam"))
