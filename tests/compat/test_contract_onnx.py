"""The checks of tests/contract for ONNX models."""

import pytest

from tests.contract.checks import *
from tests.contract.entry_points import entry_points

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow
TABLE = entry_points("onnx alsd_pp", "onnx aes_pp", "onnx flexctc_beam")
