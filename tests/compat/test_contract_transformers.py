"""The checks of tests/contract for models of transformers."""

import pytest

from tests.contract.checks import *
from tests.contract.entry_points import entry_points

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
TABLE = entry_points("parakeet alsd_pp", "parakeet aes_pp", "parakeet flexctc_beam")
