"""The checks of tests/contract for pyctcdecode's interface."""

import pytest

from tests.contract.checks import *
from tests.contract.entry_points import entry_points

pytest.importorskip("kaldifst")
TABLE = entry_points("pyctcdecode")
