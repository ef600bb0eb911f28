"""flexctc_beam through NeMo's doors, beyond `test_all_strategies.py`: greedy's texts and labels."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pickle
from dataclasses import replace

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import numpy as np
import torch
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecoding, CTCDecodingConfig
from omegaconf import OmegaConf

from nemo_gpu_decoding import FlexCTCBeam, FlexCTCConfig, Fusion, load_ngram_lm


def use(model, cfg=None, **beam):
    beam = {"beam_size": 4, "beam_beta": 0.0, **beam}
    model.change_decoding_strategy(
        {"strategy": "flexctc_beam", "beam": beam, **(cfg or {})}, verbose=False
    )


def lm_options(assets):
    return {"ngram_lm_model": str(assets / "lm" / "tok3.arpa"), "ngram_lm_alpha": 0.7, "beam_beta": 1.0}


def texts(model, audio, **kwargs):
    return [result.text for result in model.transcribe(audio, verbose=False, **kwargs)]


@pytest.fixture(scope="module")
def greedy_texts(shared_ctc_model, files):
    shared_ctc_model.change_decoding_strategy({"strategy": "greedy_batch"}, verbose=False)
    return texts(shared_ctc_model, files)


def errors(hypotheses, utterances):
    pairs = zip(hypotheses, utterances, strict=True)
    return sum(
        a != b for text, u in pairs for a, b in zip(text.split(), u["text"].split(), strict=False)
    )


def test_a_beam_without_fusion_is_greedy_where_posteriors_are_sharp(ctc_model, files, greedy_texts):
    use(ctc_model, beam_size=1)
    assert texts(ctc_model, files) == greedy_texts


def test_an_lm_repairs_what_greedy_got_wrong(ctc_model, files, utterances, greedy_texts, assets):
    use(ctc_model, beam_size=8, **lm_options(assets))
    with_lm = texts(ctc_model, files)
    assert errors(with_lm, utterances) < errors(greedy_texts, utterances)


def test_hypotheses_are_those_of_the_plain_decoder(ctc_model, emissions, assets):
    use(ctc_model, beam_size=8, merge="sum", **lm_options(assets))
    log_probs, lengths = emissions
    hypotheses = ctc_model.decoding.ctc_decoder_predictions_tensor(
        log_probs, lengths, return_hypotheses=True
    )
    decoder = FlexCTCBeam(
        128,
        blank_id=128,
        config=FlexCTCConfig(beam_size=8, beam_beta=1.0, merge="sum"),
        fusion=Fusion(lm=load_ngram_lm(assets / "lm" / "tok3.arpa", 128), lm_weight=0.7),
    )
    for hypothesis, nbest, length in zip(
        hypotheses, decoder.decode(log_probs, lengths), lengths.tolist(), strict=True
    ):
        assert hypothesis.y_sequence.dtype == torch.int64
        assert hypothesis.y_sequence.tolist() == nbest.best.tokens.tolist()
        assert hypothesis.timestamp == nbest.best.frames.tolist()
        assert hypothesis.score == nbest.best.score
        assert hypothesis.score_parts == nbest.best.parts
        assert hypothesis.length == length
        assert hypothesis.text == ctc_model.tokenizer.ids_to_text(nbest.best.tokens.tolist())


def test_return_hypotheses_has_the_log_probs_as_nemo_puts_them(ctc_model, files):
    greedy = ctc_model.transcribe(files, verbose=False, return_hypotheses=True)
    use(ctc_model)
    ours = ctc_model.transcribe(files, verbose=False, return_hypotheses=True)
    for a, b in zip(greedy, ours, strict=True):
        assert torch.equal(a.y_sequence, b.y_sequence)


def test_no_lengths_means_all_frames(ctc_model, emissions):
    use(ctc_model)
    log_probs = emissions[0][:1, : emissions[1][0]]
    with_lengths = ctc_model.decoding.ctc_decoder_predictions_tensor(log_probs, emissions[1][:1])
    assert ctc_model.decoding.ctc_decoder_predictions_tensor(log_probs)[0].text == with_lengths[0].text


# ------------------------------------------------------------------------------------------ labels


def test_greedy_labels_are_collapsed_as_nemos_greedy_does(ctc_model, emissions):
    log_probs, lengths = emissions
    labels = log_probs.argmax(-1)
    decode = ctc_model.decoding.ctc_decoder_predictions_tensor
    greedy = [h.text for h in decode(labels, lengths)]
    use(ctc_model)
    decode = ctc_model.decoding.ctc_decoder_predictions_tensor
    assert [h.text for h in decode(labels, lengths)] == greedy
    use(ctc_model, return_best_hypothesis=False)
    decode = ctc_model.decoding.ctc_decoder_predictions_tensor
    assert [n_best[0].text for n_best in decode(labels, lengths)] == greedy


@pytest.mark.parametrize(
    "cfg", [{"preserve_alignments": True}, {"confidence_cfg": {"preserve_frame_confidence": True}}]
)
def test_labels_have_neither_alignments_nor_confidence(ctc_model, emissions, cfg):
    use(ctc_model, cfg)
    with pytest.raises(ValueError, match="labels"):
        ctc_model.decoding.ctc_decoder_predictions_tensor(emissions[0].argmax(-1), emissions[1])


# --------------------------------------------------------------------------------------------- WER


# ---------------------------------------------------------------------------- laziness and copies


def test_the_decoder_can_be_pickled_where_nemos_tokenizer_can(emissions):
    decoding = CTCDecoding({"strategy": "flexctc_beam"}, [chr(65 + i) for i in range(128)])
    expected = decoding.decoding(decoder_output=emissions[0], decoder_lengths=emissions[1])[0]
    other = pickle.loads(pickle.dumps(decoding.decoding))
    for a, b in zip(expected, other(*emissions)[0], strict=True):
        assert torch.equal(a.y_sequence, b.y_sequence)


def test_a_structured_config_as_nemos_scripts_pass_it(ctc_model, files, greedy_texts):
    cfg = OmegaConf.structured(CTCDecodingConfig(strategy="flexctc_beam"))
    cfg.beam.beam_size = 1
    cfg.beam.beam_beta = 0.0
    ctc_model.change_decoding_strategy(cfg, verbose=False)
    assert texts(ctc_model, files) == greedy_texts


def test_switching_back_gives_nemos_object(ctc_model, files, greedy_texts):
    use(ctc_model)
    ctc_model.change_decoding_strategy({"strategy": "greedy_batch"}, verbose=False)
    assert type(ctc_model.decoding).__module__.startswith("nemo.")
    assert texts(ctc_model, files) == greedy_texts


def test_notes_of_the_search_reach_the_log(ctc_model, emissions, monkeypatch):
    from nemo_gpu_decoding.nemo_plugin import ctc

    use(ctc_model)
    infer = ctc_model.decoding.decoding
    decoder = infer.decoder()
    noted = [replace(nbest, notes=("a limit was reached",)) for nbest in decoder.decode(*emissions)]
    monkeypatch.setattr(decoder, "decode", lambda *args: noted)
    messages = []
    monkeypatch.setattr(ctc.logging, "warning", messages.append)
    infer(decoder_output=emissions[0], decoder_lengths=emissions[1])
    assert messages == ["a limit was reached"] * len(noted)


def test_character_models():
    labels = [*"abcdefghijklmnopqrstuvwxyz", " "]
    beam = {"beam_size": 2, "boosting_tree": {"key_phrases_list": ["abd"]}, "boosting_tree_alpha": 5.0}
    decoding = CTCDecoding({"strategy": "flexctc_beam", "beam": beam}, labels)
    log_probs = torch.full((1, 3, 28), -9.0)
    log_probs[0, np.arange(3), [0, 1, 2]] = np.log(0.6)
    log_probs[0, 2, 3] = np.log(0.3)
    assert decoding.ctc_decoder_predictions_tensor(log_probs, torch.tensor([3]))[0].text == "abd"
