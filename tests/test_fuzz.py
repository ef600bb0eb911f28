"""A few damaged files for each reader; `python -m tests.fuzz` tries as many as one likes."""

import pytest

from tests.fuzz import READERS, fuzz


@pytest.mark.parametrize("name", READERS)
def test_readers_name_a_damaged_file(name, tmp_path):
    faults = list(fuzz(name, cases=60, seed=1, folder=tmp_path))
    assert not faults, faults[0]


def test_fuzzing_notices_a_careless_reader(tmp_path, monkeypatch):
    careless = READERS["phrases"]._replace(read=lambda path: path.read_text(encoding="utf-8"))
    monkeypatch.setitem(READERS, "phrases", careless)
    assert any("UnicodeDecodeError" in fault.what for fault in fuzz("phrases", 60, 1, tmp_path))
