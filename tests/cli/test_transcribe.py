"""`transcribe` in-process, on the shipped models and two utterances."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from nemo_gpu_decoding.cli.decoding import check_weights
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.cli.serve import ServeOptions, build_recognizer
from nemo_gpu_decoding.cli.transcribe import TranscribeOptions, build_decoding
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.nemo_plugin.model import Model

pytestmark = [pytest.mark.slow, pytest.mark.nemo]
pytest.importorskip("nemo.collections.asr")
soundfile = pytest.importorskip("soundfile")


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def audio(manifest):
    return rows_of(manifest)[0]["audio_filepath"]


def test_text_goes_to_stdout_and_totals_to_stderr(assets, manifest, capsys):
    assert main(["transcribe", f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}"]) == 0
    out, err = capsys.readouterr()
    names, texts = zip(*(line.split("\t") for line in out.splitlines()), strict=True)
    assert names == tuple(row["audio_filepath"] for row in rows_of(manifest))
    assert texts[0].startswith("page two of the contract")
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
        assert all(0 <= word["raw_confidence"] <= 1 for word in row["words"])


def test_an_interrupted_run_of_short_files_continues(assets, manifest, tmp_path, capsys, monkeypatch):
    arguments = ["transcribe", f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", "batch_size=1"]
    assert main([*arguments, f"out={tmp_path}/whole.jsonl"]) == 0
    decode, calls = Model.decode, []

    def decoded(self, outputs, **more):
        calls.append(outputs)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(self, outputs, **more)

    monkeypatch.setattr(Model, "decode", decoded)
    assert [main([*arguments, f"out={tmp_path}/out.jsonl"]) for _ in range(2)] == [130, 0]
    assert len(calls) == 3
    assert "1 utterances are those of an interrupted run" in capsys.readouterr().err
    whole, found = ([row | {"seconds": 0} for row in rows_of(tmp_path / f"{name}.jsonl")] for name in ("whole", "out"))
    assert found == whole
    assert not (tmp_path / ".out.jsonl.run").exists()


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("model=nowhere.nemo", "model=nowhere.nemo is no file here"),
        ("model=no_such_name", "model=no_such_name is no file here, and NeMo cannot fetch it"),
        (f"model={__file__}", "is no NeMo model: a .nemo file is a tar archive"),
        ("device=gpu", "device is 'gpu', expected auto, cpu, cuda"),
        ("device=cuda:99", "device is 'cuda:99', but torch sees"),
        ("head=rnnt", "head=rnnt, but the model is a EncDecCTCModelBPE"),
    ],
)
def test_a_model_a_head_or_a_device_that_is_not_there(argument, problem, assets, manifest, capsys):
    assert main(["transcribe", f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", argument]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("rescore_weight=0.3", "rescore_weight is 0.3, which needs rescore=FILE"),
        ("lm_weight=0.5", "lm_weight is 0.5, which has no effect without an LM; add lm=FILE or remove lm_weight"),
        (
            "boosting_weight=2",
            "boosting_weight is 2.0, which has no effect without phrases; add phrases=FILE or remove boosting_weight",
        ),
        ("ignore_case=true", "ignore_case is True, which has no effect without phrases; add phrases=FILE"),
    ],
)
@pytest.mark.parametrize("out", ["hyps.jsonl", "parts/"])
def test_weight_without_lm_or_phrases_is_refused(argument, problem, out, audio, tmp_path, capsys):
    assert main(["transcribe", "model=m.nemo", f"audio={audio}", f"out={tmp_path}/{out}", argument]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / out).exists()


def test_weight_of_an_lm_in_preset_or_raw_keys_is_accepted(assets, tmp_path):
    preset = tmp_path / "best.yaml"
    preset.write_text(f"strategy: flexctc_beam\nbeam:\n  ngram_lm_model: {assets}/lm/tok3.arpa\n")
    for arguments in (
        [f"preset={preset}", "lm_weight=0.5"],
        ["strategy=cuda_wfst", "lm_weight=0.5", "decoding.wfst.arpa_lm_path=words.arpa"],
        ["boosting_weight=2", "decoding.beam.boosting_tree.key_phrases_list=[acme]"],
    ):
        options = parse_options(TranscribeOptions, ["model=m", *arguments])
        check_weights(build_decoding(options), options, has_own_phrases=False)
    options = parse_options(TranscribeOptions, ["model=m", "boosting_weight=2"])
    check_weights(build_decoding(options), options, has_own_phrases=True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["out=no/hyps.jsonl"], "out=no/hyps.jsonl: there is no folder no"),
        (["beam_size=0"], "beam_size is 0, expected an integer 1 .. 4096"),
        (["lm_weight=-0.5"], "lm_weight is -0.5, expected a finite number >= 0"),
        (["beam_width=0"], "beam_width is 0.0, expected a finite number > 0"),
        (["beam_beta=nan"], "beam_beta is nan, expected a finite number"),
        (["strategy=flexctc"], "strategy is 'flexctc', expected one of greedy, greedy_batch, beam, "),
        (["n_best=50"], "n_best is 50, expected an integer 1 .. 8; beam_size=50 keeps as many"),
        (["strategy=alsd_pp", "decoding.beam.beam_size=3", "n_best=4"], "n_best is 4, expected an integer 1 .. 3"),
        (["decoding.greedy.max_symbols=3"], "decoding.greedy has no effect with strategy flexctc_beam"),
        (["strategy=cuda_wfst", "decoding.beam.beam_size=4"], "decoding.beam has no effect with strategy cuda_wfst"),
        (["strategy=greedy_batch", "decoding.beam.beam_size=4"], "decoding.beam has no effect with strategy greedy"),
        (["strategy=alsd_pp", "head=ctc"], "decodes RNN-T and TDT models, but head=ctc is for CTC; possible here: "),
    ],
)
def test_values_that_need_no_model_are_checked_without_one(arguments, problem, audio, monkeypatch, capsys):
    monkeypatch.setattr(Model, "load", None)
    assert main(["transcribe", "model=m.nemo", f"audio={audio}", *arguments]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("command", ["transcribe", "tune"])
def test_a_strategy_that_does_not_fit_the_model_names_those_that_do(command, assets, manifest, capsys):
    assert main([command, f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", "strategy=alsd_pp"]) == 2
    expected = "strategy is 'alsd_pp', which decodes RNN-T and TDT models, but this model is for CTC; possible here: "
    err = capsys.readouterr().err
    assert expected in err
    assert "flexctc_beam, cuda_wfst, paged_biglm" in err


def test_serve_refuses_a_weight_without_lm():
    options = parse_options(ServeOptions, ["model=m.nemo", "strategy=flexctc_beam", "lm_weight=0.5"])
    with pytest.raises(ValueError, match=r"lm_weight is 0\.5, which has no effect without an LM; add lm=FILE"):
        build_recognizer(options)
    options = parse_options(ServeOptions, ["model=m.nemo", "strategy=flexctc_beam", "boosting_weight=2"])
    with pytest.raises(ValueError, match=r"model=m\.nemo is no file here"):
        build_recognizer(options)


@pytest.mark.parametrize("part", ["model_config.yaml", "tokenizer.model", "model_weights.ckpt"])
def test_a_damaged_model_is_named(part, assets, audio, tmp_path, capsys):
    damaged = tmp_path / "damaged.nemo"
    with tarfile.open(assets / "models" / "self_ctc.nemo") as whole, tarfile.open(damaged, "w") as archive:
        for member in filter(tarfile.TarInfo.isfile, whole):
            data = bytearray(whole.extractfile(member).read())
            data[0] ^= 0xFF if member.name.endswith(part) else 0
            archive.addfile(member, io.BytesIO(data))
    assert main(["transcribe", f"model={damaged}", f"audio={audio}"]) == 2
    err = capsys.readouterr().err
    assert f"model={damaged} cannot be restored (" in err
    assert "; if the file is damaged, copy it again" in err
    assert "Traceback" not in err


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
        assert all(0 <= word["raw_confidence"] <= 1 for word in row["words"])


def test_a_second_pass_orders_the_hypotheses(assets, manifest, tmp_path, capsys):
    pytest.importorskip("kaldifst")
    lm = assets / "lm" / "word3.arpa"
    arguments = [f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", "strategy=cuda_wfst", f"lm={lm}"]
    arguments += ["n_best=5", "lm_weight=0.1", f"out={tmp_path}/hyps.jsonl"]
    scores, packed = [], pack_arpa_in_memory(lm)
    for second in ([], [f"rescore={lm}", "rescore_weight=0.9", "rescore_lm_share=0"]):
        assert main(["transcribe", *arguments, *second, "decoding.wfst.decoding_mode=lattice"]) == 0
        scores.append([{h["text"]: h["score"] for h in row["n_best"]} for row in rows_of(tmp_path / "hyps.jsonl")])
    for before, after in zip(*scores, strict=True):
        assert before.keys() == after.keys()
        assert list(after.values()) == sorted(after.values(), reverse=True)
        for text, score in after.items():  # of the graph's LM a tenth was in the score
            replaced = 0.9 * packed.score(text.split()) - 0.1 * packed.score(text.split())
            assert score == pytest.approx(before[text] - replaced, abs=1e-2)


def test_raw_keys_win_over_options():
    arguments = ["model=m", "beam_size=4", "n_best=2", "timestamps=true", "decoding.beam.beam_size=6"]
    config = build_decoding(parse_options(TranscribeOptions, arguments))
    assert config.beam.beam_size == 6
    assert config.beam.n_best == 2
    assert config.beam.return_best_hypothesis is False
    assert config.compute_timestamps is True
    assert config.confidence_cfg.preserve_word_confidence is True


def test_a_section_that_a_greedy_strategy_does_not_read_gets_a_warning(messages):
    build_decoding(parse_options(TranscribeOptions, ["model=m", "preset=flexctc_beam", "strategy=greedy_batch"]))
    assert messages == ["beam in the preset has no effect with strategy greedy_batch"]


# ------------------------------------------------------------------------------------- partitions in a folder
def test_run_into_a_folder_can_be_repeated(assets, manifest, tmp_path, capsys):
    arguments = [f"model={assets}/models/self_ctc.nemo", "beam_size=8", "n_best=3", "timestamps=true"]
    rows = rows_of(manifest)
    (tmp_path / "bad.flac").write_bytes(Path(rows[1]["audio_filepath"]).read_bytes()[:20000])
    manifest.write_text("\n".join(map(json.dumps, [rows[0], {**rows[1], "audio_filepath": "bad.flac"}, rows[1]])))
    out = tmp_path / "parts"
    partitioned = ["transcribe", *arguments, f"manifest={manifest}", f"out={out}/", "partition_seconds=4"]
    assert main(partitioned) == 0
    capsys.readouterr()
    found = [row for part in sorted(out.glob("part-*.jsonl")) for row in rows_of(part)]
    assert found[1]["error"].startswith("bad.flac: cannot be read after 0:00:0")
    assert [row["line"] for row in found] == [1, 2, 3]
    manifest.write_text("\n".join(map(json.dumps, rows)))
    assert main(["transcribe", *arguments, f"manifest={manifest}", f"out={tmp_path}/one.jsonl"]) == 0
    for row, single in zip([found[0], found[2]], rows_of(tmp_path / "one.jsonl"), strict=True):
        assert row.pop("manifest") == str(manifest)
        row.pop("line")
        scores = [[hypothesis.pop("score") for hypothesis in each["n_best"]] for each in (row, single)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)  # batches differ, and so sums of floats
        row.pop("score"), single.pop("score")
        assert single.pop("seconds") >= 0
        assert row == single
    capsys.readouterr()
    assert main([*partitioned, "beam_size=4"]) == 2
    assert "holds a run with beam_size=8, this one has beam_size=4" in capsys.readouterr().err


def odd_files(folder, source):
    """A manifest of a file that can be decoded in many forms, and of files that cannot be."""
    samples, rate = soundfile.read(source["audio_filepath"], dtype="float32")
    hole = samples.copy()
    hole[5000] = np.nan
    files = {
        "nan.wav": (hole, rate), "stereo.wav": (np.stack([samples, samples], 1), rate),
        "none.wav": (samples[:0], rate), "short.wav": (samples[: rate // 100], rate),
        "8k.wav": (samples[::2], rate // 2),
        "44k.wav": (np.interp(np.arange(0, len(samples), rate / 44100), np.arange(len(samples)), samples), 44100),
        "good.wav": (samples, rate),
    }  # fmt: skip
    for name, (values, hertz) in files.items():
        soundfile.write(folder / name, values, hertz, subtype="FLOAT")
    (folder / "cut.flac").write_bytes(Path(source["audio_filepath"]).read_bytes()[:20000])
    (folder / "talk.m4a").write_bytes(b"no audio")
    names = [*files, "cut.flac", "talk.m4a"]
    rows = [{"audio_filepath": name, "text": source["text"], "uid": n} for n, name in enumerate(names)]
    manifest = folder / "odd.json"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    return manifest


@pytest.mark.parametrize("out", ["odd.jsonl", "parts/"])
def test_bad_audio_is_an_error_of_its_row_only(out, assets, manifest, tmp_path, capsys, messages):
    odd = odd_files(tmp_path, rows_of(manifest)[0])
    arguments = [f"model={assets}/models/self_ctc.nemo", f"manifest={odd}", f"out={tmp_path}/{out}", "batch_size=3"]
    assert main(["transcribe", *arguments]) == (0 if out.endswith("/") else 1)
    err = capsys.readouterr().err
    files = [tmp_path / out] if out.endswith("jsonl") else sorted((tmp_path / out).glob("part-*.jsonl"))
    found = {row["audio_filepath"]: row for file in files for row in rows_of(file)}
    assert [row["uid"] for row in found.values()] == list(range(9))
    errors = {name: row["error"] for name, row in found.items() if "error" in row}
    assert list(errors) == ["nan.wav", "none.wav", "cut.flac", "talk.m4a"]
    assert all(name in error for name, error in errors.items())
    assert [name for name in errors if "pred_text" in found[name]] == ["cut.flac"]
    assert found["cut.flac"]["pred_text"].split()[1] == found["good.wav"]["pred_text"].split()[1]
    assert "sample 5000 is nan" in errors["nan.wav"]
    assert "ffmpeg -i talk.m4a -ac 1 -ar 16000 talk.wav" in errors["talk.m4a"]
    assert found["good.wav"]["wer"] < 0.3
    assert found["stereo.wav"]["pred_text"] == found["44k.wav"]["pred_text"] == found["good.wav"]["pred_text"]
    assert "".join(messages).count("stereo.wav has 2 channels; they are averaged") == 1
    if out.endswith("jsonl"):
        assert all(error in err for error in errors.values())
        assert "4 of 9 utterances failed" in err


def test_selected_channel_is_decoded(assets, manifest, tmp_path, capsys):
    source = rows_of(manifest)[0]
    samples, rate = soundfile.read(source["audio_filepath"])
    soundfile.write(tmp_path / "right.wav", np.stack([np.zeros_like(samples), samples], 1), rate)
    arguments = ["transcribe", f"model={assets}/models/self_ctc.nemo", "channel_selector=1"]
    assert main([*arguments, f"audio=[{tmp_path}/right.wav,{source['audio_filepath']}]"]) == 1
    chosen, err = capsys.readouterr()
    assert "channel_selector is 1, but" in err
    assert "channels; they" not in err
    assert main([*arguments[:2], f"audio={source['audio_filepath']}"]) == 0
    assert chosen == f"{tmp_path}/right.wav\t{capsys.readouterr().out}"


@pytest.mark.parametrize("model", ["self_ctc", "self_hybrid_rnnt"])
def test_phrases_of_a_manifest_are_those_of_its_utterances(model, assets, manifest, capsys):
    arguments = ["transcribe", f"model={assets}/models/{model}.nemo", f"manifest={manifest}"]
    arguments += ["head=rnnt"] if model == "self_hybrid_rnnt" else []
    assert main(arguments) == 0
    plain = capsys.readouterr().out.splitlines()
    rows = rows_of(manifest)
    rows[1]["phrases"] = ["zeppelin"]
    manifest.write_text("\n".join(map(json.dumps, rows)))
    assert main([*arguments, "boosting_weight=9"]) == 0
    boosted = capsys.readouterr().out.splitlines()
    assert boosted[0] == plain[0]
    assert "zeppelin" in boosted[1]
    assert "zeppelin" not in plain[1]


def test_lms_of_a_manifest_are_those_of_its_utterances(assets, manifest, tmp_path, capsys):
    model, lm = f"model={assets}/models/self_ctc.nemo", f"{assets}/lm/tok3.arpa"
    arguments = ["transcribe", model, f"manifest={manifest}", "beam_size=16", "beam_beta=1"]
    found = []
    for more in ([], [f"lm={lm}", "lm_weight=0.9"]):
        assert main([*arguments, *more, f"out={tmp_path}/out.jsonl"]) == 0
        found.append([(row["pred_text"], row["score"]) for row in rows_of(tmp_path / "out.jsonl")])
    rows = rows_of(manifest)
    rows[0]["lm"], rows[-1]["lm"] = "office", "law"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    named = [f"lms.office={lm}", "decoding.beam.lm_pool_alpha.office=0.9", f"out={tmp_path}/out.jsonl"]
    assert main([*arguments, *named]) == 1
    out = rows_of(tmp_path / "out.jsonl")
    assert (out[0]["pred_text"], out[0]["score"]) == found[1][0] != found[0][0]
    assert [(row["pred_text"], row["score"]) for row in out[1:-1]] == found[0][1:-1]
    assert "lm is 'law', expected one of office, none" in out[-1]["error"]
    assert [row.get("lm") for row in out] == [row.get("lm") for row in rows]


@pytest.mark.parametrize("model", ["self_ctc", "self_hybrid_rnnt"])
@pytest.mark.parametrize("out", ["out.jsonl", "out/"])
def test_locks_and_grammars_of_a_manifest_are_those_of_its_utterances(model, out, assets, manifest, tmp_path, capsys):
    arguments = ["transcribe", f"model={assets}/models/{model}.nemo"]
    arguments += ["strategy=alsd_pp"] if model == "self_hybrid_rnnt" else []
    assert main([*arguments, f"manifest={manifest}", f"out={tmp_path}/plain.jsonl"]) == 0
    plain = [row["pred_text"] for row in rows_of(tmp_path / "plain.jsonl")]
    rows = rows_of(manifest)[:1] * 6
    own = [
        {},
        {"allowed_tokens": ["\u2581", "o", "f", "t", "h", "e"], "allowed_price": "inf"},
        {"grammar": ["of the"], "lm": "none"},
        {"grammar": ["of the"], "grammar_price": 1e-3},
        {"grammar": ["\u4f60"]},
        {"allowed_scripts": ["Latn"]},
    ]
    manifest.write_text("\n".join(json.dumps({**row, **more}) for row, more in zip(rows, own, strict=True)))
    status = main([*arguments, f"manifest={manifest}", f"out={tmp_path}/{out}"])
    assert status == (0 if out == "out/" else 1)  # partitions fail by max_errors
    capsys.readouterr()
    found = rows_of(next(tmp_path.glob("out/part-*.jsonl")) if out == "out/" else tmp_path / out)
    texts = [row.get("pred_text") for row in found]
    assert texts[0] == plain[0]
    assert set(texts[1]) <= {*"ofthe", " "} < set(texts[0])
    assert texts[2:] == ["of the", "", None, None]
    assert [(row.get("outside_share"), row.get("in_grammar")) for row in found[:4]] == [
        (None, None), (0.0, None), (None, True), (None, False)
    ]  # fmt: skip
    assert "is in no token of the model" in found[4]["error"]
    assert "allowed_scripts is 'Latn', expected scripts" in found[5]["error"]
    assert [row.get("allowed_tokens") for row in found] == [more.get("allowed_tokens") for more in own]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["audio=[]"], "audio is an empty list, expected at least one file"),
        (["audio=[]", "out=x/"], "audio is an empty list, expected at least one file"),
        (["decoding.beam=[1]", "strategy=cuda_wfst"], "decoding.beam is [1], expected a mapping of keys to values"),
        (["decoding.wfst=5", "strategy=cuda_wfst"], "decoding.wfst is 5, expected a mapping of keys to values"),
        (["n_best=0"], "n_best is 0"),
        (["batch_size=0"], "batch_size is 0"),
        (["head=x"], "head is 'x'"),
        (["rescore=lm.arpa"], "rescore=lm.arpa orders n_best hypotheses; n_best is 1, expected >= 2"),
        (["rescore_weight=-1"], "rescore_weight is -1"),
        (["rescore_lm_share=-1"], "rescore_lm_share is -1"),
        (["workers=0"], "workers is 0, expected an integer >= 1, or [FEWEST,MOST]"),
        (["workers=[4,2]"], "workers is [4, 2]"),
        (["workers=2"], "workers=2 is for partitions, out is None, expected a folder or URL that ends with /"),
        (["ray=auto", "out=x.jsonl"], "ray=auto is for partitions, out is 'x.jsonl'"),
        (["partition_seconds=0", "out=x/"], "partition_seconds is 0.0, expected a finite number > 0"),
        (["max_errors=-1", "out=x/"], "max_errors is -1"),
        (["manifest=[a.json,b.json]"], "needs a folder as out"),
        (["tarred_audio=a.tar", "audio=x.wav", "out=x/"], "tarred_audio=a.tar needs the manifest of the tar files"),
        (["tarred_audio=a.tar", "manifest=a.json", "out=x/"], "tarred_audio=a.tar is no file here"),
        (["manifest=a.json", "audio=x.wav", "out=x/"], "give either audio"),
        (["segment_seconds=0"], "segment_seconds is 0.0, expected a number >= 2.0"),
        (["min_confidence=2"], "min_confidence is 2.0"),
        (["subtitles=ass"], "subtitles is 'ass', expected one of srt, vtt, tsv, txt"),
        (["subtitles=srt", "out=parts/"], "subtitles=srt needs a file as out"),
    ],
)
def test_values_out_of_range_and_options_of_partitions(arguments, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["transcribe", "model=m.nemo", *arguments]) == 2
    assert problem in capsys.readouterr().err
