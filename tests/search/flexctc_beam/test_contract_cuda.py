"""The checks of tests/contract for the kernels, in the emulator."""

import pytest

from tests.contract.checks import *
from tests.contract.subjects import fused, rows

pytestmark = pytest.mark.slow
TABLE = rows("cuda", *fused("flexctc_beam"))
