"""The table of long lists of phrases."""

from benchmarks import many_phrases
from benchmarks.options import BenchOptions
from benchmarks.sources import make_tasks


def test_the_table_compares_lists_of_phrases(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["many_phrases", "tasks=[hard]", "phrases=[2,60]", "utterances=4", "repeats=1"])
    assert many_phrases.main() == 0
    *_, none, _, few, many = (row.split() for row in capsys.readouterr().out.strip().splitlines())
    assert (none[:2], few[:3], many[:3]) == (["hard", "2"], ["hard", "LM", "2"], ["hard", "LM", "60"])
    assert few[-1] == "1.00"
    assert int(many[3]) > 0


def test_each_phrase_has_aliases_of_its_own():
    (task,) = make_tasks(BenchOptions(tasks=["hard"], utterances=4))
    options = many_phrases.ManyPhrasesOptions()
    assert many_phrases.decoder(options, task, 9, lm=False).fusion.boosting.ac_threshold == options.ac_threshold
    phrases = many_phrases.with_aliases(task, task.phrases(9), 2)
    spellings = [alias for phrase in phrases for alias in phrase.aliases]
    assert [len(phrase.aliases) for phrase in phrases] == [3] * 9
    assert len(set(spellings)) == 27
    assert {phrase.text for phrase in phrases} < set(spellings)
