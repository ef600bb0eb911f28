"""The table of long lists of phrases."""

from benchmarks import many_phrases


def test_the_table_compares_lists_of_phrases(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["many_phrases", "tasks=[hard]", "phrases=[2,60]", "utterances=4", "repeats=1"])
    assert many_phrases.main() == 0
    *_, none, _, few, many = (row.split() for row in capsys.readouterr().out.strip().splitlines())
    assert (none[:2], few[:3], many[:3]) == (["hard", "2"], ["hard", "LM", "2"], ["hard", "LM", "60"])
    assert few[-1] == "1.00"
    assert int(many[3]) > 0
