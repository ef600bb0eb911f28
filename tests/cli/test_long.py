"""`transcribe` of long recordings: cut, with subtitles, alone and in partitions."""

import json

import numpy as np
import pytest

from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.cli.transcribe import TranscribeOptions
from tests.assets import speech
from tests.cli.test_transcribe import rows_of

pytestmark = [pytest.mark.slow, pytest.mark.nemo]
pytest.importorskip("nemo.collections.asr")
soundfile = pytest.importorskip("soundfile")


@pytest.fixture
def talk(tmp_path):
    """Six utterances with pauses of a second."""
    parts = [soundfile.read(row["audio_filepath"], dtype="float32")[0] for row in speech()[:6]]
    file = tmp_path / "talk.flac"
    soundfile.write(file, np.concatenate([np.pad(part, (0, 16000)) for part in parts]), 16000)
    return file


CUT = ["segment_seconds=6"]


def test_a_long_file_gets_segments_and_subtitles(assets, manifest, talk, tmp_path, capsys):
    short = rows_of(manifest)[0]["audio_filepath"]
    model, out = f"model={assets}/models/self_ctc.nemo", tmp_path / "out" / "talk.json"
    out.parent.mkdir()
    arguments = ["transcribe", model, f"audio=[{talk},{short}]", f"out={out}", "subtitles=srt,vtt,tsv,txt"]
    assert main([*arguments, *CUT]) == 0
    long, brief = rows_of(out)
    assert "segments" not in brief
    assert brief["pred_text"] == "page two of the contract mentions teresa and carla graham"
    shown = [f"{row['audio_filepath']}\t{row['pred_text']}" for row in (long, brief)]
    assert capsys.readouterr().out.splitlines() == shown
    texts = [segment["text"] for segment in long["segments"]]
    assert len(texts) > 2
    assert " ".join(filter(None, texts)) == long["pred_text"] == " ".join(word["word"] for word in long["words"])
    starts = [word["start"] for word in long["words"]]
    assert starts == sorted(starts)
    assert starts[-1] > 15
    assert long["segments"][-1]["end"] <= long["duration"] == pytest.approx(soundfile.info(talk).duration, abs=1e-3)
    for name in ("talk", "test_000"):
        assert all((out.parent / f"{name}.{each}").read_text() for each in ("srt", "vtt", "tsv", "txt"))
    assert " ".join((out.parent / "talk.txt").read_text().split()) == long["pred_text"]
    assert (out.parent / "talk.vtt").read_text().startswith("WEBVTT\n\n00:00:0")


def test_partitions_have_the_cuts_of_one_file(assets, talk, tmp_path):
    model = f"model={assets}/models/self_ctc.nemo"
    for out in (f"{tmp_path}/one.json", f"{tmp_path}/parts/"):
        assert main(["transcribe", model, f"audio={talk}", f"out={out}", "n_best=2", "timestamps=true", *CUT]) == 0
    (one,) = rows_of(tmp_path / "one.json")
    (part,) = rows_of(tmp_path / "parts" / "part-00000.jsonl")
    assert part["segments"] == one["segments"]
    assert part["words"] == one["words"]
    assert len(part["segments"][0]["n_best"]) == 2
    slots = [slot for slot in one["word_alternatives"] if slot["word_index"] is not None]
    assert part["word_alternatives"] == one["word_alternatives"]
    assert [(slot["word_index"], slot["start"], slot["end"]) for slot in slots] == [
        (n, word["start"], word["end"]) for n, word in enumerate(one["words"])
    ]
    assert any(len(slot["alternatives"]) > 1 for slot in slots)


@pytest.mark.parametrize("out", ["talk.json", "parts/"])
def test_a_damaged_end_is_an_error_with_the_text_before_it(out, assets, talk, tmp_path, capsys):
    talk.write_bytes(talk.read_bytes()[: talk.stat().st_size * 2 // 3])
    arguments = ["transcribe", f"model={assets}/models/self_ctc.nemo", f"audio={talk}", f"out={tmp_path}/{out}", *CUT]
    assert main(arguments) == (0 if out == "parts/" else 1)
    (row,) = rows_of(tmp_path / out if out != "parts/" else tmp_path / "parts" / "part-00000.jsonl")
    assert row["error"].startswith(f"{talk}: cannot be read after 0:00:")
    assert row["pred_text"].startswith("page two")
    if out != "parts/":
        assert row["error"] in capsys.readouterr().err


def test_two_recordings_of_one_name_have_no_subtitles(talk, tmp_path, capsys):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / talk.name).write_bytes(talk.read_bytes())
    assert main(["transcribe", "model=m.nemo", f"audio=[{talk},{tmp_path}/b/{talk.name}]", "subtitles=srt"]) == 2
    assert "two recordings have one name" in capsys.readouterr().err
    rows = [{"audio_filepath": str(file)} for file in (talk, tmp_path / "missing" / talk.name)]
    (tmp_path / "set.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["transcribe", "model=no", f"manifest={tmp_path}/set.json", "subtitles=srt", f"out={tmp_path}/out"]
    assert main(arguments) == 2
    assert "model=no is no file here" in capsys.readouterr().err


def test_subtitles_imply_timestamps():
    from nemo_gpu_decoding.cli.transcribe import build_decoding

    options = parse_options(TranscribeOptions, ["model=m", "subtitles=srt"])
    assert options.subtitles == ["srt"]
    assert build_decoding(options).compute_timestamps is True
