"""Shared by the tests of the command line."""

import json
import logging
from pathlib import Path

import pytest

from tests.assets import speech


@pytest.fixture
def manifest(tmp_path) -> Path:
    """A manifest of the first two test utterances, paths made absolute."""
    file = tmp_path / "two.json"
    file.write_text("\n".join(map(json.dumps, speech()[:2])))
    return file


@pytest.fixture(autouse=True)
def _talkative_nemo():
    """Commands silence NeMo for the rest of the process; tests that follow want to hear it."""
    nemo_logger, one_logger = logging.getLogger("nemo_logger"), logging.getLogger("nv_one_logger")
    filters, level = list(nemo_logger.filters), one_logger.level
    yield
    nemo_logger.filters[:] = filters
    one_logger.setLevel(level)
