"""Every row of the tables is checked by one test file."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.contract import checks
from tests.contract.entry_points import ENTRY_POINTS
from tests.contract.subjects import FUSION_CHECKS, TABLE

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("table", "pattern"), [(TABLE, "search/*/"), (ENTRY_POINTS, "compat/")])
def test_contract_checks_every_decoder_once_on_each_backend(table, pattern):
    checked = []
    for path in TESTS.glob(f"{pattern}test_contract*.py"):
        module = import_module(".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)))
        checked += [(name, backend) for name, _, backends in module.TABLE for backend in backends]
    assert sorted(checked) == sorted((name, backend) for name, _, backends in table for backend in backends)


@pytest.mark.parametrize("kind", [kind for _, kind, _ in ENTRY_POINTS if kind.exempt])
def test_exemptions_name_existing_checks(kind):
    names = [name for names in kind.exempt.values() for name in names]
    assert [name for name in (*names, *FUSION_CHECKS) if not hasattr(checks, name)] == []
    assert len(set(names)) == len(names)
