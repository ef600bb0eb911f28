"""Results in NeMo's form."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import copy
import pickle

import numpy as np
import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis

from nemo_gpu_decoding.nemo_plugin.hypotheses import NBestList, TimedNBestList, from_labels, from_path
from nemo_gpu_decoding.search.result import Path, ScoreParts

BLANK = 5


def a_path(tokens=(1, 2), frames=(0, 3), repeats=(2, 1)):
    return Path(
        tokens=np.array(tokens, np.int32),
        frames=np.array(frames, np.int32),
        repeats=np.array(repeats, np.int32),
        token_confidence=np.ones(len(tokens), np.float32),
        score=-1.5,
        parts=ScoreParts(-2.0, insertion=0.5),
    )


def test_a_path_becomes_a_hypothesis():
    hypothesis = from_path(a_path(), num_frames=7)
    assert hypothesis.y_sequence.tolist() == [1, 2]
    assert str(hypothesis.y_sequence.dtype) == "torch.int64"
    assert hypothesis.timestamp == [0, 3]
    assert hypothesis.length == 7
    assert hypothesis.score == -1.5
    assert hypothesis.score_parts.insertion == 0.5
    assert hypothesis.text is None


def test_confidence_of_the_frames_that_emit_tokens():
    hypothesis = from_path(a_path(), num_frames=5)
    assert hypothesis.non_blank_frame_confidence == []
    hypothesis.frame_confidence = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert hypothesis.non_blank_frame_confidence == [0.1, 0.2, 0.4]


@pytest.mark.parametrize(
    ("labels", "tokens", "frames", "repeats"),
    [
        ([5, 1, 1, 5, 1, 2, 2, 5], [1, 1, 2], [1, 4, 5], [2, 1, 2]),
        ([0, 0, 0], [0], [0], [3]),
        ([5, 5], [], [], []),
        ([], [], [], []),
        ([3], [3], [0], [1]),
    ],
)
def test_labels_collapse(labels, tokens, frames, repeats):
    hypothesis = from_labels(np.array(labels, np.int64), BLANK)
    assert hypothesis.y_sequence.tolist() == tokens
    assert hypothesis.timestamp == hypothesis.token_frames == frames
    assert hypothesis.token_repeats == repeats
    assert hypothesis.length == len(labels)


def hypothesis(text, score=0.0, **fields):
    return Hypothesis(score=score, y_sequence=[], text=text, **fields)


def test_an_n_best_list_reads_like_its_best():
    hypotheses = [hypothesis("a", score=2.0), hypothesis("b", score=1.0)]
    n_best = NBestList(hypotheses)
    assert (n_best.text, n_best.score) == ("a", 2.0)
    assert n_best == hypotheses
    assert (n_best.y_sequence, n_best.alignments) == (None, None)
    assert not isinstance(n_best, Hypothesis)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda n_best: pickle.loads(pickle.dumps(n_best))])
def test_n_best_lists_survive_copies(duplicate):
    n_best = TimedNBestList([hypothesis("a", timestamp={"word": [{"end": 1}]})])
    n_best.y_sequence = "log-probs"
    other = duplicate(n_best)
    assert type(other) is TimedNBestList
    assert (other.text, other.y_sequence, other.timestamp) == ("a", "log-probs", {"word": [{"end": 1}]})


def test_a_timed_n_best_list_shows_the_entries_of_all_its_hypotheses():
    first, second = {"word": "a"}, {"word": "b"}
    n_best = TimedNBestList(
        hypothesis(entry["word"], timestamp={"timestep": [1], "word": [entry]})
        for entry in (first, second)
    )
    assert isinstance(n_best, Hypothesis)
    for entry in n_best.timestamp["word"]:  # as NeMo does to add seconds
        entry["start"] = 0.08
    assert first["start"] == second["start"] == 0.08
    assert "timestep" not in n_best.timestamp
