"""alsd_pp and aes_pp through NeMo's own doors; NeMo's decoders are the oracle."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import copy
import json
import pickle

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import numpy as np
import soundfile
import torch
from lightning.pytorch import Trainer
from nemo.collections.asr.metrics.wer import word_error_rate
from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamRNNTInferConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTBPEDecodingConfig, RNNTDecoding
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from nemo.collections.common.parts.optional_cuda_graphs import WithOptionalCudaGraphs
from omegaconf import OmegaConf, open_dict

from nemo_gpu_decoding import register, unregister
from nemo_gpu_decoding.fusion import cache
from nemo_gpu_decoding.nemo_plugin import loading
from nemo_gpu_decoding.nemo_plugin.transducer import TransducerInfer
from nemo_gpu_decoding.search.aes_pp.decoder import AESPlusPlus
from nemo_gpu_decoding.search.alsd_pp.decoder import ALSDPlusPlus

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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_phrases_pull_towards_themselves(hybrid_model, files, strategy):
    boosting = {"boosting_tree": {"key_phrases_list": ["graam"]}, "boosting_tree_alpha": 1.0}
    use(hybrid_model, strategy, beam_size=8, **boosting)
    assert texts(hybrid_model, files[0])[0].endswith("carla graam")


@pytest.mark.parametrize(("strategy", "cls"), [("alsd_pp", ALSDPlusPlus), ("aes_pp", AESPlusPlus)])
def test_hypotheses_are_those_of_the_plain_decoder(
    transducer, encoded_by, utterances, assets, strategy, cls
):
    use(transducer, strategy, **lm_options(assets))
    encoded = encoded_by(transducer, utterances)
    infer = transducer.decoding.decoding
    decoder = infer.decoder()
    assert type(decoder) is cls
    results = decoder.decode(encoded[0].transpose(1, 2), encoded[1])
    for hypothesis, nbest, length in zip(
        decode(transducer, encoded), results, encoded[1].tolist(), strict=True
    ):
        assert hypothesis.y_sequence.dtype == torch.int64
        assert hypothesis.y_sequence.tolist() == nbest.best.tokens.tolist()
        assert hypothesis.timestamp == nbest.best.frames.tolist()
        assert hypothesis.score == nbest.best.score
        assert hypothesis.score_parts == nbest.best.parts
        assert hypothesis.length == length
        assert hypothesis.text == transducer.tokenizer.ids_to_text(nbest.best.tokens.tolist())


# -------------------------------------------------------------------------------------- transcribe


def test_paths_arrays_tensors_and_manifests_give_the_same_texts(transducer, files, utterances, tmp_path):
    use(transducer)
    by_path = texts(transducer, files, batch_size=4)
    arrays = [soundfile.read(file, dtype="float32")[0] for file in files]
    assert texts(transducer, arrays, batch_size=4) == by_path
    assert texts(transducer, [torch.from_numpy(array) for array in arrays], batch_size=2) == by_path
    manifest = tmp_path / "manifest.json"
    manifest.write_text("".join(json.dumps(utterance) + "\n" for utterance in utterances))
    assert texts(transducer, str(manifest), batch_size=3) == by_path
    assert texts(transducer, files, batch_size=1) == by_path


@pytest.mark.parametrize("return_hypotheses", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_n_best_lists(transducer, files, strategy, return_hypotheses):
    use(transducer, strategy, beam_size=8, return_best_hypothesis=False, n_best=3, score_norm=False)
    results = transducer.transcribe(files, verbose=False, return_hypotheses=return_hypotheses)
    assert len(results) == len(files)
    for n_best in results:
        assert isinstance(n_best, list)
        assert not isinstance(n_best, Hypothesis)  # NeMo's scripts tell n-best results by that
        assert 1 < len(n_best) <= 3
        scores = [hypothesis.score for hypothesis in n_best]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(hypothesis.y_sequence.tolist()) for hypothesis in n_best}) == len(n_best)
        assert (n_best.text, n_best.score) == (n_best[0].text, n_best[0].score)


def test_transcribe_with_worker_processes(transducer, files):
    use(transducer)
    assert texts(transducer, files, num_workers=2) == texts(transducer, files)


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_frames_give_an_empty_text(transducer, encoded_by, utterances, strategy, timestamps):
    encoder_output, lengths = encoded_by(transducer, utterances)
    lengths[1] = 0
    confidence = {"preserve_word_confidence": True}
    use(transducer, strategy, {"compute_timestamps": timestamps, "confidence_cfg": confidence})
    result = decode(transducer, (encoder_output, lengths))
    assert result[1].text == ""
    assert result[1].word_confidence == []
    assert all(hypothesis.text for b, hypothesis in enumerate(result) if b != 1)


def test_nan_in_padding_changes_nothing_and_nan_in_frames_is_an_error(
    transducer, encoded_by, utterances
):
    use(transducer)
    encoder_output, lengths = encoded_by(transducer, utterances)
    expected = [h.text for h in decode(transducer, (encoder_output, lengths))]
    for b, length in enumerate(lengths.tolist()):
        encoder_output[b, :, length:] = float("nan")
    assert [h.text for h in decode(transducer, (encoder_output, lengths))] == expected
    encoder_output[0, 3, 1] = float("nan")
    with pytest.raises(ValueError, match=r"encoder_output\[0, 1, 3\] is nan"):
        decode(transducer, (encoder_output, lengths))


def test_bfloat16_encoder_output(transducer, encoded_by, utterances):
    use(transducer)
    encoder_output, lengths = encoded_by(transducer, utterances)
    assert all(h.text for h in decode(transducer, (encoder_output.bfloat16(), lengths)))


# --------------------------------------------------------------------- validation, training, configs


@pytest.mark.parametrize("return_best_hypothesis", [True, False])
def test_wer_in_validation(transducer, files, utterances, tmp_path, return_best_hypothesis):
    use(transducer, beam_size=8, return_best_hypothesis=return_best_hypothesis)
    expected = wer(texts(transducer, files, batch_size=6), utterances)
    transducer.wer.log_prediction = True  # reads `.text` of n-best lists, too
    manifest = tmp_path / "manifest.json"
    manifest.write_text("".join(json.dumps(utterance) + "\n" for utterance in utterances))
    data = {"manifest_filepath": str(manifest), "sample_rate": 16000, "batch_size": 6, "shuffle": False}
    transducer.setup_validation_data(data)
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (metrics,) = trainer.validate(transducer, verbose=False)
    assert metrics["val_wer"] == pytest.approx(expected)


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


def test_hooks_of_training_and_validation_find_nothing_to_switch(transducer):
    use(transducer)
    infer = transducer.decoding.decoding
    assert isinstance(infer, WithOptionalCudaGraphs)
    assert infer.disable_cuda_graphs() is False
    assert infer.maybe_enable_cuda_graphs() is False
    transducer.on_validation_epoch_start()
    transducer.on_train_epoch_start()


def test_a_structured_config_as_nemos_scripts_pass_it(transducer, files):
    use(transducer)
    expected = texts(transducer, files)
    cfg = OmegaConf.structured(RNNTBPEDecodingConfig(strategy="alsd_pp"))
    transducer.change_decoding_strategy(cfg, verbose=False)
    assert texts(transducer, files) == expected


def test_changing_the_strategy_again_and_again(transducer, files):
    greedy = texts(transducer, files[:2])
    for _ in range(3):
        for strategy in STRATEGIES:
            use(transducer, strategy)
            assert isinstance(transducer.decoding.decoding, TransducerInfer)
            assert all(texts(transducer, files[:2]))
        transducer.change_decoding_strategy(GREEDY, verbose=False)
        assert type(transducer.decoding).__module__.startswith("nemo.")
        assert texts(transducer, files[:2]) == greedy


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


def test_lm_and_phrases_are_loaded_once_and_only_when_needed(transducer, files, assets, monkeypatch):
    cache.clear()
    calls = []
    original = loading.load_ngram_lm
    monkeypatch.setattr(loading, "load_ngram_lm", lambda *a, **k: calls.append(a) or original(*a, **k))
    boosting = {"boosting_tree": {"key_phrases_list": ["graham"]}, "boosting_tree_alpha": 1.0}
    use(transducer, **boosting, **lm_options(assets))
    assert calls == []
    transducer.transcribe(files[:2], batch_size=1, verbose=False)
    first = transducer.decoding.decoding.decoder().fusion
    assert len(calls) == 1
    transducer.change_decoding_strategy(transducer.cfg.decoding, verbose=False)
    second = transducer.decoding.decoding.decoder().fusion
    assert second.lm is first.lm
    assert second.boosting is first.boosting


def test_the_decoding_can_be_copied(transducer, encoded_by, utterances, assets):
    use(transducer, **lm_options(assets))
    encoded = encoded_by(transducer, utterances)
    expected = [h.text for h in decode(transducer, encoded)]
    other = copy.deepcopy(transducer.decoding)
    assert type(other) is type(transducer.decoding)
    assert [h.text for h in other.rnnt_decoder_predictions_tensor(*encoded)] == expected


def test_hypotheses_can_be_pickled(transducer, encoded_by, utterances):
    use(transducer)
    for hypothesis in decode(transducer, encoded_by(transducer, utterances)):
        other = pickle.loads(pickle.dumps(hypothesis))
        assert other.text == hypothesis.text
        assert torch.equal(other.y_sequence, hypothesis.y_sequence)


def test_a_decoding_made_before_unregister_keeps_working(transducer, encoded_by, utterances):
    use(transducer)
    expected = [h.text for h in decode(transducer, encoded_by(transducer, utterances))]
    unregister()
    try:
        assert [h.text for h in decode(transducer, encoded_by(transducer, utterances))] == expected
    finally:
        register()
