"""Every row of the table of decoders is checked by one test file."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.contract.subjects import TABLE

SEARCH = Path(__file__).parents[1] / "search"


def test_each_decoder_is_checked_once_on_each_of_its_backends():
    checked = []
    for path in SEARCH.glob("*/test_contract*.py"):
        module = import_module(f"tests.search.{path.parent.name}.{path.stem}")
        checked += [(name, backend) for name, _, backends in module.TABLE for backend in backends]
    assert sorted(checked) == sorted((name, backend) for name, _, backends in TABLE for backend in backends)
