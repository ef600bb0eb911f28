"""Times, confidence and alignments of transducers; NeMo's decoders are the oracle."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import nemo
import numpy as np
import torch
from nemo.collections.asr.parts.utils.asr_confidence_utils import ConfidenceMethodConfig
from omegaconf import OmegaConf

STRATEGIES = ["alsd_pp", "aes_pp"]
BLANK = 128
CONFIDENCE = {
    "preserve_frame_confidence": True,
    "preserve_token_confidence": True,
    "preserve_word_confidence": True,
}


def decode(model, cfg, encoded):
    """Hypotheses of the model's decoding object on stored encoder output."""
    model.change_decoding_strategy(cfg, verbose=False)
    return model.decoding.rnnt_decoder_predictions_tensor(*encoded, return_hypotheses=True)


def transcribe(model, cfg, files, **kwargs):
    model.change_decoding_strategy(cfg, verbose=False)
    return model.transcribe(files, verbose=False, **kwargs)


def ours(strategy="alsd_pp", top=None, **beam):
    return {"strategy": strategy, "beam": {"beam_size": 4, **beam}, **(top or {})}


def greedy(**top):
    return {"strategy": "greedy_batch", **top}


def equal_alignments(greedy_hypotheses, our_hypotheses):
    """Pairs of hypotheses with equal texts and frames; there are some, else a test would say nothing."""
    pairs = [
        (a, b)
        for a, b in zip(greedy_hypotheses, our_hypotheses, strict=True)
        if a.text == b.text and frames_of(a) == frames_of(b)
    ]
    assert len(pairs) >= 2
    return pairs


def frames_of(hypothesis):
    stamps = hypothesis.timestamp
    return [int(frame) for frame in (stamps["timestep"] if isinstance(stamps, dict) else stamps)]


# ------------------------------------------------------------------------------------------ times


@pytest.mark.parametrize("beam_size", [2, 4])
def test_transcribe_with_timestamps_gives_the_times_of_malsd_batch(transducer, files, beam_size):
    if transducer.decoding.durations and nemo.__version__.startswith("2."):
        pytest.skip("malsd_batch of NeMo 2 gives no durations, and fails with timestamps")
    cfg = {"strategy": "malsd_batch", "beam": {"beam_size": beam_size}}
    peer = transcribe(transducer, cfg, files, timestamps=True, batch_size=1)
    mine = transcribe(transducer, ours(beam_size=beam_size), files, timestamps=True)
    for a, b in equal_alignments(peer, mine):
        for level in ("char", "word", "segment"):
            assert a.timestamp[level] == b.timestamp[level]
        assert b.timestamp["word"][0]["start"] is not None  # in seconds, too


def test_a_beam_of_one_has_the_times_of_greedy(hybrid_model, files):
    peer = transcribe(hybrid_model, greedy(), files, timestamps=True)
    mine = transcribe(hybrid_model, ours(beam_size=1), files, timestamps=True)
    for a, b in equal_alignments(peer, mine):
        for level in ("char", "word", "segment"):
            assert a.timestamp[level] == b.timestamp[level]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["beside beam", "in beam"])
def test_compute_timestamps_in_the_config(transducer, encoded_by, utterances, strategy, where):
    flag = {"compute_timestamps": True}
    cfg = ours(strategy, top=flag) if where == "beside beam" else ours(strategy, **flag)
    for hypothesis in decode(transducer, cfg, encoded_by(transducer, utterances)):
        words = [entry["word"] for entry in hypothesis.timestamp["word"]]
        assert " ".join(words) == hypothesis.text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_durations_of_tdt_tokens(transducer, encoded_by, utterances, strategy):
    is_tdt = bool(transducer.decoding.durations)
    cfg = ours(strategy, top={"compute_timestamps": True})
    for hypothesis in decode(transducer, cfg, encoded_by(transducer, utterances)):
        chars = hypothesis.timestamp["char"]
        if not is_tdt:
            assert hypothesis.token_duration is None
            assert all(entry["end_offset"] == entry["start_offset"] + 1 for entry in chars)
            continue
        ends = [entry["end_offset"] - entry["start_offset"] for entry in chars]
        assert ends == hypothesis.token_duration
        assert set(ends) <= {0, 1, 2, 3, 4}


def test_without_timestamps_a_start_frame_per_token_remains(transducer, encoded_by, utterances):
    for hypothesis in decode(transducer, ours(), encoded_by(transducer, utterances)):
        assert len(hypothesis.timestamp) == len(hypothesis.y_sequence)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_n_best_with_timestamps_in_seconds(transducer, files, strategy):
    cfg = ours(strategy, beam_size=8, return_best_hypothesis=False, n_best=3)
    best_only = transcribe(transducer, ours(strategy, beam_size=8), files, timestamps=True)
    for n_best, best in zip(transcribe(transducer, cfg, files, timestamps=True), best_only, strict=True):
        assert isinstance(n_best, list)
        assert len(n_best) > 1
        assert n_best[0].text == best.text
        assert n_best[0].timestamp["word"] == best.timestamp["word"]
        for hypothesis in n_best:
            words = hypothesis.timestamp["word"]
            assert " ".join(entry["word"] for entry in words) == hypothesis.text
            assert all(0 <= entry["start"] <= entry["end"] for entry in words)


# ------------------------------------------------------------------------------------- confidence


@pytest.mark.parametrize(
    "method",
    [
        {"name": "max_prob", "alpha": 1.0},
        {"name": "max_prob", "alpha": 0.5},
        {"name": "entropy", "entropy_type": "tsallis", "alpha": 0.33, "entropy_norm": "exp"},
        {"name": "entropy", "entropy_type": "gibbs", "alpha": 1.0, "entropy_norm": "lin"},
        {"name": "entropy", "entropy_type": "renyi", "alpha": 0.5, "entropy_norm": "exp"},
    ],
    ids=lambda method: "-".join(str(value) for value in method.values()),
)
@pytest.mark.parametrize("exclude_blank", [True, False])
def test_confidence_is_greedys_where_alignments_are(
    transducer, encoded_by, utterances, method, exclude_blank
):
    confidence = {
        **CONFIDENCE, "exclude_blank": exclude_blank, "method_cfg": ConfidenceMethodConfig(**method)
    }  # fmt: skip
    top = OmegaConf.to_container(OmegaConf.create({"confidence_cfg": confidence}))
    encoded = encoded_by(transducer, utterances)
    # without alignments NeMo's greedy fails for TDT here
    peer = decode(transducer, greedy(preserve_alignments=True, **top), encoded)
    mine = decode(transducer, ours(beam_size=1, top=top), encoded)
    for a, b in equal_alignments(peer, mine):
        tokens = [float(value) for value in a.token_confidence]
        assert b.token_confidence == pytest.approx(tokens, abs=1e-4)
        words = [float(value) for value in a.word_confidence]
        assert b.word_confidence == pytest.approx(words, abs=1e-4)
        assert len(b.word_confidence) == len(b.text.split())


def test_confidence_of_durations(tdt_model, encoded_by, utterances):
    top = {"confidence_cfg": {**CONFIDENCE, "exclude_blank": False, "tdt_include_duration": True}}
    encoded = encoded_by(tdt_model, utterances)
    peer = decode(tdt_model, greedy(preserve_alignments=True, **top), encoded)
    mine = decode(tdt_model, ours(beam_size=1, top=top), encoded)
    for a, b in equal_alignments(peer, mine):
        assert b.token_confidence == pytest.approx([float(v) for v in a.token_confidence], abs=1e-4)
        assert all(len(pair) == 2 for frame in b.frame_confidence for pair in frame)


@pytest.mark.parametrize("exclude_blank", [True, False])
def test_confidence_together_with_timestamps_and_n_best(transducer, files, exclude_blank):
    top = {"confidence_cfg": {**CONFIDENCE, "exclude_blank": exclude_blank}}
    cfg = ours(top=top, return_best_hypothesis=False)
    for n_best in transcribe(transducer, cfg, files, timestamps=True):
        for hypothesis in n_best:
            assert len(hypothesis.word_confidence) == len(hypothesis.timestamp["word"])
            assert len(hypothesis.token_confidence) == len(hypothesis.y_sequence)
            assert all(0.0 <= value <= 1.0 for value in hypothesis.word_confidence)


# ------------------------------------------------------------------------------------- alignments


@pytest.mark.parametrize("where", ["beside beam", "in beam"])
def test_alignments_are_greedys(transducer, encoded_by, utterances, where):
    encoded = encoded_by(transducer, utterances)
    flag = {"preserve_alignments": True}
    peer = decode(transducer, greedy(**flag), encoded)
    cfg = ours(beam_size=1, top=flag) if where == "beside beam" else ours(beam_size=1, **flag)
    for a, b in equal_alignments(peer, decode(transducer, cfg, encoded)):
        assert len(a.alignments) == len(b.alignments)
        for frame_a, frame_b in zip(a.alignments, b.alignments, strict=True):
            assert [int(label) for _, label in frame_a] == [int(label) for _, label in frame_b]
            for (logits_a, _), (log_probs_b, label) in zip(frame_a, frame_b, strict=True):
                log_probs = torch.log_softmax(logits_a[: BLANK + 1], dim=-1)
                assert torch.allclose(log_probs, log_probs_b[: BLANK + 1], atol=1e-3)
                assert label.dtype == torch.int64
                assert log_probs_b.device.type == "cpu"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_alignments_of_n_best_lists_spell_their_tokens(transducer, encoded_by, utterances, strategy):
    cfg = ours(strategy, preserve_alignments=True, return_best_hypothesis=False)
    is_rnnt = not transducer.decoding.durations
    encoded = encoded_by(transducer, utterances)
    for n_best, length in zip(decode(transducer, cfg, encoded), encoded[1].tolist(), strict=True):
        for hypothesis in n_best:
            labels = np.array([int(label) for frame in hypothesis.alignments for _, label in frame])
            assert labels[labels != BLANK].tolist() == hypothesis.y_sequence.tolist()
            if is_rnnt:
                assert len(hypothesis.alignments) == length
                assert all(int(frame[-1][1]) == BLANK for frame in hypothesis.alignments)


def test_the_search_is_the_same_with_and_without_alignments(transducer, encoded_by, utterances):
    encoded = encoded_by(transducer, utterances)
    plain = decode(transducer, ours(), encoded)
    aligned = decode(transducer, ours(preserve_alignments=True), encoded)
    assert [(h.text, h.score) for h in plain] == [(h.text, h.score) for h in aligned]
    assert plain[0].alignments is None
