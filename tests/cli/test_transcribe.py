"""`transcribe` in-process, on the shipped models and two utterances."""

from __future__ import annotations

import json
import sys

import pytest

from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.cli.transcribe import TranscribeOptions, build_decoding
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from tests.nemo_plugin.usage import write_lower_orders

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_text_goes_to_stdout_and_totals_to_stderr(assets, manifest, capsys):
    assert main(["transcribe", f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert out.startswith("page two of the contract")
    assert "2 utterances, 6.8 s of audio" in err
    assert "RTFx" in err
    assert "WER" in err


def test_json_lines_carry_n_best_words_and_scores(assets, manifest, tmp_path):
    out = tmp_path / "hyps.jsonl"
    arguments = [f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", f"out={out}"]
    arguments += ["beam_size=8", "n_best=3", "timestamps=true", f"lm={assets}/lm/tok3.arpa"]
    assert main(["transcribe", *arguments]) == 0
    for row, reference in zip(rows_of(out), rows_of(manifest), strict=True):
        assert row["audio_filepath"] == reference["audio_filepath"]
        assert row["text"] == reference["text"]
        assert 0 <= row["wer"] <= 1
        assert row["duration"] == pytest.approx(reference["duration"], abs=1e-3)
        scores = [hypothesis["score"] for hypothesis in row["n_best"]]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert row["n_best"][0] == {"text": row["pred_text"], "score": row["score"]}
        assert [word["word"] for word in row["words"]] == row["pred_text"].split()
        times = [time for word in row["words"] for time in (word["start"], word["end"])]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= row["duration"] + 0.1
        assert all(0 <= word["confidence"] <= 1 for word in row["words"])


@pytest.mark.parametrize("head", [None, "rnnt"])
def test_both_heads_of_a_hybrid_model(head, assets, manifest, capsys):
    arguments = [f"model={assets}/models/self_hybrid_rnnt.nemo", f"manifest={manifest}"]
    arguments += ["strategy=greedy_batch", "head=rnnt"] if head else []
    assert main(["transcribe", *arguments]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_head_that_the_model_lacks_is_refused(assets, manifest, capsys):
    arguments = [f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", "head=rnnt"]
    assert main(["transcribe", *arguments]) == 2
    assert "head=rnnt, but the model is a EncDecCTCModelBPE" in capsys.readouterr().err


def test_an_unknown_key_of_nemo_is_an_error_of_one_line(assets, manifest, capsys):
    arguments = [f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}"]
    assert main(["transcribe", *arguments, "decoding.beam.beam_sise=4"]) == 2
    err = capsys.readouterr().err
    assert "beam_sise" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("model=nowhere.nemo", "model=nowhere.nemo is no file here"),
        ("model=no_such_name", "model=no_such_name is no file here, and NeMo cannot fetch it"),
        (f"model={__file__}", "is no NeMo model: a .nemo file is a tar archive"),
        ("device=gpu", "device is 'gpu', expected auto, cpu, cuda"),
        ("device=cuda:99", "device is 'cuda:99', but torch sees"),
    ],
)
def test_a_model_or_device_that_is_not_there(argument, problem, assets, manifest, capsys):
    arguments = [f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", argument]
    assert main(["transcribe", *arguments]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tune", "transcribe"])
def test_without_nemo_the_command_says_what_to_install(command, assets, manifest, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nemo.collections.asr.models", None)
    monkeypatch.delattr("nemo.collections.asr.models", raising=False)
    assert main([command, f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}"]) == 2
    assert "needs NeMo: pip install" in capsys.readouterr().err


def test_a_missing_folder_for_out_is_found_before_the_model_is_loaded(manifest, tmp_path, capsys):
    arguments = ["model=nowhere.nemo", f"manifest={manifest}", f"out={tmp_path}/no/hyps.jsonl"]
    assert main(["transcribe", *arguments]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("n_best=0", "n_best is 0"),
        ("batch_size=0", "batch_size is 0"),
        ("head=x", "head is 'x'"),
        ("rescore=lm.arpa", "rescore=lm.arpa orders n_best hypotheses; n_best is 1, expected >= 2"),
        ("rescore_weight=-1", "rescore_weight is -1"),
        ("rescore_lm_share=-1", "rescore_lm_share is -1"),
    ],
)
def test_values_out_of_range(argument, problem, capsys):
    assert main(["transcribe", "model=m.nemo", argument]) == 2
    assert problem in capsys.readouterr().err


def test_a_word_graph_finds_words_with_times_and_alternatives(assets, manifest, tmp_path, capsys):
    pytest.importorskip("kaldifst")
    graph, out = tmp_path / "word.graph", tmp_path / "hyps.jsonl"
    model, lm = f"model={assets}/models/self_ctc.nemo", f"lm={assets}/lm/word3.arpa"
    assert main(["build-graph", model, lm, f"out={graph}"]) == 0
    capsys.readouterr()
    arguments = [model, f"manifest={manifest}", "strategy=cuda_wfst", "lm_weight=0.7"]
    assert main(["transcribe", *arguments, lm]) == 0
    from_lm = capsys.readouterr().out
    more = [f"lm={graph}", "n_best=3", "timestamps=true", "beam_width=20", f"out={out}"]
    assert main(["transcribe", *arguments, *more]) == 0
    assert capsys.readouterr().out == from_lm
    for row in rows_of(out):
        scores = [hypothesis["score"] for hypothesis in row["n_best"]]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert [word["word"] for word in row["words"]] == row["pred_text"].split()
        assert all(0 <= word["start"] < word["end"] <= row["duration"] + 0.1 for word in row["words"])
        assert all(0 <= word["confidence"] <= 1 for word in row["words"])
        assert 0 <= row["oracle_wer"] <= row["wer"]


def test_a_second_pass_orders_the_hypotheses(assets, manifest, tmp_path, capsys):
    pytest.importorskip("kaldifst")
    lm = assets / "lm" / "word3.arpa"
    arguments = [f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", "strategy=cuda_wfst", f"lm={lm}"]
    arguments += ["n_best=5", "lm_weight=0.1", f"out={tmp_path}/hyps.jsonl"]
    scores, packed = [], pack_arpa_in_memory(lm)
    for second in ([], [f"rescore={lm}", "rescore_weight=0.9", "rescore_lm_share=0"]):
        assert main(["transcribe", *arguments, *second, "decoding.wfst.decoding_mode=lattice"]) == 0
        assert "oracle WER" in capsys.readouterr().err
        scores.append([{h["text"]: h["score"] for h in row["n_best"]} for row in rows_of(tmp_path / "hyps.jsonl")])
    for before, after in zip(*scores, strict=True):
        assert before.keys() == after.keys()
        assert list(after.values()) == sorted(after.values(), reverse=True)
        for text, score in after.items():  # of the graph's LM a tenth was in the score
            replaced = 0.9 * packed.score(text.split()) - 0.1 * packed.score(text.split())
            assert score == pytest.approx(before[text] - replaced, abs=1e-2)


def test_a_large_lm_beside_a_small_one(assets, manifest, tmp_path, capsys):
    pytest.importorskip("kaldifst")
    model, lm = f"model={assets}/models/self_ctc.nemo", assets / "lm" / "word3.arpa"
    small = write_lower_orders(lm, tmp_path / "small.arpa", most=2)
    assert main(["pack-lm", f"lm={lm}", f"out={tmp_path}/large.packed"]) == 0
    arguments = ["transcribe", model, f"manifest={manifest}", "decoding.wfst.beam_width=20"]
    capsys.readouterr()
    assert main([*arguments, "strategy=cuda_wfst", f"lm={lm}"]) == 0
    expected = capsys.readouterr().out
    lms = [f"lm={small}", f"large_lm={tmp_path}/large.packed"]
    assert main([*arguments, "strategy=paged_biglm", *lms]) == 0
    assert capsys.readouterr().out == expected


def test_raw_keys_win_over_options():
    arguments = ["model=m", "beam_size=4", "n_best=2", "timestamps=true", "decoding.beam.beam_size=6"]
    config = build_decoding(parse_options(TranscribeOptions, arguments))
    assert config.beam.beam_size == 6
    assert config.beam.n_best == 2
    assert config.beam.return_best_hypothesis is False
    assert config.compute_timestamps is True
    assert config.confidence_cfg.preserve_word_confidence is True
