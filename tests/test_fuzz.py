"""A few damaged files for each reader; `python -m tests.fuzz` tries as many as one likes."""

import pytest

from tests import wild
from tests.fuzz import READERS, fuzz


@pytest.mark.parametrize("name", READERS)
def test_readers_name_a_damaged_file(name, tmp_path):
    faults = list(fuzz(name, cases=60, seed=1, folder=tmp_path))
    assert not faults, faults[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", wild.COLLECTIONS)
def test_collections_are_read_as_by_their_peers_or_refused_by_name(name, tmp_path):
    for module in {"arpa": ["kenlm"], "audio": ["soundfile"], "sections": ["nemo.collections.asr"]}.get(name, ()):
        pytest.importorskip(module)
    totals, wrong = wild.outcomes(name, wild.COLLECTIONS[name].cases, 0, tmp_path)
    assert not wrong
    assert min(totals["read"], totals["warned"] + totals["refused"]) > 3, totals  # the changes are of both kinds


def test_fuzzing_notices_a_careless_reader(tmp_path, monkeypatch):
    careless = READERS["phrases"]._replace(read=lambda path: path.read_text(encoding="utf-8"))
    monkeypatch.setitem(READERS, "phrases", careless)
    assert any("UnicodeDecodeError" in fault.what for fault in fuzz("phrases", 60, 1, tmp_path))
