"""Which phrases without evidence are decoded again, and which tokens of partial results are final."""

from types import SimpleNamespace

import pytest

from nemo_gpu_decoding.search import evidence
from tests.search.test_result import nbest

UNITS = evidence.Units("abcde", range(5), range(1, 6))


def found(*phrases):
    """A hypothesis of five tokens with phrases, each with its first token and its probability."""
    result = nbest("j a l j a")
    shown = tuple(evidence.FoundPhrase("", first, first + 1, 0, 1, probability) for first, probability in phrases)
    return evidence.new_frozen(type(result), **{**vars(result), "phrases": shown, "committed": 4})


def tree(occurrences=(), count=0):
    table = SimpleNamespace(keys=["first", "second"])
    return SimpleNamespace(
        table=table, ac_threshold=0.5, longest=3, num_phrases=count, only=set, occurrences=lambda _: occurrences
    )


@pytest.mark.parametrize(
    ("phrases", "left"),
    [
        ([(0, 0.9), (0, 0.1), (1, 0.1)], {"first"}),  # one phrase passes in one place
        ([(0, 0.9), (0, 0.1), (1, 0.9)], {"second"}),  # as all pass somewhere, those that always pass
        ([(0, 0.1), (1, 0.1)], set()),
    ],
)
def test_phrases_that_pass_somewhere_are_decoded_again(phrases, left):
    boosted = tree([(number, 0, 1) for number, _ in phrases], count=2)
    assert evidence._left_phrases(found(*enumerate(p for _, p in phrases)), boosted, UNITS) == left


@pytest.mark.parametrize(("phrases", "committed"), [([], 2), ([(1, 0.1)], 1), ([(1, 0.9)], 2), ([(3, 0.1)], 2)])
def test_committed_tokens_begin_no_phrase_that_may_be_withdrawn(phrases, committed, monkeypatch):
    """Of the 4 shared tokens, the last 2 may begin a phrase of 3."""
    monkeypatch.setattr(evidence, "found_phrases", lambda *_: found(*phrases).phrases)
    streams = SimpleNamespace(shown={0: 0}, tree_of=lambda row: tree())
    (result,) = evidence.as_committed(streams, [0], [found()], lambda _: UNITS)
    assert result.committed == streams.shown[0] == committed
