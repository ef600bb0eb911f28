"""Which files a command works on."""

import json
import math
import os
import re

import numpy as np
import pytest

from nemo_gpu_decoding.audio import MonoReader, Sound, check_channel_selector, write_mono
from nemo_gpu_decoding.fusion.phrases import WrittenRequest
from nemo_gpu_decoding.manifest import find_audio, find_utterances, read_manifest, references_of, usable
from nemo_gpu_decoding.plain_text import read_lines
from nemo_gpu_decoding.transcript import BoostedPhrase, Totals, Transcript, Word, row_of

soundfile = pytest.importorskip("soundfile")


@pytest.fixture
def folder(tmp_path):
    for name in ("b.wav", "a.flac", "sub/c.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        soundfile.write(tmp_path / name, np.zeros(8000), 16000)
    (tmp_path / "notes.txt").write_text("no audio")
    return tmp_path


def names(utterances):
    return [utterance.path.name for utterance in utterances]


def write_manifest(folder, *rows):
    manifest = folder / "set.json"
    manifest.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return manifest


def test_folders_files_patterns_and_lists_are_found(folder):
    assert names(find_utterances(str(folder), None)) == ["a.flac", "b.wav", "c.wav"]
    assert names(find_utterances(str(folder / "b.wav"), None)) == ["b.wav"]
    assert names(find_utterances(f"{folder}/*.wav", None)) == ["b.wav"]
    assert names(find_utterances(f"{folder}/**/*.wav", None)) == ["b.wav", "c.wav"]
    both = find_utterances([f"{folder}/sub", f"{folder}/a.flac"], None)
    assert names(both) == ["c.wav", "a.flac"]
    assert both[0].duration == 0.5
    assert both[0].text is None


@pytest.mark.parametrize(("audio", "manifest"), [(None, None), ("a.wav", "m.json")], ids=["neither", "both"])
def test_neither_or_both_of_audio_and_manifest_are_refused(audio, manifest):
    with pytest.raises(ValueError, match="give either audio="):
        find_utterances(audio, manifest)


def test_missing_audio_is_named(folder):
    with pytest.raises(
        ValueError, match=r"audio=.*/\*\.ogg: no such file or folder, and no file matches it as a pattern"
    ):
        find_utterances(f"{folder}/*.ogg", None)
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=r"audio=.*empty: no \.wav"):
        find_utterances(str(folder / "empty"), None)


def test_file_that_is_no_audio_is_named_with_a_command_to_convert_it(folder):
    with pytest.raises(
        ValueError, match=r"notes\.txt cannot be read as audio.*; convert it: ffmpeg -i .*notes\.txt -ac 1"
    ):
        find_utterances(str(folder / "notes.txt"), None)
    (folder / "b.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"b\.wav cannot be read as audio") as error:
        find_utterances(str(folder / "b.wav"), None)
    assert "ffmpeg -i" not in str(error.value)
    (folder / "m.json").write_text("{}")
    with pytest.raises(ValueError, match=r"m\.json cannot be read .*; of a manifest it is manifest=.*m\.json$"):
        find_utterances(str(folder / "m.json"), None)


def test_bad_audio_is_a_fault_of_its_own_utterance(folder):
    samples = np.zeros(2_000_000, np.float32)
    samples[1_500_000] = np.nan
    soundfile.write(folder / "nan.wav", samples, 16000, subtype="FLOAT")
    soundfile.write(folder / "none.wav", np.zeros(0), 16000)
    found = find_utterances([f"{folder}/{name}" for name in ("b.wav", "nan.wav", "none.wav", "notes.txt")], None)
    assert [utterance.fault.split(":")[0].replace(f"{folder}/", "") for utterance in found] == [
        "", "nan.wav", "none.wav has no samples", "notes.txt cannot be read as audio",
    ]  # fmt: skip
    assert "sample 1500000 is nan, expected finite samples" in found[1].fault
    with pytest.raises(ValueError, match=r"nan\.wav: sample 1500000 is nan"):
        usable(found[1:2])


def test_rows_of_parts_of_a_file(folder):
    samples = np.arange(16000, dtype=np.float32) / 16000
    samples[100] = np.nan
    soundfile.write(folder / "long.wav", samples, 16000, subtype="FLOAT")
    spans = [(0.5, 0.25), (0.75, 9), (0.25, None), (0, 0.5), (1, 1), (0.5, 1e-6), (0.005, 0.5)]
    rows = [{"audio_filepath": "long.wav", "offset": at, "duration": length, "text": ""} for at, length in spans]
    found = read_manifest(write_manifest(folder, *rows))
    assert [each.fault.replace(f"{folder}/", "") for each in found] == [
        "", "", "", "long.wav: sample 100 is nan, expected finite samples; repair the file or leave it out",
        "manifest=set.json, line 5: offset is 1, expected a number < 1.0, the seconds of long.wav",
        "long.wav at 0.5 - 0.5 s has no samples",
        "long.wav: sample 100 is nan, expected finite samples; repair the file or leave it out",
    ]  # fmt: skip
    assert [each.duration for each in found] == [0.25, 0.25, 0.75, 0.5, 1, 1e-6, 0.5]
    assert [each.label for each in found[:3]] == [
        "long.wav at 0.5 - 0.75 s", "long.wav at 0.75 - 9.75 s", "long.wav at 0.25 s",
    ]  # fmt: skip
    row = row_of(found[1], Transcript("", -1.0), Totals())
    assert (row["audio_filepath"], row["offset"], row["duration"]) == ("long.wav", 0.75, 0.25)
    row = row_of(found[4], found[4].fault, Totals())
    assert (row["audio_filepath"], row["offset"], row["duration"]) == ("long.wav", 1, 1)


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
def test_only_the_part_of_a_file_is_read(suffix, folder, monkeypatch):
    soundfile.write(folder / f"two.{suffix}", np.random.default_rng(0).uniform(-0.5, 0.5, (40000, 2)), 8000)
    expected, _ = soundfile.read(folder / f"two.{suffix}", dtype="float32", start=8800, stop=20800)
    row = {"audio_filepath": f"two.{suffix}", "offset": 1.1, "duration": 1.5}
    (part,) = read_manifest(write_manifest(folder, row))
    counts, read = [], soundfile.SoundFile.read
    monkeypatch.setattr(
        soundfile.SoundFile, "read", lambda *given, **more: counts.append(len(a := read(*given, **more))) or a
    )
    write_mono(part.audio, folder / "mono.wav", 1)
    assert sum(counts) == 12000
    np.testing.assert_array_equal(soundfile.read(folder / "mono.wav", dtype="float32")[0], expected[:, 1])
    with MonoReader(part.audio, "average") as reader:
        reader.skip(11000)
        np.testing.assert_array_equal(reader.read(5000), expected[11000:].mean(axis=1))
        assert not len(reader.read(5000))


def test_a_row_for_an_empty_reference_is_json(folder):
    (utterance,) = read_manifest(write_manifest(folder, {"audio_filepath": "b.wav", "text": ""}))
    totals = Totals()
    row = row_of(utterance, Transcript("ho", -1.0, n_best=(("ho", -1.0), ("ho ho", -2.0))), totals)
    assert (row["wer"], totals.word_errors.insertions) == (None, 1)
    json.dumps(row, allow_nan=False)


def test_fields_of_a_manifest_are_kept_but_for_those_of_results(folder):
    row = {"audio_filepath": "b.wav", "text": "hi", "uid": 7, "speaker": "ann", "phrases": ["x"]}
    manifest = write_manifest(folder, {**row, "duration": 9.0, "wer": 1.0, "error": "old", "pred_text": "old"})
    (utterance,) = read_manifest(manifest)
    assert utterance.fields == {"uid": 7, "speaker": "ann", "phrases": ["x"]}
    assert utterance.request == WrittenRequest(["x"])
    assert row_of(utterance, Transcript("ho", -1.0), Totals()) == {
        **row, "duration": 0.5, "pred_text": "ho", "score": -1.0, "wer": 1.0,
    }  # fmt: skip


def test_rows_name_the_boosted_phrases(folder):
    (utterance,) = read_manifest(write_manifest(folder, {"audio_filepath": "b.wav"}))
    row = row_of(utterance, Transcript("ho", -1.0, phrases=(BoostedPhrase("ho", 0.25),)), Totals())
    assert json.loads(json.dumps(row))["found_phrases"] == [{"phrase": "ho", "evidence": 0.25}]


@pytest.mark.parametrize("name", ["confidence", "raw_confidence"])
def test_only_a_probability_is_called_confidence(name):
    word = Word("a", 0.0, 1.0)
    assert word.shown() == {"word": "a", "start": 0.0, "end": 1.0}
    rated = word._replace(**{name: 0.12345})
    assert rated.shown() == {**word.shown(), name: 0.1235}
    assert rated.ranked == 0.12345


@pytest.mark.parametrize(("selector", "expected"), [(None, 0.375), ("average", 0.375), (0, 0.5), (1, 0.25)])
def test_selected_channel_is_read(selector, expected, tmp_path):
    stereo, mono = tmp_path / "stereo.wav", tmp_path / "mono.wav"
    soundfile.write(stereo, np.full((2_100_000, 2), (0.5, 0.25)), 8000)
    write_mono(stereo, mono, selector)
    samples, rate = soundfile.read(mono)
    assert (samples.shape, rate, Sound(stereo).channels) == ((2_100_000,), 8000, 2)
    np.testing.assert_allclose(samples, expected)


def test_a_channel_that_is_not_there_is_named(folder):
    with pytest.raises(ValueError, match=r"channel_selector is 1, but .*b\.wav has 1 channel, expected .* 0 \.\. 0"):
        write_mono(folder / "b.wav", folder / "x.wav", 1)
    for wrong in (-1, True, "left", 0.5):
        with pytest.raises(ValueError, match="channel_selector is"):
            check_channel_selector(wrong)


def test_manifest_paths_are_relative_to_the_manifest(folder):
    rows = [{"audio_filepath": "b.wav", "text": "hi"}, "", {"audio_filepath": str(folder / "a.flac")}]
    first, second = find_utterances(None, str(write_manifest(folder, *rows)))
    assert (first.name, first.path, first.text) == ("b.wav", folder / "b.wav", "hi")
    assert second.path == folder / "a.flac"
    assert usable([first, second]) == [first]
    assert references_of([first]) == ["hi"]
    with pytest.raises(ValueError, match=r"a\.flac has no `text`"):
        usable([second])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{oops", "line 2: not JSON"),
        ('{"audio_filepath": "b.wav", "n": ' + "9" * 5000 + "}", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ({"audio_filepath": "b.wav", "note": "\ud83d"}, r"line 2: has '\\ud83d', half of a surrogate pair"),
        ({"text": "x"}, "line 2: has no audio_filepath"),
        ({"audio_filepath": "b.wav", "text": 5}, "line 2: text is 5, expected a text"),
        ({"audio_filepath": "nowhere.wav"}, "line 2: there is no file"),
        ({"audio_filepath": "b.wav", "offset": -1.5}, r"line 2: offset is -1.5, expected a finite number >= 0"),
        ({"audio_filepath": "b.wav", "offset": math.nan}, "line 2: offset is nan, expected a finite number >= 0"),
        ({"audio_filepath": "b.wav", "offset": 10**400}, "line 2: offset is 10*[.]{3}, expected a number 0 .. 1e.09"),
        ({"audio_filepath": "b.wav", "offset": True}, "line 2: offset is True, expected a finite number >= 0"),
        ({"audio_filepath": "b.wav", "offset": "1"}, "line 2: offset is '1', expected a finite number >= 0"),
        ({"audio_filepath": "b.wav", "offset": 0, "duration": 0}, "line 2: duration is 0, expected a finite .* > 0"),
        ({"audio_filepath": "b.wav", "offset": 0, "duration": [1]}, r"line 2: duration is \[1\], expected a finite"),
        ({"audio_filepath": "b.wav", "duration": -1}, "line 2: duration is -1, expected a finite number >= 0"),
        ({"audio_filepath": "b.wav", "allowed_price": math.nan}, "line 2: allowed_price is nan, expected a number"),
        ({"audio_filepath": "b.wav", "grammar": "commands.txt"}, "grammar is 'commands.txt', expected a list"),
        ({"audio_filepath": "b.wav", "grammar": ["a"], "phrases": ["a"]}, "expected none with a grammar"),
        ({"audio_filepath": "b.wav", "phrases": [{"phrase": "a", "weight": "2"}]}, "line 2: weight of phrase 'a'"),
        ({"audio_filepath": "b.wav", "lm": ["law"]}, r"line 2: lm is \['law'\], expected a string or None"),
    ],
)
def test_a_bad_line_of_a_manifest_is_a_fault_of_its_own_utterance(folder, row, problem):
    good, bad = find_utterances(None, str(write_manifest(folder, {"audio_filepath": "b.wav", "text": "a"}, row)))
    assert not good.fault
    assert re.search(problem, bad.fault)
    assert bad.name == (row.get("audio_filepath", "") if isinstance(row, dict) else "")
    json.dumps(row_of(bad, bad.fault, Totals()), ensure_ascii=False).encode()
    with pytest.raises(ValueError, match=problem):
        find_utterances(None, str(write_manifest(folder, "", row)))
    assert usable([good, bad]) == [good]
    with pytest.raises(ValueError, match=problem):
        usable([bad])


def test_rows_with_the_placeholder_of_nemo_are_not_scored(folder, messages):
    rows = [{"audio_filepath": "b.wav", "text": text} for text in ("-", "hi")]
    found = read_manifest(write_manifest(folder, *rows))
    totals = Totals()
    shown = [row_of(utterance, Transcript("hi", -1.0), totals) for utterance in found]
    assert [(row["text"], row.get("wer")) for row in shown] == [("-", None), ("hi", 0.0)]
    assert (totals.scored, totals.words) == (1, 1)
    assert usable(found) == found[1:]
    assert messages == ["left out: b.wav has no `text` in the manifest; error rates need it"]


@pytest.mark.parametrize("name", ["a b#%.wav", "~odd.wav", "${x}.wav", "[1].wav", "file:x.wav", "2024-11-28"])
def test_files_are_found_by_path_url_and_home_folder(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    soundfile.write(tmp_path / "home" / name, np.zeros(800), 16000, format="WAV")
    file = tmp_path / "home" / name
    rows = [
        {"audio_filepath": str(each)} for each in (file, file.as_uri(), f"file:{file}", f"~/{name}", f"home/{name}")
    ]
    assert [(each.path, each.fault) for each in read_manifest(write_manifest(tmp_path, *rows))] == [(file, "")] * 5
    monkeypatch.chdir(tmp_path / "home")
    for given in (name, file.as_uri(), f"~/{name}", [name]):
        assert [path.resolve() for path in find_audio(given)] == [file]


def test_files_in_a_folder_are_decoded_or_named(tmp_path, messages):
    for name in ("a.AIFF", "b.au", "in/c.w64", "d.caf", "e.ogg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        soundfile.write(tmp_path / name, np.zeros(8000), 16000, format=name.rsplit(".")[1].upper())
    for name in ("f.webm", "g.mp4", "notes.txt", "memo.dss", ".hidden"):
        (tmp_path / name).write_bytes(b"no audio")
    (tmp_path / "in" / "back").symlink_to(tmp_path)
    (tmp_path.parent / "other").mkdir(exist_ok=True)
    soundfile.write(tmp_path.parent / "other" / "h.wav", np.zeros(8000), 16000)
    (tmp_path / "link").symlink_to(tmp_path.parent / "other")
    found = find_utterances(str(tmp_path), None)
    assert sorted(names(found)) == ["a.AIFF", "b.au", "c.w64", "d.caf", "e.ogg", "f.webm", "g.mp4", "h.wav"]
    assert messages == [f"audio={tmp_path}: 2 of 10 files left out: memo.dss; notes.txt"]
    assert sorted(each.path.name for each in found if each.fault) == ["f.webm", "g.mp4"]


def test_nemos_phrases_of_a_row_are_its_request(folder):
    wanted = {"boosting_model_cfg": {"key_phrases_list": ["ann"]}, "boosting_model_alpha": 2.0}
    row = {"audio_filepath": "b.wav", "biasing_request": wanted}
    bad = row | {"phrases": ["bob"]}, row | {"grammar": ["ann"], "offset": 1}
    found = read_manifest(write_manifest(folder, row, *bad))
    assert found[0].request.given == {"biasing_request": wanted}
    assert all("biasing_request is" in utterance.fault for utterance in found[1:])
    assert found[2].label == "b.wav"


def test_a_name_that_is_not_utf_8_is_a_fault_of_its_own_utterance(folder):
    (folder / "b.wav").rename(os.fsdecode(os.fsencode(folder / "caf") + b"\xe9.wav"))
    good, bad, _ = find_utterances(str(folder), None)
    assert not good.fault
    assert bad.name == f"{folder}/caf\\xe9.wav"
    assert bad.fault == f"{bad.name}: the name of the file is not UTF-8; rename the file"


def test_a_missing_or_empty_manifest_is_named(folder):
    with pytest.raises(ValueError, match="is no file here"):
        read_manifest(folder / "nowhere.json")
    with pytest.raises(ValueError, match="has no lines"):
        read_manifest(write_manifest(folder, ""))


def test_manifest_lines_end_only_at_line_feeds(tmp_path):
    (tmp_path / "text").write_bytes("\ufeffa \r\n\n\tb\u2028c\r\r\nd".encode())
    assert read_lines(tmp_path / "text") == ["a ", "", "\tb\u2028c\r", "d"]
