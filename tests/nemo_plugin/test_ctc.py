"""flexctc_beam in NeMo's CTC models: transcription, timestamps and confidence."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecoding
from nemo.collections.asr.parts.utils.asr_confidence_utils import ConfidenceMethodConfig
from omegaconf import OmegaConf

from tests.nemo_plugin.usage import CONFIDENCE, CONFIDENCE_METHODS, GREEDY, decoded, transcribed

pytestmark = pytest.mark.slow


def flexctc(**beam):
    return {"strategy": "flexctc_beam", "beam": {"beam_size": 4, "beam_beta": 0.0, **beam}}


def test_missing_lengths_mean_all_frames(ctc_model, emissions):
    ctc_model.change_decoding_strategy(flexctc(), verbose=False)
    log_probs = emissions[0][:1, : emissions[1][0]]
    with_lengths = ctc_model.decoding.ctc_decoder_predictions_tensor(log_probs, emissions[1][:1])
    assert ctc_model.decoding.ctc_decoder_predictions_tensor(log_probs)[0].text == with_lengths[0].text


@pytest.mark.parametrize(
    "cfg", [{"preserve_alignments": True}, {"confidence_cfg": {"preserve_frame_confidence": True}}]
)
def test_labels_have_neither_alignments_nor_confidence(ctc_model, emissions, cfg):
    ctc_model.change_decoding_strategy({**flexctc(), **cfg}, verbose=False)
    with pytest.raises(ValueError, match="labels"):
        ctc_model.decoding.ctc_decoder_predictions_tensor(emissions[0].argmax(-1), emissions[1])


def test_decoder_can_be_pickled(emissions):
    decoding = CTCDecoding({"strategy": "flexctc_beam"}, [chr(65 + i) for i in range(128)])
    expected = decoding.decoding(decoder_output=emissions[0], decoder_lengths=emissions[1])[0]
    for a, b in zip(expected, pickle.loads(pickle.dumps(decoding.decoding))(*emissions)[0], strict=True):
        assert torch.equal(a.y_sequence, b.y_sequence)


def test_notes_of_the_search_reach_the_log(ctc_model, emissions, monkeypatch):
    from nemo_gpu_decoding.nemo_plugin import ctc

    ctc_model.change_decoding_strategy(flexctc(), verbose=False)
    infer = ctc_model.decoding.decoding
    decoder = infer.decoder()
    noted = [replace(nbest, notes=("a limit was reached",)) for nbest in decoder.decode(*emissions)]
    monkeypatch.setattr(decoder, "decode", lambda *args: noted)
    messages = []
    monkeypatch.setattr(ctc.logging, "warning", messages.append)
    infer(decoder_output=emissions[0], decoder_lengths=emissions[1])
    assert messages == ["a limit was reached"] * len(noted)


def test_character_model_is_boosted():
    labels = [*"abcdefghijklmnopqrstuvwxyz", " "]
    beam = {"beam_size": 2, "boosting_tree": {"key_phrases_list": ["abd"]}, "boosting_tree_alpha": 5.0}
    decoding = CTCDecoding({"strategy": "flexctc_beam", "beam": beam}, labels)
    log_probs = torch.full((1, 3, 28), -9.0)
    log_probs[0, np.arange(3), [0, 1, 2]] = np.log(0.6)
    log_probs[0, 2, 3] = np.log(0.3)
    assert decoding.ctc_decoder_predictions_tensor(log_probs, torch.tensor([3]))[0].text == "abd"


def equal_texts(greedy, ours):
    """Pairs of hypotheses with equal texts; nearly all of them are, else the test would say nothing."""
    pairs = [(a, b) for a, b in zip(greedy, ours, strict=True) if a.text == b.text]
    assert len(pairs) >= len(greedy) - 1
    return pairs


@pytest.mark.parametrize("beam_size", [1, 16])
def test_timestamps_equal_those_of_greedy(ctc_model, files, beam_size):
    greedy = transcribed(ctc_model, GREEDY, files, timestamps=True)
    for a, b in equal_texts(greedy, transcribed(ctc_model, flexctc(beam_size=beam_size), files, timestamps=True)):
        for level in ("char", "word", "segment"):
            assert a.timestamp[level] == b.timestamp[level]
        assert b.timestamp["word"][0]["start"] is not None  # in seconds, too
        # NeMo's greedy lists every frame that emits a token, we its first frame
        assert set(b.timestamp["timestep"]) <= set(a.timestamp["timestep"])


@pytest.mark.parametrize("method", CONFIDENCE_METHODS, ids=lambda method: "-".join(map(str, method.values())))
@pytest.mark.parametrize("exclude_blank", [True, False])
@pytest.mark.parametrize("aggregation", ["mean", "min"])
def test_confidence_equals_that_of_greedy(ctc_model, emissions, method, exclude_blank, aggregation):
    confidence = {**CONFIDENCE, "method_cfg": method, "exclude_blank": exclude_blank, "aggregation": aggregation}
    greedy = decoded(ctc_model, {**GREEDY, "confidence_cfg": confidence}, emissions)
    for a, b in equal_texts(greedy, decoded(ctc_model, {**flexctc(), "confidence_cfg": confidence}, emissions)):
        assert a.frame_confidence == b.frame_confidence
        assert a.token_confidence == b.token_confidence
        assert a.word_confidence == b.word_confidence
        assert a.non_blank_frame_confidence == b.non_blank_frame_confidence
        assert len(b.word_confidence) == len(b.text.split())
        assert len(b.token_confidence) == len(b.token_frames)


def test_switches_of_greedy_have_no_effect_and_wrong_methods_are_named(ctc_model, emissions):
    cfg = {**flexctc(), "confidence_cfg": {"method_cfg": {"name": "guess"}}}
    with pytest.raises(ValueError, match="guess"):
        ctc_model.change_decoding_strategy(cfg, verbose=False)
    assert OmegaConf.structured(ConfidenceMethodConfig).name == "entropy"
    greedy = {"preserve_frame_confidence": True, "compute_timestamps": True}
    for hypothesis in decoded(ctc_model, {**flexctc(), "greedy": greedy}, emissions):
        assert hypothesis.frame_confidence is None
        assert isinstance(hypothesis.timestamp, list)


@pytest.mark.parametrize("where", ["top", "beam"])
def test_alignments_equal_those_of_greedy(ctc_model, emissions, where):
    greedy = decoded(ctc_model, {**GREEDY, "preserve_alignments": True}, emissions)
    flag = {"preserve_alignments": True}
    cfg = {**flexctc(), **flag} if where == "top" else flexctc(**flag)
    for a, b in equal_texts(greedy, decoded(ctc_model, cfg, emissions)):
        assert torch.equal(a.alignments[0], b.alignments[0])
        assert torch.equal(a.alignments[1], b.alignments[1])
        assert b.alignments[1].dtype == a.alignments[1].dtype
