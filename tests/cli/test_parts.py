"""Commands on rows of a manifest that are parts of one file: as on files cut beforehand."""

import json

import numpy as np
import pytest

from nemo_gpu_decoding.cli.main import main
from tests.assets import speech
from tests.cli.test_transcribe import rows_of

pytestmark = [pytest.mark.slow, pytest.mark.nemo]
pytest.importorskip("nemo.collections.asr")
soundfile = pytest.importorskip("soundfile")


class Cut:
    """One file with parts, and a file of each part; a manifest of either."""

    def __init__(self, folder, groups, rate, channels=1):
        """The k-th part has the k-th group of utterances, with a second of silence after each."""
        self.joined, self.cut = folder / "joined.json", folder / "cut.json"
        samples, rows, alone = [np.zeros(rate // 2)], [], []
        for n, group in enumerate(groups):
            read = [soundfile.read(row["audio_filepath"])[0] for row in group]
            part = np.concatenate([np.pad(each, (0, 16000)) for each in read] if len(group) > 1 else read)
            at = sum(map(len, samples)) / rate
            row = {"offset": at, "duration": len(part) / rate, "text": " ".join(row["text"] for row in group)}
            rows.append({"audio_filepath": "joined.flac", **row})
            alone.append({"audio_filepath": f"part{n}.flac", "text": row["text"]})
            soundfile.write(folder / f"part{n}.flac", np.stack([part] * channels, 1), rate)
            samples.append(part)
        del rows[-1]["duration"]  # to the end of the file
        soundfile.write(folder / "joined.flac", np.stack([np.concatenate(samples)] * channels, 1), rate)
        for manifest, own in ((self.joined, rows), (self.cut, alone)):
            manifest.write_text("\n".join(map(json.dumps, own)))


def results_of(file):
    ignored = ("seconds", "audio_filepath", "offset", "manifest")
    return [{name: value for name, value in row.items() if name not in ignored} for row in rows_of(file)]


@pytest.mark.parametrize(
    ("model", "strategy", "rate", "channels"),
    [
        ("self_ctc", "flexctc_beam", 16000, 1),
        ("self_ctc", "flexctc_beam", 22050, 2),
        ("self_hybrid_rnnt", "alsd_pp", 16000, 1),
    ],
)
def test_parts_of_a_file_are_decoded_as_files(model, strategy, rate, channels, assets, tmp_path, capsys):
    cut = Cut(tmp_path, [[row] for row in speech()[:3]], rate, channels)
    arguments = ["transcribe", f"model={assets}/models/{model}.nemo", f"strategy={strategy}", "timestamps=true"]
    shown = []
    for name, manifest in (("joined", cut.joined), ("cut", cut.cut)):
        assert main([*arguments, f"manifest={manifest}", f"out={tmp_path}/{name}.jsonl"]) == 0
        lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        files = {row["audio_filepath"] for row in rows_of(tmp_path / f"{name}.jsonl")}
        assert {file.split(" at ")[0] for file, _ in lines} == files
        shown.append([text for _, text in lines])
        assert main([*arguments, f"manifest={manifest}", f"out={tmp_path}/{name}/"]) == 0
        capsys.readouterr()
    assert shown[0] == shown[1]
    assert len(set(shown[0])) == 3
    for out in (".jsonl", "/part-00000.jsonl"):
        found, expected = results_of(tmp_path / f"joined{out}"), results_of(tmp_path / f"cut{out}")
        assert found == expected
        assert all(row["words"] for row in found)
    rows = rows_of(tmp_path / "joined.jsonl")
    assert [row["offset"] for row in rows] == [row["offset"] for row in rows_of(cut.joined)]


def test_tune_encodes_the_parts(assets, tmp_path, capsys):
    cut, tables = Cut(tmp_path, [[row] for row in speech()[:4]], 16000), []
    arguments = [f"model={assets}/models/self_ctc.nemo", "beam_size=[2]", "beam_beta=[0,1]", "confidence=[min]"]
    for manifest in (cut.joined, cut.cut):
        assert main(["tune", *arguments, f"manifest={manifest}"]) == 0
        tables.append(capsys.readouterr().out.replace("joined.json", "cut.json"))
    assert tables[0] == tables[1]


CUT = ["segment_seconds=6", "batch_size=2", "timestamps=true"]


def test_a_long_part_is_cut_again_and_resumed(assets, tmp_path, capsys, monkeypatch):
    from nemo_gpu_decoding.nemo_plugin.model import Model

    cut = Cut(tmp_path, [speech()[:6], speech()[6:12]], 16000)
    model = f"model={assets}/models/self_ctc.nemo"
    assert main(["transcribe", model, f"manifest={cut.cut}", f"out={tmp_path}/cut.jsonl", *CUT]) == 0
    arguments = ["transcribe", model, f"manifest={cut.joined}", f"out={tmp_path}/joined.jsonl", "subtitles=srt,tsv"]
    decode, calls = Model.decode, []

    def stopped(self, outputs, **options):
        if len(calls) == batches[0] + 1:
            raise KeyboardInterrupt
        calls.append(1)
        yield from decode(self, outputs, **options)

    expected = results_of(tmp_path / "cut.jsonl")
    batches = [(len(row["segments"]) + 1) // 2 for row in expected]
    assert min(batches) > 1
    monkeypatch.setattr(Model, "decode", stopped)
    assert main([*arguments, *CUT]) == 130
    calls.clear()
    monkeypatch.setattr(Model, "decode", lambda *given, **more: calls.append(1) or decode(*given, **more))
    capsys.readouterr()
    assert main([*arguments, *CUT]) == 0
    assert results_of(tmp_path / "joined.jsonl") == expected
    assert len(calls) == batches[1] - 1
    message = capsys.readouterr().err
    first, second = rows_of(cut.joined)
    end = round(first["offset"] + first["duration"], 3)
    assert f"joined.flac at 0.5 - {end} s: {len(expected[0]['segments'])} segments are those of an" in message
    assert f"joined.flac at {second['offset']} s: 2 segments are those of an" in message
    lines = [line.split("\t") for line in (tmp_path / "joined.tsv").read_text().splitlines()[1:]]
    words = [word for row in rows_of(tmp_path / "joined.jsonl") for word in row["words"]]
    assert " ".join(text for _, _, text in lines) == " ".join(word["word"] for word in words)
    starts = [round(1000 * (row["offset"] + row["words"][0]["start"])) for row in rows_of(tmp_path / "joined.jsonl")]
    assert starts[0] == int(lines[0][0])
    assert starts[1] in {int(start) for start, _, _ in lines}
    assert (tmp_path / "joined.srt").read_text().startswith("1\n00:00:0")


def test_parts_of_rows_equal_those_of_nemo(assets, tmp_path, capsys):
    from nemo_gpu_decoding.nemo_plugin.model import Model

    cut, file = Cut(tmp_path, [[row] for row in speech()[:3]], 16000), f"{assets}/models/self_ctc.nemo"
    first, second, third = ({**row, "audio_filepath": str(tmp_path / "joined.flac")} for row in rows_of(cut.joined))
    rows = [first, second, {**third, "duration": 100.0}, {**first, "offset": None}, {**first, "offset": 0.0}]
    cut.joined.write_text("\n".join(map(json.dumps, rows)))
    assert main(["transcribe", f"model={file}", "strategy=greedy_batch", f"manifest={cut.joined}"]) == 0
    found = [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()]
    model = Model.load(file, device="cpu")
    model.current_head.use_greedy()
    assert found == [each.text for each in model.model.transcribe(str(cut.joined), batch_size=5, verbose=False)]
    assert len(set(found)) == 5
    assert len(found[3]) > max(len(found[n]) for n in (0, 1, 2, 4))  # without offset, `duration` does not count


def test_subtitles_of_a_file_are_in_its_order(tmp_path):
    from nemo_gpu_decoding.audio import AudioPart
    from nemo_gpu_decoding.cli.options import parse_options
    from nemo_gpu_decoding.cli.transcribe import TranscribeOptions, _subtitled
    from nemo_gpu_decoding.manifest import Utterance
    from nemo_gpu_decoding.transcript import Transcript, Word

    parts = [Utterance("a.wav", AudioPart(tmp_path / "a.wav", at, 1.0), 1.0) for at in (7.5, 2.5, 3.5)]
    utterances = [*parts[:2], Utterance("b.wav", tmp_path / "b.wav", 1.0), parts[2]]
    found = [Transcript(name, 0.0, words=(Word(name, 0.9, 1.0),)) for name in "zxby"]
    options = parse_options(TranscribeOptions, ["model=m", f"out={tmp_path}/out.json", "subtitles=tsv"])
    assert list(_subtitled(utterances, [found[0], found[1], "failed", found[3]], options)) == [
        found[0], found[1], "failed", found[3],
    ]  # fmt: skip
    lines = (tmp_path / "a.tsv").read_text().splitlines()
    assert lines == ["start\tend\ttext", "3400\t3500\tx", "4400\t4500\ty", "8400\t8500\tz"]
    assert not (tmp_path / "b.tsv").exists()
