"""NeMo's streaming with our strategies: `conformer_stream_step` and the pipelines of its inference package."""

import json
import re
import runpy
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
from nemo.collections.asr.inference.factory.pipeline_builder import PipelineBuilder
from nemo.collections.asr.inference.streaming.framing.request_options import ASRRequestOptions
from nemo.collections.asr.models import ASRModel
from nemo.collections.asr.parts.utils.streaming_utils import (
    BatchedFrameASRRNNT,
    CacheAwareStreamingAudioBuffer,
    FrameBatchASR,
)
from nemo.utils import logging
from omegaconf import OmegaConf

from nemo_gpu_decoding import register
from nemo_gpu_decoding.live.slots import Slots
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.nemo_plugin.ctc import CTCInfer
from nemo_gpu_decoding.nemo_plugin.streaming import hooks, searching_pipelines
from tests.assets import ASSETS, quoted, speech
from tests.nemo_plugin.usage import one_shot, texts, write_manifest

pytestmark = pytest.mark.slow

CTC, HYBRID, CAUSAL = (str(ASSETS / "models" / f"self_{name}.nemo") for name in ("ctc", "hybrid_rnnt", "streaming"))
LM = {"ngram_lm_model": str(ASSETS / "lm" / "tok3.arpa"), "ngram_lm_alpha": 0.5, "beam_size": 16, "beam_beta": 1.0}
FLEXCTC = {"strategy": "flexctc_beam", "beam": LM}
WORD_GRAPH = {"strategy": "cuda_wfst", "wfst": {"arpa_lm_path": str(ASSETS / "lm" / "word3.arpa")}}


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.fixture(params=["buffered", "cache_aware"])
def ctc_pipeline(request):
    files = {"buffered": CTC, "cache_aware": CAUSAL}
    return lambda decoding, **options: pipeline(request.param, files[request.param], decoding, **options)


@pytest.fixture(params=["buffered", "stateful", "cache_aware"])
def rnnt_pipeline(request):
    if request.param == "cache_aware":
        return lambda decoding, **options: pipeline("cache_aware", CAUSAL, decoding, head="rnnt", **options)
    more = {"head": "rnnt", "stateful": request.param == "stateful"}
    return lambda decoding, **options: pipeline("buffered", HYBRID, decoding, **more, **options)


def pipeline(kind, model, decoding, **options):
    return PipelineBuilder.build_pipeline(OmegaConf.create(config_of(kind, model, decoding, **options)))


def config_of(kind, model, decoding=None, head="ctc", eou=-1, tail=False, stateful=False, rules=None):
    """The config of a pipeline, like those of NeMo's examples."""
    config = {
        "asr": {"model_name": model, "device": "cpu", "device_id": 0, "compute_dtype": "float32", "use_amp": False},
        "confidence": {
            "exclude_blank": True, "aggregation": "mean",
            "method_cfg": {"name": "entropy", "entropy_type": "tsallis", "alpha": 0.5, "entropy_norm": "exp"},
        },
        "itn": {"left_padding_size": 4, "batch_size": 32, "n_jobs": 1},
        "endpointing": {"stop_history_eou": eou, "residue_tokens_at_end": 2},
        "streaming": {
            "sample_rate": 16000, "batch_size": 3, "left_padding_size": 1.6, "right_padding_size": 1.6,
            "chunk_size": 0.8, "word_boundary_tolerance": 4, "request_type": "frame", "padding_mode": "right",
            "att_context_size": None, "use_cache": True, "use_feat_cache": True, "num_slots": 6,
            "stateful": stateful,
        },
        "matmul_precision": "high", "log_level": logging.ERROR, "pipeline_type": kind, "asr_decoding_type": head,
        "enable_pnc": False,  # of NeMo 2.7
        "enable_itn": False, "enable_nmt": False, "asr_output_granularity": "word", "cache_dir": None, "lang": None,
        "return_tail_result": tail,
    }  # fmt: skip
    if decoding is not None:
        config["asr"]["decoding"] = decoding
    if rules is not None:
        config["endpointing"]["rules"] = rules
    return config


def texts_of(found) -> list[str]:
    return [row["text"] for row in found.values()]


@pytest.mark.parametrize("decoding", [FLEXCTC, WORD_GRAPH], ids=["flexctc_beam", "cuda_wfst"])
def test_pipelines_give_the_results_of_the_search(ctc_pipeline, decoding, files, pushed):
    if decoding is WORD_GRAPH:
        pytest.importorskip("kaldifst")
    greedy = texts_of(ctc_pipeline(None).run(files))
    ours = ctc_pipeline(decoding)
    found = texts_of(ours.run(files))
    assert found != greedy
    infer = hooks.search_of(ours.asr_model.asr_model, CTCInfer)
    expected = sorted(ours.tokenizer.ids_to_text(tokens).strip() for tokens in one_shot(infer, pushed))
    assert len(expected) == len(files)
    assert sorted(found) == expected


def test_end_of_utterance_returns_its_best_hypothesis(ctc_pipeline, pauses, pushed):
    ours = ctc_pipeline(FLEXCTC, eou=80)
    found = ours.run(pauses)
    expected = one_shot(hooks.search_of(ours.asr_model.asr_model, CTCInfer), pushed)
    assert len(expected) > 2
    words = [word for tokens in expected for word in ours.tokenizer.ids_to_text(tokens).split()]
    assert sorted("".join(words)) == sorted("".join(texts_of(found)).replace(" ", ""))
    for row in found.values():
        starts = [word.start for word in row["segments"]]
        assert starts == sorted(starts)
        assert all(0 < word.conf <= 1 for word in row["segments"])


# What examples/asr/asr_streaming_inference/asr_streaming_infer.py of NeMo does; the wheel does not have it.
SCRIPT = """
import hydra
from nemo.collections.asr.inference.factory.pipeline_builder import PipelineBuilder
from nemo.collections.asr.inference.utils.manifest_io import dump_output, prepare_audio_data


@hydra.main(version_base=None)
def main(cfg):
    files, manifest, options, order = prepare_audio_data(cfg.audio_file, sort_by_duration=True)
    output = PipelineBuilder.build_pipeline(cfg).run(files, options=options)
    dump_output(output, cfg.output_filename, cfg.output_dir, manifest, order)


main()
"""


MODELS = {"ctc": CTC, "rnnt": HYBRID}
# weights of the LM and of phrases, and what else a beam needs
FLEXCTC_BEAM = "+asr.decoding.strategy=flexctc_beam", "+asr.decoding.beam.beam_size=64"
SCRIPTED = {
    ("buffered", "ctc"): (0.8, 3.5, *FLEXCTC_BEAM, "+asr.decoding.beam.beam_beta=1.0"),
    ("buffered", "rnnt"): (0.5, 1.0, "asr.decoding.strategy=alsd_pp", "+asr.decoding.beam.beam_size=8"),
    ("cache_aware", "ctc"): (0.65, 1.5, *FLEXCTC_BEAM, "+asr.decoding.beam.beam_beta=1.5"),
    ("cache_aware", "rnnt"): (0.4, 1.0, "asr.decoding.strategy=alsd_pp", "+asr.decoding.beam.beam_size=8"),
}


def script_texts(folder, monkeypatch, manifest, kind, head, overrides=()) -> list[str]:
    """Transcripts of a manifest by the script, with overrides alone. The config has the values of NeMo's own."""
    # `strategy` is new to the config for CTC, NeMo's for RNN-T has it
    greedy = {"strategy": "greedy_batch", "greedy": {"max_symbols": 10}} if head == "rnnt" else None
    model, eou = (CAUSAL, -1) if kind == "cache_aware" else (MODELS[head], 800)
    config = config_of(kind, model, greedy, head=head, eou=eou, stateful=kind == "buffered")
    config["streaming"].update(batch_size=16, num_slots=16)
    if kind == "buffered":
        config["streaming"].update(chunk_size=4.8, request_type="feature_buffer")
    output = folder / "output.json"
    (folder / "script.py").write_text(SCRIPT)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
    where = f"--config-path={folder}", "--config-name=config", f"hydra.run.dir={quoted(folder)}"
    paths = {"audio_file": manifest, "output_filename": output, "output_dir": folder / "out"}
    paths = [f"+{key}={quoted(path)}" for key, path in paths.items()]
    monkeypatch.setattr("sys.argv", ["script.py", *where, *paths, *overrides])
    runpy.run_path(str(folder / "script.py"), run_name="__main__")
    return [json.loads(line)["pred_text"] for line in output.read_text().splitlines()]


@pytest.mark.parametrize(("kind", "head"), SCRIPTED)
def test_streaming_script_searches_by_overrides_alone(kind, head, tmp_path, monkeypatch, pushed):
    entries = speech()[::2]
    manifest = write_manifest(tmp_path / "test.json", entries)
    greedy = script_texts(tmp_path, monkeypatch, manifest, kind, head)
    assert not pushed
    pipelines_built, build = [], PipelineBuilder.build_pipeline
    monkeypatch.setattr(
        PipelineBuilder, "build_pipeline", lambda cfg: pipelines_built.append(build(cfg)) or pipelines_built[0]
    )
    lm_weight, boosting_weight, *beam = SCRIPTED[kind, head]
    fused = {
        "ngram_lm_model": quoted(ASSETS / "lm" / "tok3.arpa"), "ngram_lm_alpha": lm_weight,
        "boosting_tree.key_phrases_file": quoted(ASSETS / "phrases.txt"), "boosting_tree_alpha": boosting_weight,
    }  # fmt: skip
    if head == "ctc":
        fused["beam_threshold"] = 30.0
    overrides = [*beam, *(f"+asr.decoding.beam.{key}={value}" for key, value in fused.items())]
    ours = script_texts(tmp_path, monkeypatch, manifest, kind, head, overrides)
    references = [entry["text"] for entry in entries]
    assert word_errors(references, ours).wer < 0.75 * word_errors(references, greedy).wer
    (searching,) = pipelines_built
    whole = one_shot(searching.infer, pushed)
    assert len(whole) >= len(entries)
    expected = "".join(sorted("".join(searching.tokenizer.ids_to_text(tokens).split()) for tokens in whole))
    assert sorted(expected) == sorted("".join("".join(text.split()) for text in ours))
    if len(whole) == len(entries):  # or else some transcripts are of several utterances
        texts_of_whole = [searching.tokenizer.ids_to_text(tokens).split() for tokens in whole]
        assert sorted(text.split() for text in ours) == sorted(texts_of_whole)


@pytest.mark.parametrize("request_type", ["frame", "feature_buffer"])
@pytest.mark.parametrize("head", ["ctc", "rnnt"])
def test_padding_around_a_buffered_stream_is_not_read(head, request_type, files, pushed):
    decoding = {"strategy": "alsd_pp" if head == "rnnt" else "flexctc_beam", "beam": {"beam_size": 4}}
    config = config_of("buffered", MODELS[head], decoding, head=head, stateful=True)
    config["streaming"].update(request_type=request_type)
    found = PipelineBuilder.build_pipeline(OmegaConf.create(config)).run(files[:4])
    seconds = sorted(soundfile.info(file).duration for file in files[:4])
    frames = sorted(sum(map(len, chunks)) for chunks in pushed.values())
    assert len(found) == len(frames) == 4
    assert np.allclose(frames, np.asarray(seconds) / 0.08, atol=2)


RULES = {"rule1": None, "rule2": {"min_trailing_silence": 0.4, "max_relative_cost": 1e9}}


@pytest.fixture
def pauses(files, tmp_path) -> list[str]:
    """Two recordings of three sentences, with pauses between them."""
    quiet, paths = np.zeros(32000, np.float32), []
    for n in range(2):
        said = [soundfile.read(file, dtype="float32")[0] for file in files[3 * n : 3 * n + 3]]
        paths.append(str(tmp_path / f"{n}.wav"))
        soundfile.write(paths[-1], np.concatenate([said[0], quiet, said[1], quiet, said[2]]), 16000)
    return paths


@pytest.fixture
def ended(monkeypatch):
    progresses, find = [], searching_pipelines.find_endpoint

    def recorded(progress, rules):
        rule = find(progress, rules)
        if rule is not None:
            progresses.append(progress)
        return rule

    monkeypatch.setattr(searching_pipelines, "find_endpoint", recorded)
    return progresses


@pytest.mark.parametrize("decoding", [FLEXCTC, WORD_GRAPH], ids=["flexctc_beam", "cuda_wfst"])
def test_utterances_end_by_kaldis_rules(ctc_pipeline, decoding, pauses, pushed, ended):
    if decoding is WORD_GRAPH:
        pytest.importorskip("kaldifst")
    ours = ctc_pipeline(decoding, eou=1, rules=RULES)
    transcripts = ours.run(pauses)
    assert len(ended) > 2
    assert all(progress.contains_speech and progress.trailing_silence >= 0.4 for progress in ended)
    assert len(pushed) == len(ended) + 2  # and those that end with the files
    expected = one_shot(hooks.search_of(ours.asr_model.asr_model, CTCInfer), pushed)
    words = [word for tokens in expected for word in ours.tokenizer.ids_to_text(tokens).split()]
    assert sorted("".join(words)) == sorted("".join(texts_of(transcripts)).replace(" ", ""))


@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
def test_utterances_of_transducers_end_by_kaldis_rules(rnnt_pipeline, strategy, pauses, ended):
    ours = rnnt_pipeline({"strategy": strategy}, eou=1, rules=RULES)
    plain = rnnt_pipeline({"strategy": strategy}).run(pauses)
    found = ours.run(pauses)
    assert len(ended) > 2
    assert all(progress.contains_speech and progress.trailing_silence >= 0.4 for progress in ended)
    assert all(len(text) > 0.5 * len(whole) for text, whole in zip(texts_of(found), texts_of(plain), strict=True))
    for row in found.values():
        starts = [word.start for word in row["segments"]]
        assert starts == sorted(starts)


def test_a_wrong_rule_is_named(ctc_pipeline):
    with pytest.raises(ValueError, match=r"endpointing\.rules\.rule6 is None, expected a key of rule1, rule2"):
        ctc_pipeline(FLEXCTC, rules={"rule6": None})


def test_a_model_that_was_saved_with_a_strategy_searches(ctc_model, files, tmp_path, pushed):
    ctc_model.change_decoding_strategy(FLEXCTC, verbose=False)
    ctc_model.save_to(str(tmp_path / "saved.nemo"))
    ours = pipeline("buffered", str(tmp_path / "saved.nemo"), None)
    found = texts_of(ours.run(files[:2]))
    expected = one_shot(hooks.search_of(ours.asr_model.asr_model, CTCInfer), pushed)
    assert sorted(found) == sorted(ours.tokenizer.ids_to_text(tokens).strip() for tokens in expected)
    greedy = pipeline("buffered", str(tmp_path / "saved.nemo"), {"strategy": "greedy"})
    assert hooks.search_of(greedy.asr_model.asr_model, CTCInfer) is None


@pytest.mark.parametrize("strategy", ["flexctc_beam", "alsd_pp"])
@pytest.mark.parametrize("kind", ["buffered", "cache_aware"])
def test_phrases_of_a_stream_boost_it_alone(kind, strategy, files):
    if not hasattr(ASRRequestOptions, "has_biasing_request"):
        pytest.skip("this NeMo has no phrases of a stream")
    from nemo.collections.asr.parts.context_biasing.biasing_multi_model import BiasingRequestItemConfig

    model = CAUSAL if kind == "cache_aware" else HYBRID
    head = "ctc" if strategy == "flexctc_beam" else "rnnt"
    ours = pipeline(kind, model, {"strategy": strategy, "beam": {"beam_size": 8}}, head=head)
    plain, _ = texts_of(ours.run(files[:2]))
    asked = BiasingRequestItemConfig({"key_phrases_list": ["zebra"]}, boosting_model_alpha=30.0)
    first, second = texts_of(ours.run(files[:2], [ASRRequestOptions(), ASRRequestOptions(biasing_cfg=asked)]))
    assert first == plain
    assert "zebra" in second


@pytest.mark.parametrize("strategy", ["flexctc_beam", "alsd_pp"])
@pytest.mark.parametrize("kind", ["buffered", "cache_aware"])
def test_stream_with_nan_ends_alone(kind, strategy, files, monkeypatch):
    model = CAUSAL if kind == "cache_aware" else HYBRID
    head = "ctc" if strategy == "flexctc_beam" else "rnnt"
    ours = pipeline(kind, model, {"strategy": strategy, "beam": {"beam_size": 4}}, head=head)
    expected = texts_of(ours.run(files[:3]))
    push, steps = Slots.push, []

    def broken(self, chunks):
        steps.append(len(chunks))
        slot = next((slot for slot in chunks if slot.row == 1), None)
        if len(steps) == 3 and slot is not None:
            chunks[slot] = chunks[slot].clone()
            chunks[slot][0, 0] = torch.nan
        return push(self, chunks)

    monkeypatch.setattr(Slots, "push", broken)
    generator = ours.get_request_generator()
    generator.set_audio_filepaths(files[:3], [ASRRequestOptions() for _ in range(3)])
    ours.open_session()
    outputs = [output for requests in generator for output in ours.transcribe_step(requests)]
    found = dict.fromkeys(range(3), "")
    for output in outputs:
        found[output.stream_id] += output.final_transcript
    (failed,) = [output for output in outputs if output.error is not None]
    assert re.match(rf"stream {failed.stream_id} ends here: (log_probs|encoder_output)\[1, 0", str(failed.error))
    assert [found[number].strip() for number in range(3) if number != failed.stream_id] == [
        text for number, text in enumerate(expected) if number != failed.stream_id
    ]
    after = [output for output in outputs[outputs.index(failed) + 1 :] if output.stream_id == failed.stream_id]
    assert after
    assert not any(output.final_transcript or output.partial_transcript for output in after)
    assert not len(ours.slots)


def test_n_best_of_transducer_pipelines_is_refused(rnnt_pipeline):
    with pytest.raises(ValueError, match=r"asr\.decoding\.beam\.return_best_hypothesis is false, expected true"):
        rnnt_pipeline({"strategy": "alsd_pp", "beam": {"return_best_hypothesis": False}})


def test_tail_results_of_stateful_pipelines_are_refused():
    model = MODELS["rnnt"]
    with pytest.raises(ValueError, match="return_tail_result is true, expected false with strategy alsd_pp"):
        pipeline("buffered", model, {"strategy": "alsd_pp"}, head="rnnt", stateful=True, tail=True)


def test_segments_of_speech_end_an_utterance(files):
    ours = pipeline("buffered", MODELS["rnnt"], {"strategy": "alsd_pp"}, head="rnnt", stateful=True, eou=80)
    texts_by_end = {}
    for end in (100.0, 3.0):  # of the speech in a buffer of 4 s
        generator = ours.get_request_generator()
        generator.set_audio_filepaths(files[:1], [ASRRequestOptions()])
        ours.open_session()
        finals = []
        for requests in generator:
            heard = [replace(request, vad_segments=torch.tensor([[0.0, end]])) for request in requests]
            finals += [output.final_transcript for output in ours.transcribe_step(heard)]
        ours.close_session()
        texts_by_end[end] = [text for text in finals if text]
    assert len(texts_by_end[100.0]) == 1
    assert len(texts_by_end[3.0]) > 1


def test_other_options_of_pipelines_are_refused_or_warned_of(ctc_pipeline, monkeypatch):
    with pytest.raises(ValueError, match="strategy is 'alsd_pp', which decodes RNN-T and TDT models"):
        ctc_pipeline({"strategy": "alsd_pp"})
    with pytest.raises(ValueError, match="return_tail_result is true, expected false"):
        ctc_pipeline({"strategy": "flexctc_beam"}, tail=True)
    warnings: list[str] = []
    monkeypatch.setattr(hooks.logging, "warning", lambda message, **_: warnings.append(message))
    ctc_pipeline({"strategy": "beam_batch"})
    (warning,) = [message for message in warnings if "asr.decoding" in message]
    assert "'beam_batch'" in warning
    assert "flexctc_beam, cuda_wfst, paged_biglm" in warning


@pytest.fixture(scope="module")
def causal_model():
    model = ASRModel.restore_from(CAUSAL, map_location="cpu").eval()
    model.cur_decoder = "ctc"
    return model


def stream(model, files):
    """All steps of NeMo's streaming script: (labels, texts, log-probs, lengths) of each."""
    buffer = CacheAwareStreamingAudioBuffer(model=model)
    for file in files:
        buffer.append_audio_file(file, stream_id=-1)
    caches = model.encoder.get_initial_cache_state(batch_size=len(files))
    labels, steps = None, []
    for number, (chunk, lengths) in enumerate(iter(buffer)):
        dropped = 0 if number == 0 else model.encoder.streaming_cfg.drop_extra_pre_encoded
        before = [0] * len(files) if labels is None else [len(row) for row in labels]
        with torch.inference_mode():
            labels, found, *caches, _, log_probs, _ = model.conformer_stream_step(
                chunk, lengths, *caches, keep_all_outputs=buffer.is_buffer_empty(), previous_pred_out=labels,
                drop_extra_pre_encoded=dropped, return_log_probs=True,
            )  # fmt: skip
        steps.append((labels, found, log_probs, [len(row) - known for row, known in zip(labels, before, strict=True)]))
    return steps


@pytest.mark.parametrize("decoding", [FLEXCTC, WORD_GRAPH], ids=["flexctc_beam", "cuda_wfst"])
def test_a_stream_step_searches_log_probs(causal_model, decoding, files):
    if decoding is WORD_GRAPH:
        pytest.importorskip("kaldifst")
    causal_model.change_decoding_strategy(decoding, decoder_type="ctc", verbose=False)
    steps = stream(causal_model, files[:3])
    assert len(steps) > 3
    rows = [torch.cat([log_probs[b, : counts[b]] for *_, log_probs, counts in steps]) for b in range(3)]
    lengths = torch.tensor([len(row) for row in rows])
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    whole = causal_model.ctc_decoding.ctc_decoder_predictions_tensor(batch, lengths)
    assert texts(steps[-1][1]) == texts(whole)
    assert texts(steps[1][1]) != texts(whole)
    assert [row.tolist() for row in steps[-1][0]] == [row.argmax(-1).tolist() for row in rows]  # NeMo's own


def test_stream_step_refuses_a_foreign_state(causal_model, files):
    causal_model.change_decoding_strategy(FLEXCTC, decoder_type="ctc", verbose=False)
    labels = stream(causal_model, files[:1])[-1][0]
    chunk, lengths = torch.zeros(1, 80, 64), torch.tensor([64])
    caches = causal_model.encoder.get_initial_cache_state(batch_size=1)
    with pytest.raises(ValueError, match=r"previous_pred_out\[0\] has no running search, expected what"):
        causal_model.conformer_stream_step(chunk, lengths, *caches, previous_pred_out=[labels[0].clone()])


def test_greedy_stream_steps_keep_no_search_state(causal_model, files):
    causal_model.change_decoding_strategy({"strategy": "greedy_batch"}, decoder_type="ctc", verbose=False)
    assert all(not hasattr(row, "search_state") for row in stream(causal_model, files[:1])[-1][0])


def test_frame_batch_asr_warns_that_it_is_greedy(ctc_model, files, monkeypatch):
    ctc_model.change_decoding_strategy({"strategy": "flexctc_beam"}, verbose=False)
    batcher = FrameBatchASR(ctc_model, frame_len=0.8, total_buffer=2.4, batch_size=1)
    batcher.read_audio_file(files[0], delay=20, model_stride_in_secs=0.08)
    warnings: list[str] = []
    monkeypatch.setattr(hooks.logging, "warning", lambda message, **_: warnings.append(message))
    assert batcher.transcribe(tokens_per_chunk=10, delay=20)
    (warning,) = warnings
    assert "flexctc_beam, but FrameBatchASR takes the best label of every frame" in warning


def test_batched_frame_asr_rnnt_is_refused(hybrid_model):
    BatchedFrameASRRNNT(hybrid_model)
    hybrid_model.change_decoding_strategy({"strategy": "alsd_pp"}, verbose=False)
    with pytest.raises(ValueError, match=r"alsd_pp, but BatchedFrameASRRNNT merges .*asr_streaming_infer"):
        BatchedFrameASRRNNT(hybrid_model)
