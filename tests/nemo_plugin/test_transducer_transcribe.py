"""alsd_pp and aes_pp through NeMo's doors, beyond `test_all_strategies.py`; NeMo's are the oracle."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import numpy as np
import torch
from nemo.collections.asr.metrics.wer import word_error_rate
from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamRNNTInferConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTBPEDecodingConfig, RNNTDecoding
from omegaconf import OmegaConf, open_dict

from nemo_gpu_decoding.nemo_plugin.transducer import TransducerInfer

STRATEGIES = ["alsd_pp", "aes_pp"]
PEERS = {"alsd_pp": "malsd_batch", "aes_pp": "maes_batch"}
GREEDY = {"strategy": "greedy_batch"}


def use(model, strategy="alsd_pp", cfg=None, **beam):
    model.change_decoding_strategy(
        {"strategy": strategy, "beam": {"beam_size": 4, **beam}, **(cfg or {})}, verbose=False
    )


def lm_options(assets, weight=0.3):
    return {"ngram_lm_model": str(assets / "lm" / "tok3.arpa"), "ngram_lm_alpha": weight}


def texts(model, audio, **kwargs):
    return [result.text for result in model.transcribe(audio, verbose=False, **kwargs)]


def decode(model, encoded, **kwargs):
    return model.decoding.rnnt_decoder_predictions_tensor(*encoded, return_hypotheses=True, **kwargs)


def one_by_one(model, encoded):
    """As `decode`, each utterance alone and without padding."""
    rows = zip(encoded[0], encoded[1].tolist(), strict=True)
    return [decode(model, (row[None, :, :n], torch.tensor([n])))[0] for row, n in rows]


def wer(texts, utterances):
    return word_error_rate(texts, [utterance["text"] for utterance in utterances])


# --------------------------------------------------------------------------------- same as NeMo


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("beam_size", [2, 4])
@pytest.mark.parametrize("fusion", ["plain", "lm"])
def test_texts_times_and_scores_are_nemos_for_each_utterance(
    transducer, encoded_by, utterances, assets, strategy, beam_size, fusion
):
    if strategy == "aes_pp" and transducer.decoding.durations:
        pytest.skip("NeMo's maes_batch is for RNN-T only")
    beam = {"beam_size": beam_size, **(lm_options(assets) if fusion == "lm" else {})}
    encoded = encoded_by(transducer, utterances)
    use(transducer, PEERS[strategy], **beam)
    nemo = one_by_one(transducer, encoded)
    use(transducer, strategy, **beam)
    for a, b in zip(nemo, decode(transducer, encoded), strict=True):
        assert a.text == b.text
        if strategy == "aes_pp":  # maes_batch lets hypotheses out of a frame without a blank
            assert a.score > b.score - 1e-3
            continue
        assert a.score == pytest.approx(b.score, abs=1e-3)
        if b.token_duration and a.token_duration is None:  # NeMo 2.7 gives the frames of tokens' ends
            assert list(a.timestamp) == np.add(b.timestamp, b.token_duration).tolist()
            continue
        assert list(a.timestamp) == b.timestamp
        if b.token_duration is not None:
            assert list(a.token_duration) == b.token_duration


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_beam_of_one_is_greedy_where_posteriors_are_sharp(transducer, files, strategy):
    greedy = texts(transducer, files)
    use(transducer, strategy, beam_size=1)
    ours = texts(transducer, files)
    assert sum(a != b for a, b in zip(greedy, ours, strict=True)) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_beam_and_lm_lower_the_word_error_rate(
    transducer, encoded_by, many_utterances, assets, strategy
):
    encoded = encoded_by(transducer, many_utterances)
    rates = [wer([h.text for h in decode(transducer, encoded)], many_utterances)]
    for beam in ({}, lm_options(assets)):
        use(transducer, strategy, beam_size=8, **beam)
        rates.append(wer([h.text for h in decode(transducer, encoded)], many_utterances))
    greedy, plain, with_lm = rates
    assert with_lm < plain
    assert with_lm < 0.9 * greedy


# -------------------------------------------------------------------------------------- transcribe


# --------------------------------------------------------------------- validation, training, configs


def test_decoding_leaves_training_mode_as_it_was(transducer, encoded_by, utterances):
    encoded = encoded_by(transducer, utterances)
    use(transducer)
    expected = [h.text for h in decode(transducer, encoded)]
    transducer.decoder.train()
    transducer.joint.train()
    try:
        assert [h.text for h in decode(transducer, encoded)] == expected  # no dropout
        assert transducer.decoder.training
        assert transducer.joint.training
    finally:
        transducer.eval()


def test_a_structured_config_as_nemos_scripts_pass_it(transducer, files):
    use(transducer)
    expected = texts(transducer, files)
    cfg = OmegaConf.structured(RNNTBPEDecodingConfig(strategy="alsd_pp"))
    transducer.change_decoding_strategy(cfg, verbose=False)
    assert texts(transducer, files) == expected


@pytest.mark.parametrize("strategy", ["beam", "tsd", "alsd", "maes", "malsd_batch", "maes_batch"])
@pytest.mark.parametrize("ours", STRATEGIES)
def test_search_type_names_us_where_a_script_knows_only_nemos_strategies(transducer, strategy, ours):
    use(transducer, strategy, search_type=ours)
    assert isinstance(transducer.decoding.decoding, TransducerInfer)
    assert transducer.cfg.decoding.strategy == strategy  # as the script set it
    assert transducer.decoding.cfg.strategy == ours


@pytest.mark.parametrize(
    ("nemos", "ours", "from_the_grid"),
    [
        ("beam", "alsd_pp", {"maes_prefix_alpha": 0, "maes_expansion_gamma": 0}),
        ("maes", "alsd_pp", {"maes_prefix_alpha": 1, "maes_expansion_gamma": 2.3}),
        ("maes", "aes_pp", {"maes_prefix_alpha": 1, "maes_expansion_gamma": 4.0}),
    ],
)
def test_the_steps_of_eval_beamsearch_ngram_transducer(
    transducer, encoded_by, many_utterances, assets, nemos, ours, from_the_grid
):
    """What NeMo's script of that name does with a model for every point of its grid."""
    decoding = OmegaConf.structured(BeamRNNTInferConfig(beam_size=128))
    decoding.search_type = ours
    beam = {"beam_size": 4, "ngram_lm_alpha": 0.3, "hat_ilm_weight": 0.0 * False, **from_the_grid}
    found = {}
    for lm in (None, str(assets / "lm" / "tok3.arpa")):
        transducer.change_decoding_strategy(None, verbose=False)
        decoding = OmegaConf.merge(decoding, beam)
        decoding.return_best_hypothesis = False
        decoding.ngram_lm_model = lm
        decoding.hat_subtract_ilm = False
        with open_dict(transducer.cfg.decoding):
            transducer.cfg.decoding.strategy = nemos
            transducer.cfg.decoding.beam = decoding
        transducer.change_decoding_strategy(transducer.cfg.decoding, verbose=False)
        beams = decode(transducer, encoded_by(transducer, many_utterances))
        assert any(len(candidates) > 1 for candidates in beams)
        assert all(isinstance(c.score, float) for candidates in beams for c in candidates)
        found[lm] = wer([candidates[0].text for candidates in beams], many_utterances)
    without, with_lm = found.values()
    assert with_lm < without


def test_wrong_keys_are_named_by_change_decoding_strategy(transducer):
    with pytest.raises(ValueError, match=r"beam\.beam_width'.*valid keys: .*beam_size"):
        use(transducer, beam_width=3)


def test_a_tdt_model_without_its_durations_is_an_error(tdt_model):
    cfg = {"strategy": "alsd_pp", "model_type": "tdt"}
    vocabulary = [str(i) for i in range(128)]
    with pytest.raises(ValueError, match="durations has 0 entries, expected 5"):
        RNNTDecoding(OmegaConf.create(cfg), tdt_model.decoder, tdt_model.joint, vocabulary)


def test_character_models(hybrid_model, encoded_by, utterances):
    letters = [chr(ord("A") + i) for i in range(128)]
    beam = {"boosting_tree": {"key_phrases_list": [letters[5]]}, "boosting_tree_alpha": 20.0}
    for strategy in STRATEGIES:
        decoding = RNNTDecoding(
            OmegaConf.create({"strategy": strategy, "beam": beam, "compute_timestamps": True}),
            hybrid_model.decoder,
            hybrid_model.joint,
            letters,
        )
        for hypothesis in decoding.rnnt_decoder_predictions_tensor(
            *encoded_by(hybrid_model, utterances), return_hypotheses=True
        ):
            assert letters[5] in hypothesis.text
            assert hypothesis.text == "".join(letters[i] for i in hypothesis.y_sequence.tolist())


# ---------------------------------------------------------------------------- laziness and copies
