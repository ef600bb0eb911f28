"""The checks of tests/contract for both searches on the CPU. They share compiled code, and so one process."""

from tests.contract.checks import *
from tests.contract.subjects import fused, rows

TABLE = rows("cpu", *fused("alsd_pp"), *fused("aes_pp"), "alsd_pp lstm", "aes_pp lstm")
