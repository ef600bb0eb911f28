"""A full disk ends each command with status 2 and the file's name, and leaves older files as they were."""

import gzip
import os
from types import SimpleNamespace

import pytest

from nemo_gpu_decoding.cli import transcribe
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.jit import compilation
from nemo_gpu_decoding.presets import load_preset, write_preset
from tests.test_container import disk_is_full


@pytest.mark.parametrize("name", ["new.arpa", "new.arpa.gz"])
def test_build_lm_on_a_full_disk_leaves_no_file(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("a b a\nb a b\n" * 3)
    (tmp_path / name).write_bytes(b"old")
    monkeypatch.setattr(*((gzip.GzipFile, "write") if name.endswith("gz") else (os, "fsync")), disk_is_full)
    assert main(["build-lm", f"text={tmp_path / 'text.txt'}", "order=2", f"out={tmp_path / name}"]) == 2
    message = capsys.readouterr().err
    assert f"No space left on device: '{tmp_path / name}'" in message
    assert "Traceback" not in message
    assert (tmp_path / name).read_bytes() == b"old"
    assert sorted(file.name for file in tmp_path.iterdir()) == [name, "text.txt"]


def test_write_preset_on_a_full_disk_keeps_the_older_file(tmp_path, monkeypatch):
    preset = tmp_path / "best.yaml"
    write_preset(preset, {"strategy": "flexctc_beam", "beam": {"beam_size": 4}}, "old")
    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError, match=str(preset)):
        write_preset(preset, {"strategy": "flexctc_beam", "beam": {"beam_size": 8}}, "new")
    assert load_preset(str(preset)).beam.beam_size == 4


@pytest.fixture
def transcribed(tmp_path, monkeypatch):
    """Run `transcribe out=FILE` with these transcripts in place of a model's."""
    (tmp_path / "hyps.jsonl").write_text("old\n")

    def run(transcripts):
        utterance = SimpleNamespace(path="a.wav", text=None, duration=1.0, request=None)
        monkeypatch.setattr(transcribe, "find_utterances", lambda *_: [utterance])
        monkeypatch.setattr(transcribe, "load", lambda _: SimpleNamespace(device_name="cpu"))
        monkeypatch.setattr(transcribe, "_transcripts", lambda *_: transcripts())
        monkeypatch.setattr("nemo_gpu_decoding.transcript.row_of", lambda *_: {"pred_text": "new"})
        return main(["transcribe", "model=m.nemo", "audio=a.wav", f"out={tmp_path / 'hyps.jsonl'}"])

    return run


def test_transcribe_that_dies_keeps_the_older_file(transcribed, tmp_path):
    def dies():
        raise ValueError("of the model")
        yield

    assert transcribed(dies) == 1
    assert (tmp_path / "hyps.jsonl").read_text() == "old\n"
    assert [file.name for file in tmp_path.iterdir()] == ["hyps.jsonl"]


def test_transcribe_on_a_full_disk(transcribed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "fsync", disk_is_full)
    assert transcribed(lambda: iter([SimpleNamespace(text="new", error="")])) == 2
    assert f"No space left on device: '{tmp_path / 'hyps.jsonl'}'" in capsys.readouterr().err
    assert (tmp_path / "hyps.jsonl").read_text() == "old\n"


def test_transcribe_leaves_compiling_out_of_its_speed(transcribed, tmp_path, monkeypatch, capsys):
    def compiles():
        monkeypatch.setattr(compilation, "seconds", compilation.seconds + 50.0)
        yield SimpleNamespace(text="new", error="")

    # 50 s of compiling that took no time: the clock of the work has gone back
    monkeypatch.setattr(transcribe, "report", lambda *a: print(f"worked {a[1]:.0f} s"))
    assert transcribed(compiles) == 0
    told = capsys.readouterr()
    assert "worked -50 s" in told.out
    assert "compiled in 50.0 s besides" in told.err
    assert '"pred_text": "new"' in (tmp_path / "hyps.jsonl").read_text()
