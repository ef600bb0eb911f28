"""Times, confidence and alignments of transducers; NeMo's decoders are the oracle."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import nemo
import torch
from nemo.collections.asr.parts.utils.asr_confidence_utils import ConfidenceMethodConfig
from omegaconf import OmegaConf

from tests.nemo_plugin.usage import decoded, transcribed

STRATEGIES = ["alsd_pp", "aes_pp"]
BLANK = 128
CONFIDENCE = {
    "preserve_frame_confidence": True,
    "preserve_token_confidence": True,
    "preserve_word_confidence": True,
}


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
    peer = transcribed(transducer, cfg, files, timestamps=True, batch_size=1)
    mine = transcribed(transducer, ours(beam_size=beam_size), files, timestamps=True)
    for a, b in equal_alignments(peer, mine):
        for level in ("char", "word", "segment"):
            assert a.timestamp[level] == b.timestamp[level]
        assert b.timestamp["word"][0]["start"] is not None  # in seconds, too


def test_a_beam_of_one_has_the_times_of_greedy(hybrid_model, files):
    peer = transcribed(hybrid_model, greedy(), files, timestamps=True)
    mine = transcribed(hybrid_model, ours(beam_size=1), files, timestamps=True)
    for a, b in equal_alignments(peer, mine):
        for level in ("char", "word", "segment"):
            assert a.timestamp[level] == b.timestamp[level]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_durations_of_tdt_tokens(transducer, encoded_by, utterances, strategy):
    is_tdt = bool(transducer.decoding.durations)
    cfg = ours(strategy, top={"compute_timestamps": True})
    for hypothesis in decoded(transducer, cfg, encoded_by(transducer, utterances)):
        chars = hypothesis.timestamp["char"]
        if not is_tdt:
            assert hypothesis.token_duration is None
            assert all(entry["end_offset"] == entry["start_offset"] + 1 for entry in chars)
            continue
        ends = [entry["end_offset"] - entry["start_offset"] for entry in chars]
        assert ends == hypothesis.token_duration
        assert set(ends) <= {0, 1, 2, 3, 4}


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
    peer = decoded(transducer, greedy(preserve_alignments=True, **top), encoded)
    mine = decoded(transducer, ours(beam_size=1, top=top), encoded)
    for a, b in equal_alignments(peer, mine):
        tokens = [float(value) for value in a.token_confidence]
        assert b.token_confidence == pytest.approx(tokens, abs=1e-4)
        words = [float(value) for value in a.word_confidence]
        assert b.word_confidence == pytest.approx(words, abs=1e-4)
        assert len(b.word_confidence) == len(b.text.split())


def test_confidence_of_durations(tdt_model, encoded_by, utterances):
    top = {"confidence_cfg": {**CONFIDENCE, "exclude_blank": False, "tdt_include_duration": True}}
    encoded = encoded_by(tdt_model, utterances)
    peer = decoded(tdt_model, greedy(preserve_alignments=True, **top), encoded)
    mine = decoded(tdt_model, ours(beam_size=1, top=top), encoded)
    for a, b in equal_alignments(peer, mine):
        assert b.token_confidence == pytest.approx([float(v) for v in a.token_confidence], abs=1e-4)
        assert all(len(pair) == 2 for frame in b.frame_confidence for pair in frame)


# ------------------------------------------------------------------------------------- alignments


@pytest.mark.parametrize("where", ["beside beam", "in beam"])
def test_alignments_are_greedys(transducer, encoded_by, utterances, where):
    encoded = encoded_by(transducer, utterances)
    flag = {"preserve_alignments": True}
    peer = decoded(transducer, greedy(**flag), encoded)
    cfg = ours(beam_size=1, top=flag) if where == "beside beam" else ours(beam_size=1, **flag)
    for a, b in equal_alignments(peer, decoded(transducer, cfg, encoded)):
        assert len(a.alignments) == len(b.alignments)
        for frame_a, frame_b in zip(a.alignments, b.alignments, strict=True):
            assert [int(label) for _, label in frame_a] == [int(label) for _, label in frame_b]
            for (logits_a, _), (log_probs_b, label) in zip(frame_a, frame_b, strict=True):
                log_probs = torch.log_softmax(logits_a[: BLANK + 1], dim=-1)
                assert torch.allclose(log_probs, log_probs_b[: BLANK + 1], atol=1e-3)
                assert label.dtype == torch.int64
                assert log_probs_b.device.type == "cpu"
