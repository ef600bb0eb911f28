"""Times, confidence and alignments of CTC: NeMo's greedy is the oracle wherever texts are equal."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import torch
from nemo.collections.asr.parts.utils.asr_confidence_utils import ConfidenceMethodConfig
from omegaconf import OmegaConf

from tests.nemo_plugin.usage import decoded, transcribed

GREEDY = {"strategy": "greedy_batch"}
CONFIDENCE = {
    "preserve_frame_confidence": True,
    "preserve_token_confidence": True,
    "preserve_word_confidence": True,
}


def flexctc(**beam):
    return {"strategy": "flexctc_beam", "beam": {"beam_size": 4, "beam_beta": 0.0, **beam}}


def equal_texts(greedy, ours):
    """Pairs of hypotheses with equal texts; nearly all of them are, else the test would say nothing."""
    pairs = [(a, b) for a, b in zip(greedy, ours, strict=True) if a.text == b.text]
    assert len(pairs) >= len(greedy) - 1
    return pairs


@pytest.mark.parametrize("beam_size", [1, 4, 16])
def test_transcribe_with_timestamps_gives_greedys_times(ctc_model, files, beam_size):
    greedy = transcribed(ctc_model, GREEDY, files, timestamps=True)
    ours = transcribed(ctc_model, flexctc(beam_size=beam_size), files, timestamps=True)
    for a, b in equal_texts(greedy, ours):
        for level in ("char", "word", "segment"):
            assert a.timestamp[level] == b.timestamp[level]
        assert b.timestamp["word"][0]["start"] is not None  # in seconds, too
        # NeMo's greedy lists every frame that emits a token, we its first frame
        assert set(b.timestamp["timestep"]) <= set(a.timestamp["timestep"])


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
@pytest.mark.parametrize("aggregation", ["mean", "min"])
def test_confidence_equals_greedys(ctc_model, emissions, method, exclude_blank, aggregation):
    confidence = {
        **CONFIDENCE,
        "method_cfg": method,
        "exclude_blank": exclude_blank,
        "aggregation": aggregation,
    }
    greedy = decoded(ctc_model, {**GREEDY, "confidence_cfg": confidence}, emissions)
    ours = decoded(ctc_model, {**flexctc(), "confidence_cfg": confidence}, emissions)
    for a, b in equal_texts(greedy, ours):
        assert a.frame_confidence == b.frame_confidence
        assert a.token_confidence == b.token_confidence
        assert a.word_confidence == b.word_confidence
        assert a.non_blank_frame_confidence == b.non_blank_frame_confidence
        assert len(b.word_confidence) == len(b.text.split())
        assert len(b.token_confidence) == len(b.token_frames)


def test_confidence_of_n_best_lists(ctc_model, emissions):
    n_best = {**flexctc(return_best_hypothesis=False), "confidence_cfg": CONFIDENCE}
    single = decoded(ctc_model, {**flexctc(), "confidence_cfg": CONFIDENCE}, emissions)
    for hypotheses, best in zip(decoded(ctc_model, n_best, emissions), single, strict=True):
        assert hypotheses[0].word_confidence == best.word_confidence
        for hypothesis in hypotheses:
            assert len(hypothesis.word_confidence) == len(hypothesis.text.split())


def test_a_wrong_confidence_method_is_nemos_error(ctc_model):
    cfg = {**flexctc(), "confidence_cfg": {"method_cfg": {"name": "guess"}}}
    with pytest.raises(ValueError, match="guess"):
        ctc_model.change_decoding_strategy(cfg, verbose=False)
    assert OmegaConf.structured(ConfidenceMethodConfig).name == "entropy"


def test_greedys_own_switches_do_not_leak_into_us(ctc_model, emissions):
    greedy = {
        "preserve_frame_confidence": True,
        "compute_timestamps": True,
        "ngram_lm_model": "nowhere.arpa",
    }
    for hypothesis in decoded(ctc_model, {**flexctc(), "greedy": greedy}, emissions):
        assert hypothesis.frame_confidence is None
        assert isinstance(hypothesis.timestamp, list)


# ------------------------------------------------------------------------------------- alignments


@pytest.mark.parametrize("where", ["top", "beam"])
def test_alignments_equal_greedys(ctc_model, emissions, where):
    greedy = decoded(ctc_model, {**GREEDY, "preserve_alignments": True}, emissions)
    flag = {"preserve_alignments": True}
    cfg = {**flexctc(), **flag} if where == "top" else flexctc(**flag)
    for a, b in equal_texts(greedy, decoded(ctc_model, cfg, emissions)):
        assert torch.equal(a.alignments[0], b.alignments[0])
        assert torch.equal(a.alignments[1], b.alignments[1])
        assert b.alignments[1].dtype == a.alignments[1].dtype


def test_the_alignments_switch_may_be_turned_later(ctc_model, emissions):
    plain = decoded(ctc_model, flexctc(), emissions)
    assert plain[0].alignments is None
    ctc_model.decoding.preserve_alignments = True
    result = ctc_model.decoding.ctc_decoder_predictions_tensor(*emissions, return_hypotheses=True)
    assert len(result[0].alignments[1]) == emissions[1][0]
