"""Shared by the tests of the command line."""

import logging
from pathlib import Path

import pytest

SELF = Path(__file__).parents[2] / "assets" / "self"


@pytest.fixture(scope="session")
def assets() -> Path:
    """The speech, models and LMs that the repository ships."""
    return SELF


@pytest.fixture
def manifest(tmp_path) -> Path:
    """A manifest of the first two test utterances, paths made absolute."""
    import json

    rows = [json.loads(line) for line in (SELF / "speech" / "test.json").read_text().splitlines()[:2]]
    for row in rows:
        row["audio_filepath"] = str(SELF / "speech" / row["audio_filepath"])
    file = tmp_path / "two.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture
def messages():
    """Messages of our logger, also where a script before has changed the levels of pytest's handlers."""
    found: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("nemo_gpu_decoding")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _talkative_nemo():
    """Commands silence NeMo for the rest of the process; tests that follow want to hear it."""
    nemo_logger, one_logger = logging.getLogger("nemo_logger"), logging.getLogger("nv_one_logger")
    filters, level = list(nemo_logger.filters), one_logger.level
    yield
    nemo_logger.filters[:] = filters
    one_logger.setLevel(level)
