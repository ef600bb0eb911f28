"""Which tests of the contract there are; `slow` marks those that run in `make test-all` rather than in `make test`."""

import logging
from pathlib import Path

import pytest

from nemo_gpu_decoding.checks import warn_once
from tests.assets import ASSETS

pytest.register_assert_rewrite("tests.contract.checks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Checks of the contract that a table has no subject for are no tests."""
    items[:] = [item for item in items if not _without_subject(item)]


def _without_subject(item: pytest.Item) -> bool:
    if "subject" not in getattr(item, "fixturenames", ()):  # other tests have cases of their own
        return False
    return not isinstance(item.callspec.params["case"], tuple)


@pytest.fixture(scope="session")
def assets() -> Path:
    return ASSETS


@pytest.fixture(autouse=True)
def all_levels_in_caplog(caplog):
    """NeMo sets the level of all handlers to ERROR when it restores a model."""
    caplog.handler.setLevel(logging.NOTSET)


@pytest.fixture
def messages():
    """Messages of our logger, also where a script before has changed the levels of pytest's handlers."""
    found: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("nemo_gpu_decoding")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    warn_once.cache_clear()
    yield found
    logger.removeHandler(handler)
