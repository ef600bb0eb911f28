"""The checks of tests/contract for both searches on the CPU. They share compiled code, and so one process."""

from tests.contract.checks import *
from tests.contract.subjects import rows

TABLE = rows(
    "cpu",
    "alsd_pp",
    "alsd_pp density ratio",
    "alsd_pp lm pool",
    "alsd_pp allowed tokens",
    "alsd_pp lstm",
    "aes_pp",
    "aes_pp lstm",
    "aes_pp density ratio",
    "aes_pp lm pool",
    "aes_pp allowed tokens",
)
