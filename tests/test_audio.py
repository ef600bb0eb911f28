"""Audio files that are joined, cut short, damaged or without a length: what can be read is, and faults are named."""

import shutil
import subprocess

import numpy as np
import pytest

from nemo_gpu_decoding.audio import MonoReader, Sound, checked_seconds, write_mono

soundfile = pytest.importorskip("soundfile")
RATE, SECONDS = 16000, 3.0
FORMS = {  # name -> format and subtype
    "wav": ("WAV", "PCM_16"), "float": ("WAV", "FLOAT"), "ulaw": ("WAV", "ULAW"), "rf64": ("RF64", "PCM_16"),
    "aiff": ("AIFF", "PCM_16"), "au": ("AU", "PCM_16"), "w64": ("W64", "PCM_16"), "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS"), "mp3": ("MP3", "MPEG_LAYER_III"), "caf": ("CAF", "PCM_16"),
    "nist": ("NIST", "PCM_16"), "voc": ("VOC", "PCM_16"), "mat4": ("MAT4", "PCM_16"), "wavex": ("WAVEX", "PCM_16"),
}  # fmt: skip
OF_FFMPEG = ("m4a", "webm", "wma", "wv", "tta", "mp2", "ts", "avi")
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """The bytes of a chirp in each form."""
    t = np.arange(int(RATE * SECONDS)) / RATE
    samples = 0.3 * np.sin(2 * np.pi * (200 + 200 * t) * t) + 0.01 * np.random.default_rng(0).normal(size=len(t))
    folder, found = tmp_path_factory.mktemp("forms"), {}
    for name, (file_format, subtype) in FORMS.items():
        soundfile.write(folder / name, samples, RATE, format=file_format, subtype=subtype)
        found[name] = (folder / name).read_bytes()
    for name in OF_FFMPEG if shutil.which("ffmpeg") else ():
        subprocess.run(["ffmpeg", "-v", "error", "-f", "wav", "-i", "wav", f"new.{name}"], cwd=folder, check=True)
        found[name] = (folder / f"new.{name}").read_bytes()
    return found


def read(path):
    """Seconds by the header, seconds that are read, and the fault."""
    with MonoReader(path, None) as reader:
        samples, fault = reader.read_readable(10 * RATE * int(SECONDS))
        return checked_seconds(path), len(samples) / reader.rate, fault


@pytest.mark.parametrize("name", [*FORMS, *(pytest.param(name, marks=needs_ffmpeg) for name in OF_FFMPEG)])
def test_undamaged_file_has_no_fault(name, contents, tmp_path):
    (tmp_path / "a").write_bytes(contents[name])
    seconds, there, fault = read(tmp_path / "a")
    assert (seconds, there, fault) == (pytest.approx(SECONDS, abs=0.12), pytest.approx(seconds, abs=0.05), "")
    with Sound(tmp_path / "a") as sound:
        assert sound.is_plain == (name in ("wav", "float", "ulaw", "flac"))
    (tmp_path / "b").write_bytes(contents["wav"])
    levels = []
    for file in ("a", "b"):  # decoders may delay the samples, and webm has others
        with MonoReader(tmp_path / file, None) as reader:
            samples, _ = reader.read_readable(10 * int(SECONDS) * reader.rate)
            parts = np.array_split(samples, 8)
            crossings = [np.sum(np.diff(np.sign(part)) != 0) for part in parts]  # of zero, twice the frequency
            levels.append([float(np.std(samples)), *np.array(crossings[1:]) / (len(parts[0]) / reader.rate)])
    np.testing.assert_allclose(*levels, rtol=0.2)


@pytest.mark.parametrize("name", ["wav", "ulaw", "rf64", "aiff", "au", "caf", "flac", "ogg", "opus", "mp3"])
@pytest.mark.parametrize("times", [2, 3])
def test_all_recordings_of_a_joined_file_are_read(name, times, contents, tmp_path):
    (tmp_path / "a").write_bytes(contents[name] * times)
    seconds, there, fault = read(tmp_path / "a")
    assert (seconds, fault) == (pytest.approx(times * SECONDS, abs=0.12 * times), "")
    assert there == pytest.approx(seconds, abs=0.05)
    with MonoReader(tmp_path / "a", None) as reader:
        all_samples, _ = reader.read_readable(100 * RATE)
    with Sound(tmp_path / "a") as sound:  # a part that goes on in the second file
        sound.seek(int(2.5 * RATE))
        first, second = sound.read_channels(2 * RATE), sound.read_channels(RATE)
        assert len(first) == pytest.approx(0.5 * RATE, abs=2000)
    np.testing.assert_allclose(second[:, 0], all_samples[int(2.5 * RATE) + len(first) :][: len(second)], atol=1e-4)


@needs_ffmpeg
@pytest.mark.parametrize("tag", [b"", b"ID3\4\0\0\0\0\0\5abcde"])
def test_mp3_with_and_without_a_header_are_joined(tag, contents, tmp_path):
    (tmp_path / "a.wav").write_bytes(contents["wav"])
    command = ["ffmpeg", "-v", "error", "-i", "a.wav", "-write_xing", "0", "-id3v2_version", "0", "plain.mp3"]
    subprocess.run(command, cwd=tmp_path, check=True)
    plain, mp3 = (tmp_path / "plain.mp3").read_bytes(), contents["mp3"]
    (tmp_path / "a").write_bytes(tag + mp3 + b"TAG" + bytes(125) + tag + plain + b"TAG" + bytes(125))
    assert read(tmp_path / "a")[1:] == (pytest.approx(2 * SECONDS, abs=0.2), "")
    form = ["-filter_complex", "[0]apad=whole_dur=30", "-q:a", "4", "-write_xing", "0", "-id3v2_version", "0", "v.mp3"]
    subprocess.run(["ffmpeg", "-v", "error", "-i", "a.wav", *form], cwd=tmp_path, check=True)
    assert read(tmp_path / "v.mp3")[1:] == (pytest.approx(30, abs=0.2), "")


@needs_ffmpeg
def test_files_that_are_read_in_part_have_a_fault(contents, tmp_path):
    parts = [contents[name] * 2 for name in ("m4a", "wma", "tta")]
    parts += [contents[name][:-9001] for name in ("caf", "mp2", "ts", "avi", "wma")] + [contents["ogg"][:-100]]
    parts += [contents[name][:-9000] + bytes(4000) + contents[name][-5000:] for name in ("wma", "avi")]
    for name, size in (("wav", 9000), ("wavex", 9000), ("wav", 0), ("wav", 2**31 - 1), ("wav", 2**32 - 1)):
        begin, _, end = contents[name].partition(b"data")
        parts.append(begin + b"data" + size.to_bytes(4, "little") + end[4 : len(end) if size == 9000 else -9000])
    for content in parts:
        (tmp_path / "a").write_bytes(content)
        assert read(tmp_path / "a")[2]
    (tmp_path / "a").write_bytes(contents["wav"])
    for name, codec in (("b.wav", "adpcm_ms"), ("c.wav", "libgsm_ms")):
        command = ["ffmpeg", "-v", "error", "-i", "a", "-ar", "8000", "-c:a", codec, name]
        subprocess.run(command, cwd=tmp_path, check=True)
        assert read(tmp_path / name)[1:] == (pytest.approx(SECONDS, abs=0.3), "")
    (tmp_path / "d.wav").write_bytes((tmp_path / "c.wav").read_bytes() * 2)
    assert read(tmp_path / "d.wav")[2] == "a recording is joined to it, which is not read"


@pytest.mark.parametrize("first", ["wav", "mp3", "aiff"])
@pytest.mark.parametrize("second", ["wav", "mp3", "ogg", "flac"])
def test_recordings_of_two_formats_in_one_file_are_read(first, second, contents, tmp_path):
    (tmp_path / "a").write_bytes(contents[first] + contents[second])
    assert read(tmp_path / "a")[1:] == (pytest.approx(2 * SECONDS, abs=0.2), "")


def test_joined_files_of_different_rates_are_read_as_far_as_they_are_alike(contents, tmp_path):
    soundfile.write(tmp_path / "b", np.zeros(8000), 8000, format="FLAC")
    (tmp_path / "a").write_bytes(contents["flac"] + (tmp_path / "b").read_bytes())
    assert read(tmp_path / "a")[1:] == (
        SECONDS, "a recording of another sample rate or other channels is joined to it"
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_files_that_are_cut_short_have_a_fault(name, contents, tmp_path):
    (tmp_path / "a").write_bytes(contents[name][: len(contents[name]) // 2])
    _, there, fault = read(tmp_path / "a")
    assert 0.4 < there < 2
    assert fault
    with pytest.raises(ValueError, match="a cannot be read as audio"):
        write_mono(tmp_path / "a", tmp_path / "b.wav", None)


@needs_ffmpeg
@pytest.mark.parametrize("name", ["flac", "ogg", "opus", "mp3", "webm"])
def test_damaged_files_have_a_fault(name, contents, tmp_path):
    content, middle = bytearray(contents[name]), len(contents[name]) // 2
    content[middle : middle + 2000] = bytes(2000)
    (tmp_path / "a").write_bytes(content)
    _, there, fault = read(tmp_path / "a")
    assert 0.5 < there < SECONDS
    assert fault
    assert there > 1.9 or name not in ("flac", "mp3")  # ffmpeg reads what follows
    if name == "opus":  # whose decoder ends at the damage without an error
        (tmp_path / "a").write_bytes(bytes(content) + contents[name])
        assert read(tmp_path / "a")[2]


@pytest.mark.parametrize("name", ["wav", "float", "ulaw", "aiff", pytest.param("au", marks=needs_ffmpeg)])
@pytest.mark.parametrize("size", [0, 2**32 - 1])
def test_samples_without_a_size_are_read_to_the_end_of_the_file(name, size, contents, tmp_path):
    content = bytearray(contents[name])
    at = 8 if name == "au" else content.index(b"SSND" if name == "aiff" else b"data") + 4
    content[at : at + 4] = size.to_bytes(4, "little")
    for count in (0, 1) if name in ("wav", "float", "ulaw") else (0,):  # whole recordings before it
        (tmp_path / "a").write_bytes(contents[name] * count + content)
        assert read(tmp_path / "a") == (SECONDS * (count + 1), SECONDS * (count + 1), "")


@needs_ffmpeg
def test_rf64_and_flac_without_sizes_are_read_to_the_end_of_the_file(contents, tmp_path):
    (tmp_path / "a").write_bytes(contents["flac"])
    with (tmp_path / "b").open("wb") as pipe:
        subprocess.run(["ffmpeg", "-v", "error", "-i", tmp_path / "a", "-f", "flac", "-"], stdout=pipe, check=True)
    assert read(tmp_path / "b") == (SECONDS, SECONDS, "")
    content = bytearray(contents["rf64"])
    at = content.index(b"ds64") + 8
    content[at : at + 24] = bytes(24)
    (tmp_path / "a").write_bytes(content)
    assert read(tmp_path / "a") == (SECONDS, SECONDS, "")


def test_recordings_without_samples_stay_empty(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(0), RATE)
    (tmp_path / "b.wav").write_bytes((tmp_path / "a.wav").read_bytes() + b"LIST" + (4).to_bytes(4, "little") + b"INFO")
    for name in ("a.wav", "b.wav"):
        with pytest.raises(ValueError, match="has no samples"):
            checked_seconds(tmp_path / name)


@pytest.mark.parametrize(("factors", "silent"), [((1, -1), True), ((1, -0.9), True), ((1, 1), False), ((1, 0), False)])
@pytest.mark.parametrize("channel", [None, "average", 0])
def test_channels_that_cancel_get_a_warning(factors, silent, channel, tmp_path, messages):
    samples = 0.3 * np.random.default_rng(0).normal(size=RATE)
    soundfile.write(tmp_path / "a.wav", samples[:, None] * factors, RATE, subtype="FLOAT")
    for _ in range(2):
        write_mono(tmp_path / "a.wav", tmp_path / "b.wav", channel)
    assert len(messages) == int(silent and channel != 0)
    assert all("a.wav: the average of its channels is almost silent" in message for message in messages)


def test_playlists_are_not_followed(contents, tmp_path):
    (tmp_path / "a.wav").write_bytes(contents["wav"])
    for name, content in {
        "a.m3u8": "#EXTM3U\n#EXTINF:3\na.wav\n",
        "a.ffconcat": "ffconcat version 1.0\nfile a.wav\n",
    }.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match="cannot be read as audio"):
            checked_seconds(tmp_path / name)
