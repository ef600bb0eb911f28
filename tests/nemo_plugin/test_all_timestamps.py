"""Times, confidence and alignments that every strategy has; oracles are in the families' own files."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import torch

from tests.nemo_plugin.usage import EVERY_CASE, transcribed

BLANK = 128
CONFIDENCE = {
    "preserve_frame_confidence": True,
    "preserve_token_confidence": True,
    "preserve_word_confidence": True,
}


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
@pytest.mark.parametrize("where", ["beside the section", "in the section"])
def test_compute_timestamps_in_the_config(case, where):
    flag = {"compute_timestamps": True}
    found = case.decode(flag) if where.startswith("beside") else case.decode(**flag)
    for hypothesis in found:
        words = [entry["word"] for entry in hypothesis.timestamp["word"]]
        assert " ".join(words) == hypothesis.text


def test_without_timestamps_a_start_frame_per_token_remains(case):
    for hypothesis in case.decode():
        assert len(hypothesis.timestamp) == len(hypothesis.y_sequence)


def test_timestamps_once_asked_for_can_be_switched_off_again(case, files):
    transcribed(case.model, case.cfg(), files[:1], timestamps=True)
    (hypothesis,) = case.model.transcribe(files[:1], timestamps=False, verbose=False)
    assert isinstance(hypothesis.text, str)


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_n_best_with_timestamps_in_seconds(case, files):
    single = {key: value for key, value in case.several.items() if key in ("beam_size", "score_norm")}
    best_only = transcribed(case.model, case.cfg(**single), files, timestamps=True)
    several = transcribed(case.model, case.cfg(**case.several), files, timestamps=True)
    for n_best, best in zip(several, best_only, strict=True):
        assert isinstance(n_best, list)
        assert len(n_best) > 1
        assert n_best[0].text == best.text
        assert n_best[0].timestamp["word"] == best.timestamp["word"]
        for hypothesis in n_best:
            words = hypothesis.timestamp["word"]
            assert " ".join(entry["word"] for entry in words) == hypothesis.text
            assert all(0 <= entry["start"] <= entry["end"] for entry in words)


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
@pytest.mark.parametrize("exclude_blank", [True, False])
def test_confidence_together_with_timestamps_and_n_best(case, files, exclude_blank):
    top = {"confidence_cfg": {**CONFIDENCE, "exclude_blank": exclude_blank}}
    for n_best in transcribed(case.model, case.cfg(top, **case.several), files, timestamps=True):
        for hypothesis in n_best:
            assert len(hypothesis.word_confidence) == len(hypothesis.timestamp["word"])
            assert len(hypothesis.token_confidence) == len(hypothesis.y_sequence)
            assert all(0.0 <= value <= 1.0 for value in hypothesis.word_confidence)


def test_no_confidence_unless_asked_for(case):
    for hypothesis in case.decode():
        assert hypothesis.frame_confidence is None
        assert hypothesis.token_confidence is None
        assert hypothesis.non_blank_frame_confidence == []


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_the_search_is_the_same_with_and_without_alignments(case):
    plain = case.decode()
    aligned = case.decode({"preserve_alignments": True})
    assert [(h.text, h.score) for h in plain] == [(h.text, h.score) for h in aligned]
    assert all(hypothesis.alignments is None for hypothesis in plain)
    assert all(hypothesis.alignments is not None for hypothesis in aligned)


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_alignments_of_n_best_lists_spell_their_tokens(case):
    found = case.decode({"preserve_alignments": True}, **case.several)
    for n_best, length in zip(found, case.inputs[1].tolist(), strict=True):
        # a graph's topology may let a token follow itself without a blank, and alternatives do
        for hypothesis in n_best[:1] if case.has_words else n_best:
            assert labels_of(case, hypothesis, length) == hypothesis.y_sequence.tolist()


def labels_of(case, hypothesis, length):
    """The tokens that an alignment says; checks how it treats frames."""
    if case.is_transducer:
        if not case.model.decoding.durations:  # a blank ends every frame of an RNN-T
            assert len(hypothesis.alignments) == length
            assert all(int(frame[-1][1]) == BLANK for frame in hypothesis.alignments)
        labels = [int(label) for frame in hypothesis.alignments for _, label in frame]
        return [label for label in labels if label != BLANK]
    log_probs, labels = hypothesis.alignments
    assert log_probs.shape == (length, BLANK + 1)
    runs = torch.unique_consecutive(labels)
    return runs[runs != BLANK].tolist()
