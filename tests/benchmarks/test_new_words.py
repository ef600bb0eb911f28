"""The table of words that the LM lacks."""

import pytest

from benchmarks import new_words
from nemo_gpu_decoding.cli.options import parse_options


def test_a_model_needs_a_manifest_and_a_text():
    with pytest.raises(ValueError, match="model is given without manifest or text, expected all three"):
        new_words.speech_of(parse_options(new_words.NewWordsOptions, ["model=m.nemo", "manifest=m.json"]))


@pytest.mark.slow
def test_closed_and_open_graphs_find_the_same_words(monkeypatch, capsys):
    rows, texts, vocabulary, sentences = new_words.speech_of(new_words.NewWordsOptions())
    few = [sentence for sentence in sentences[:3000] if "the" in sentence]
    monkeypatch.setattr(new_words, "speech_of", lambda options: (rows[:4], texts[:4], vocabulary, few))
    monkeypatch.setattr("sys.argv", ["new_words", "bonuses=8"])
    assert new_words.main() == 0
    lacking, header, _, *table = capsys.readouterr().out.strip().splitlines()
    assert lacking.startswith("4 utterances, ")
    assert header.split()[:3] == ["decoder", "bonus", "WER"]
    assert len(table) == 12
    assert all("no request" in row for row in table[::2])
    of_requests = [row.split()[-5:] for row in table[1::2]]  # WER, found, missed, false, F-score
    assert of_requests[0] == of_requests[1]
    assert of_requests[2] == of_requests[4]
    assert of_requests[3] == of_requests[5]
    assert int(of_requests[0][1]) > 0
