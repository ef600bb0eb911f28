"""The table of ways of paying phrases."""

import json

import pytest

from benchmarks import boosting
from nemo_gpu_decoding.cli.options import parse_options
from tests.assets import ASSETS, speech


def options(strategy, *more):
    files = [f"manifest={ASSETS}/speech/test.json", f"phrases={ASSETS}/phrases.txt", "model=m.nemo"]
    return parse_options(boosting.BoostingOptions, [*files, f"strategy={strategy}", *more])


def test_searches_of_word_graphs_have_one_way():
    lm = f"lm={ASSETS}/lm/word3.arpa"
    found = boosting.searches(options("cuda_wfst", "weights=5", lm))
    assert [row[:3] for row in found] == [("no phrases", None, 0.0), ("word graph", None, 5.0)]
    assert found[1][3].wfst.boosting_tree_alpha == 5.0
    *_, (name, _, weight, config) = boosting.searches(options("cuda_wfst", "weights=5", lm, "ac_threshold=0.03"))
    assert (name, weight, config.wfst.boosting_tree.ac_threshold) == ("ac_threshold: 0.03", 5.0, 0.03)


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.parametrize("spoken", [True, False])
def test_boosting_table_counts_words_and_phrases(tmp_path, monkeypatch, capsys, spoken):
    pytest.importorskip("nemo.collections.asr")
    manifest = tmp_path / "few.json"
    manifest.write_text("\n".join(map(json.dumps, speech()[31:36])))
    arguments = [f"model={ASSETS}/models/self_ctc.nemo", f"manifest={manifest}", f"phrases={ASSETS}/phrases.txt"]
    monkeypatch.setattr("sys.argv", ["boosting", *arguments, "weights=1.5", "beams=16", f"spoken={spoken}"])
    assert boosting.main() == 0
    header, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert header.split() == ["phrases", "beam_size", "weight", "WER", "%", "found", "missed", "false"]
    plain, apart, every, _ = (tuple(map(float, row.split()[-4:])) for row in rows)
    assert all((found + missed > 0) is spoken for _, found, missed, _ in (plain, apart, every))
    assert apart == every  # no name overlaps another one
    assert (apart[1] > plain[1]) is spoken
    assert apart[0] < plain[0] or not spoken
