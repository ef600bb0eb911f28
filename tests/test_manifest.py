"""Which files a command works on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nemo_gpu_decoding.manifest import find_utterances, read_manifest, references_of

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


def test_a_folder_is_searched_for_audio_of_all_depths(folder):
    assert names(find_utterances(str(folder), None)) == ["a.flac", "b.wav", "c.wav"]


def test_files_patterns_and_lists(folder):
    assert names(find_utterances(str(folder / "b.wav"), None)) == ["b.wav"]
    assert names(find_utterances(f"{folder}/*.wav", None)) == ["b.wav"]
    assert names(find_utterances(f"{folder}/**/*.wav", None)) == ["b.wav", "c.wav"]
    both = find_utterances([f"{folder}/sub", f"{folder}/a.flac"], None)
    assert names(both) == ["c.wav", "a.flac"]
    assert both[0].duration == 0.5
    assert both[0].text is None


@pytest.mark.parametrize(("audio", "manifest"), [(None, None), ("a.wav", "m.json")], ids=["neither", "both"])
def test_exactly_one_source_is_wanted(audio, manifest):
    with pytest.raises(ValueError, match="give either audio="):
        find_utterances(audio, manifest)


def test_what_is_not_found_is_named(folder):
    with pytest.raises(ValueError, match=r"audio=.*/\*\.ogg is no file or folder here"):
        find_utterances(f"{folder}/*.ogg", None)
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=r"audio=.*empty: no \.wav"):
        find_utterances(str(folder / "empty"), None)


def test_what_is_no_audio_is_named(folder):
    with pytest.raises(ValueError, match=r"notes\.txt cannot be read as audio"):
        find_utterances(str(folder / "notes.txt"), None)


def test_manifest_paths_are_relative_to_the_manifest(folder):
    rows = [{"audio_filepath": "b.wav", "text": "hi"}, "", {"audio_filepath": str(folder / "a.flac")}]
    first, second = find_utterances(None, str(write_manifest(folder, *rows)))
    assert (first.name, first.path, first.text) == ("b.wav", folder / "b.wav", "hi")
    assert second.path == folder / "a.flac"
    with pytest.raises(ValueError, match=r"a\.flac has no `text`"):
        references_of([first, second])
    assert references_of([first]) == ["hi"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{oops", "line 2: not JSON"),
        ('{"audio_filepath": "b.wav", "n": ' + "9" * 5000 + "}", "line 2: not JSON"),
        ({"text": "x"}, "line 2: has no audio_filepath"),
        ({"audio_filepath": "nowhere.wav"}, "line 2: there is no file"),
        ({"audio_filepath": "b.wav", "offset": 1.5}, "line 2: offset is 1.5"),
    ],
)
def test_a_bad_line_of_a_manifest_is_named(folder, row, problem):
    with pytest.raises(ValueError, match=problem):
        read_manifest(write_manifest(folder, {"audio_filepath": "b.wav"}, row))


def test_a_missing_or_empty_manifest_is_named(folder):
    with pytest.raises(ValueError, match="is no file here"):
        read_manifest(folder / "nowhere.json")
    with pytest.raises(ValueError, match="has no lines"):
        read_manifest(write_manifest(folder, ""))
