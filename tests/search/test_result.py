"""`NBest.distinct`: one hypothesis for each text."""

import numpy as np
import pytest

from nemo_gpu_decoding.search.result import NBest, Path, ScoreParts

PIECES = ["j", "a", "l", "al"]


def nbest(*spellings):
    """Hypotheses with scores -1, -2 ..."""
    none = np.zeros(0)
    tokens = [np.array([PIECES.index(piece) for piece in spelling.split()], np.int32) for spelling in spellings]
    return NBest(tuple(Path(own, none, none, none, -1.0 - i, ScoreParts(-1.0 - i)) for i, own in enumerate(tokens)))


def text_of(path):
    return "".join(PIECES[token] for token in path.tokens)


@pytest.mark.parametrize(
    ("n", "kept"), [(1, [-1.0]), (2, [-1.0, -3.0]), (3, [-1.0, -3.0, -5.0]), (9, [-1.0, -3.0, -5.0])]
)
def test_distinct_texts_keep_their_best_score(n, kept):
    found = nbest("j al", "j a l", "a l", "al", "j")
    assert [path.score for path in found.distinct(text_of, n)] == kept
    assert len(found) == 5


def test_texts_that_differ_in_spaces_are_one_text():
    texts = dict(zip(["j", "a", "l"], ("on monday", "on monday ", " on  monday"), strict=True))
    found = nbest("j", "a", "l", "al")
    assert [path.score for path in found.distinct(lambda path: texts.get(text_of(path), "x"), 4)] == [-1.0, -4.0]


def test_distinct_texts_keep_frames_and_notes():
    found = NBest(nbest("al", "a l").paths, num_frames=7, notes=("a table was full",), committed=1)
    distinct = found.distinct(text_of, 2)
    assert (len(distinct), distinct.num_frames, distinct.notes, distinct.committed) == (1, 7, found.notes, 1)
