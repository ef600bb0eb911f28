"""flexctc_beam through NeMo's own doors: transcribe, WER, copies, streaming's label input."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import copy
import json
import pickle
from dataclasses import replace

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import numpy as np
import soundfile
import torch
from lightning.pytorch import Trainer
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecoding, CTCDecodingConfig
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from nemo.collections.common.parts.optional_cuda_graphs import WithOptionalCudaGraphs
from omegaconf import OmegaConf

from nemo_gpu_decoding import FlexCTCBeam, FlexCTCConfig, Fusion, load_ngram_lm
from nemo_gpu_decoding.fusion import cache
from nemo_gpu_decoding.nemo_plugin import loading


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


def test_paths_arrays_tensors_and_manifests_give_the_same_texts(ctc_model, files, utterances, tmp_path):
    use(ctc_model)
    by_path = texts(ctc_model, files, batch_size=4)
    arrays = [soundfile.read(file, dtype="float32")[0] for file in files]
    assert texts(ctc_model, arrays, batch_size=4) == by_path
    assert texts(ctc_model, [torch.from_numpy(array) for array in arrays], batch_size=2) == by_path
    manifest = tmp_path / "manifest.json"
    manifest.write_text("".join(json.dumps(utterance) + "\n" for utterance in utterances))
    assert texts(ctc_model, str(manifest), batch_size=3) == by_path
    assert texts(ctc_model, files[0]) == by_path[:1]
    assert texts(ctc_model, files, batch_size=1) == by_path


def test_a_beam_without_fusion_is_greedy_where_posteriors_are_sharp(ctc_model, files, greedy_texts):
    use(ctc_model, beam_size=1)
    assert texts(ctc_model, files) == greedy_texts


def test_an_lm_repairs_what_greedy_got_wrong(ctc_model, files, utterances, greedy_texts, assets):
    use(ctc_model, beam_size=8, **lm_options(assets))
    with_lm = texts(ctc_model, files)
    assert errors(with_lm, utterances) < errors(greedy_texts, utterances)


def test_phrases_pull_towards_themselves(ctc_model, files):
    use(ctc_model, beam_size=8, boosting_tree={"key_phrases_list": ["graam"]}, boosting_tree_alpha=1.0)
    assert texts(ctc_model, files[0])[0].endswith("carla graam")


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


@pytest.mark.parametrize("return_hypotheses", [True, False])
def test_n_best_lists(ctc_model, files, return_hypotheses):
    use(ctc_model, beam_size=16, return_best_hypothesis=False, n_best=3)
    results = ctc_model.transcribe(files, verbose=False, return_hypotheses=return_hypotheses)
    assert len(results) == len(files)
    for n_best in results:
        assert isinstance(n_best, list)
        assert not isinstance(n_best, Hypothesis)  # NeMo's scripts tell n-best results by that
        assert len(n_best) == 3
        assert n_best[0].score >= n_best[1].score >= n_best[2].score
        assert len({hypothesis.text for hypothesis in n_best}) == 3
        assert n_best.text == n_best[0].text
        assert n_best.score == n_best[0].score
        assert all(hypothesis.y_sequence.ndim == 1 for hypothesis in n_best)
    if return_hypotheses:  # NeMo leaves the log-probs there
        assert results[0].y_sequence.ndim == 2
        assert results[0].alignments is results[0].y_sequence


def test_return_hypotheses_has_the_log_probs_as_nemo_puts_them(ctc_model, files):
    greedy = ctc_model.transcribe(files, verbose=False, return_hypotheses=True)
    use(ctc_model)
    ours = ctc_model.transcribe(files, verbose=False, return_hypotheses=True)
    for a, b in zip(greedy, ours, strict=True):
        assert torch.equal(a.y_sequence, b.y_sequence)


def test_transcribe_with_worker_processes(ctc_model, files, greedy_texts):
    use(ctc_model, beam_size=1)
    assert texts(ctc_model, files, num_workers=2) == greedy_texts


def test_bfloat16_log_probs(ctc_model, emissions):
    use(ctc_model)
    log_probs, lengths = emissions
    result = ctc_model.decoding.ctc_decoder_predictions_tensor(log_probs.bfloat16(), lengths)
    assert len(result) == len(lengths)
    assert all(hypothesis.text for hypothesis in result)


def test_no_lengths_means_all_frames(ctc_model, emissions):
    use(ctc_model)
    log_probs = emissions[0][:1, : emissions[1][0]]
    with_lengths = ctc_model.decoding.ctc_decoder_predictions_tensor(log_probs, emissions[1][:1])
    assert ctc_model.decoding.ctc_decoder_predictions_tensor(log_probs)[0].text == with_lengths[0].text


def test_zero_frames_give_an_empty_text_with_and_without_timestamps(ctc_model, emissions):
    log_probs, lengths = emissions[0][:2], torch.tensor([0, int(emissions[1][1])])
    for timestamps in (False, True):
        use(ctc_model, {"compute_timestamps": timestamps})
        empty, full = ctc_model.decoding.ctc_decoder_predictions_tensor(log_probs, lengths)
        assert empty.text == ""
        assert full.text


def test_nan_in_padding_changes_nothing_and_nan_in_frames_is_an_error(ctc_model, emissions):
    use(ctc_model)
    log_probs, lengths = emissions
    padded = torch.nn.functional.pad(log_probs, (0, 0, 0, 2), value=float("nan"))
    decode = ctc_model.decoding.ctc_decoder_predictions_tensor
    assert [h.text for h in decode(padded, lengths)] == [h.text for h in decode(log_probs, lengths)]
    log_probs = log_probs.clone()
    log_probs[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"log_probs\[0, 0"):
        decode(log_probs, lengths)


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


@pytest.mark.parametrize("return_best_hypothesis", [True, False])
def test_wer_in_validation(
    ctc_model, utterances, greedy_texts, assets, tmp_path, return_best_hypothesis
):
    use(ctc_model, beam_size=8, return_best_hypothesis=return_best_hypothesis, **lm_options(assets))
    ctc_model.wer.log_prediction = True  # reads `.text` of n-best lists, too
    manifest = tmp_path / "manifest.json"
    manifest.write_text("".join(json.dumps(utterance) + "\n" for utterance in utterances))
    data = {"manifest_filepath": str(manifest), "sample_rate": 16000, "batch_size": 6, "shuffle": False}
    ctc_model.setup_validation_data(data)
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (metrics,) = trainer.validate(ctc_model, verbose=False)
    words = sum(len(utterance["text"].split()) for utterance in utterances)
    assert round(metrics["val_wer"] * words) < errors(greedy_texts, utterances)


# ---------------------------------------------------------------------------- laziness and copies


def test_lm_and_phrases_are_loaded_once_and_only_when_needed(ctc_model, files, assets, monkeypatch):
    cache.clear()
    calls = []
    original = loading.load_ngram_lm
    monkeypatch.setattr(loading, "load_ngram_lm", lambda *a, **k: calls.append(a) or original(*a, **k))
    boosting = {"key_phrases_file": str(assets / "phrases.txt")}
    use(ctc_model, boosting_tree=boosting, boosting_tree_alpha=1.0, **lm_options(assets))
    assert calls == []
    ctc_model.transcribe(files[:2], batch_size=1, verbose=False)
    first = ctc_model.decoding.decoding.decoder().fusion
    assert len(calls) == 1
    ctc_model.transcribe(files[:1], timestamps=True, verbose=False)  # makes a new decoding object
    second = ctc_model.decoding.decoding.decoder().fusion
    assert second.lm is first.lm
    assert second.boosting is first.boosting


def test_the_decoding_can_be_copied(ctc_model, emissions, assets):
    use(ctc_model, **lm_options(assets))
    expected = [h.text for h in ctc_model.decoding.ctc_decoder_predictions_tensor(*emissions)]
    other = copy.deepcopy(ctc_model.decoding)
    assert type(other) is type(ctc_model.decoding)
    assert [h.text for h in other.ctc_decoder_predictions_tensor(*emissions)] == expected


def test_the_decoder_can_be_pickled_where_nemos_tokenizer_can(emissions):
    decoding = CTCDecoding({"strategy": "flexctc_beam"}, [chr(65 + i) for i in range(128)])
    expected = decoding.decoding(decoder_output=emissions[0], decoder_lengths=emissions[1])[0]
    other = pickle.loads(pickle.dumps(decoding.decoding))
    for a, b in zip(expected, other(*emissions)[0], strict=True):
        assert torch.equal(a.y_sequence, b.y_sequence)


def test_hooks_of_training_and_validation_find_nothing_to_switch(ctc_model):
    use(ctc_model)
    infer = ctc_model.decoding.decoding
    assert isinstance(infer, WithOptionalCudaGraphs)
    assert infer.disable_cuda_graphs() is False
    assert infer.maybe_enable_cuda_graphs() is False
    ctc_model.on_validation_epoch_start()
    ctc_model.on_train_epoch_start()


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
    from nemo_gpu_decoding.nemo_plugin import ctc_infer

    use(ctc_model)
    infer = ctc_model.decoding.decoding
    decoder = infer.decoder()
    noted = [replace(nbest, notes=("a limit was reached",)) for nbest in decoder.decode(*emissions)]
    monkeypatch.setattr(decoder, "decode", lambda *args: noted)
    messages = []
    monkeypatch.setattr(ctc_infer.logging, "warning", messages.append)
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
