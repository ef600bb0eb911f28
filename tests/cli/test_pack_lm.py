"""`pack-lm`: an ARPA file in, a packed LM and a report out."""

from __future__ import annotations

import json

import pytest

from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed_file import load_packed_lm
from tests.lm.ngrams import closed_table, missing_suffixes, write_arpa


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with an LM that lacks suffixes."""
    monkeypatch.chdir(tmp_path)
    write_arpa(tmp_path / "lm.arpa", closed_table(seed=2, order=4, keep=0.5))
    return tmp_path


@pytest.mark.parametrize("layout", ["exact", "quantised"])
def test_the_file_is_that_of_the_library(here, capsys, layout):
    arguments = ["lm=lm.arpa", "out=lm.packed", f"layout={layout}", "cost_bits=8", "json=true"]
    assert main(["pack-lm", *arguments]) == 0
    facts = json.loads(capsys.readouterr().out)
    lm = load_packed_lm(here / "lm.packed")
    expected = pack_arpa_in_memory(here / "lm.arpa", layout=layout, cost_bits=8)
    assert (lm.arrays.arcs == expected.arrays.arcs).all()
    assert facts["repaired"] == missing_suffixes(closed_table(seed=2, order=4, keep=0.5)) > 0
    assert facts["ngrams"] == sum(facts["counts"]) == lm.num_arcs
    assert facts["states"] == lm.num_states
    assert facts["max_error"] == lm.max_error
    assert facts["num_bytes"] == (here / "lm.packed").stat().st_size
    assert facts["seconds"] > 0
    assert facts["peak_rss"] > 1e7


def test_the_table_shows_what_people_ask_for(here, capsys):
    assert main(["pack-lm", "lm=lm.arpa", "out=lm.packed", "layout=quantised"]) == 0
    said = capsys.readouterr()
    for row in ("n-grams", "repaired", "contexts", "size in MB", "seconds", "peak memory in MB"):
        assert row in said.out
    assert "bytes per n-gram" in said.out
    assert "off by at most" in said.out
    assert "written to" in said.err
    assert "lm.packed" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lm=none.arpa", "out=lm.packed"], "none.arpa"),
        (["lm=lm.arpa", "out=lm.packed", "layout=small"], "layout is 'small', expected one of exact"),
        (["lm=lm.arpa", "out=lm.packed", "cost_bits=2"], "cost_bits is 2, expected 4 .. 16"),
        (["lm=lm.arpa", "out=lm.packed", "temporary=none"], "temporary=none: there is no such folder"),
        (["lm=bad.arpa", "out=lm.packed"], "line 3: found 'x', expected 'ngram <order>=<count>'"),
    ],
)
def test_mistakes_take_one_line_and_leave_no_file(here, capsys, arguments, message):
    (here / "bad.arpa").write_text("\\data\\\nngram 1=3\nx\n")
    assert main(["pack-lm", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(here.glob("*packed*"))
