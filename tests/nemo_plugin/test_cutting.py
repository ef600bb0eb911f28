"""Where long recordings are cut, and subtitles: without a model."""

import re
from itertools import pairwise

import numpy as np
import pytest

from nemo_gpu_decoding.live.subtitles import MAX_CHARACTERS, lines, subtitles
from nemo_gpu_decoding.nemo_plugin.cutting import PAUSES, Cutting, Limits, choose_segments, onset
from nemo_gpu_decoding.transcript import Transcript, Word

STEP = 0.08
MINUTE = Limits(60, (0.3,))  # longest segment, and the pauses that are tried


def cuts_of(segments):
    """The begins of adjacent segments, and the end of the last one."""
    assert all(a[1] == b[0] for a, b in pairwise(segments))
    return [begin for begin, _ in segments] + [segments[-1][1]]


def random_words(rng, total, pauses):
    """First and end frames of words with pauses of `pauses` frames between them."""
    words, at = [], int(rng.integers(0, 20))
    while at < total - 10:
        words.append((at, at + int(rng.integers(1, 10))))
        at = words[-1][1] + int(rng.integers(*pauses))
    return np.array(words)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_between_words_and_segments_are_not_too_long(seed):
    rng = np.random.default_rng(seed)
    words, total = random_words(rng, 20000, (0, 12)), 20000
    segments, doubtful = choose_segments(words, 0.5 + rng.random(total), Limits(20), STEP)  # no frame is silent
    cuts = cuts_of(segments)
    assert cuts[0] == 0
    assert cuts[-1] == total
    lengths = np.diff(cuts) * STEP
    assert lengths.max() <= 20
    assert lengths[:-1].min() >= 1
    assert abs(np.median(lengths) - 10) < 1
    assert not doubtful
    for cut in cuts[1:-1]:
        before = max(end for _, end in words if end <= cut)
        assert (min(start for start, _ in words if start >= cut) - before) * STEP >= 0.3
        assert not any(start < cut < end for start, end in words)


def test_the_longest_pause_near_the_target_is_taken_at_its_quietest_place():
    words = np.array([(n, n + 4) for n in (*range(0, 100, 8), *range(120, 400, 8))])  # a pause of 1.3 s at frame 100
    loudness = np.ones(400)
    loudness[112:114] = 0.2
    segments, doubtful = choose_segments(words, loudness, Limits(20), STEP)
    assert cuts_of(segments)[1] == 113
    assert not doubtful


@pytest.mark.parametrize(("frames", "expected"), [(45000, [(0, 12)]), (0, [])], ids=["an hour", "no recording"])
def test_silence_is_a_segment_of_a_second_and_an_empty_recording_has_none(frames, expected):
    assert choose_segments(np.zeros((0, 2), int), np.zeros(frames), MINUTE, STEP) == (expected, [])


def test_noise_without_words_is_cut():
    segments, doubtful = choose_segments(np.zeros((0, 2), int), np.ones(45000), MINUTE, STEP)
    assert np.diff(cuts_of(segments)).max() * STEP <= 60
    assert not doubtful


@pytest.mark.parametrize("level", [0.0, 0.01])
def test_segments_contain_no_silence_at_their_ends(level):
    """Words of 0.8 s with silence of 0.24, 0.4 and 1.2 s, in turn. A quiet voice in a silence is kept."""
    words, at = [], 50
    for n in range(60):
        words.append((at, at + 10))
        at += 10 + (3, 5, 15)[n % 3]
    loudness = np.full(at + 50, level)
    for begin, end in words:
        loudness[begin:end] = 1.0
    loudness[words[2][1] + 7] = 0.1 + level
    segments, doubtful = choose_segments(np.array(words), loudness, Limits(60, (0.6,)), STEP)
    assert not doubtful
    assert len(segments) == 19  # the silence with the voice is shorter than 0.6 s on both sides of it
    assert segments[0] == (50, words[5][1])
    assert segments[1] == (words[6][0], words[8][1])
    assert segments[-1][1] == words[-1][1]


def noisy(total, spans, rng, noise=0.001):
    """Loudness of steps of 10 ms: 1.0 in spans, noise elsewhere."""
    loudness = noise * (1 + 0.05 * rng.standard_normal(total))
    for begin, end in spans:
        loudness[begin:end] = 1.0
    return loudness


def test_a_long_word_does_not_hide_a_pause():
    """The silence of 0.2 s in the word belongs to it; that of 1 s is between two segments."""
    loudness = noisy(1000, [(200, 300), (320, 400), (500, 700)], np.random.default_rng(0))
    segments, doubtful = choose_segments(np.array([(210, 690)]), loudness, MINUTE, 0.01)
    assert segments == [(200, 400), (500, 700)]
    assert not doubtful


def test_a_word_heard_in_noise_is_no_sound():
    loudness = noisy(1000, [(200, 400)], np.random.default_rng(0))
    assert choose_segments(np.array([(220, 380), (700, 740)]), loudness, MINUTE, 0.01)[0] == [(200, 400)]


def test_faint_sound_beside_speech_is_kept_and_noise_is_not():
    loudness = noisy(1000, [(200, 400)], np.random.default_rng(0))
    loudness[190:200] = loudness[400:415] = 0.01  # -40 dB; the fricatives of "six"
    loudness[700:710] = 0.01
    assert choose_segments(np.array([(220, 380)]), loudness, MINUTE, 0.01)[0] == [(190, 415)]


@pytest.mark.parametrize(("least", "expected"), [(0.2, [(200, 400), (420, 700)]), (0.3, [(200, 700)])])
def test_a_long_pause_ends_a_segment_even_in_a_word(least, expected):
    loudness = noisy(1000, [(200, 400), (420, 700)], np.random.default_rng(0))
    assert choose_segments(np.array([(300, 500)]), loudness, Limits(60, (least,)), 0.01)[0] == expected


@pytest.mark.parametrize("least", [0.08, 0.1, 0.11])
@pytest.mark.parametrize("words", [[(200, 400), (410, 700)], [(200, 700)]])
def test_background_noise_ends_a_segment_in_half_the_time_of_silence(words, least):
    """Noise of 0.1 s between two words or in one, and a closure of 0.1 s that is 16 dB louder than the noise."""
    loudness = noisy(1000, [(200, 400), (410, 700)], np.random.default_rng(0))
    loudness[500:510] = 0.006
    segments, _ = choose_segments(np.array(words), loudness, Limits(60, (least,)), 0.01)
    assert segments == ([(200, 400), (410, 700)] if least <= 0.1 else [(200, 700)])


def test_background_noise_is_known_from_few_pauses():
    """Background noise is 3 % of the time. The other silence, between words, is 12 dB louder."""
    loudness = noisy(3000, [(0, 3000)], np.random.default_rng(0))
    loudness[np.arange(3000) % 100 < 12] = 0.004
    pauses = [(n, n + 10) for n in range(340, 2700, 320)]
    for begin, end in pauses:
        loudness[begin:end] = 0.001
    words = np.array([(n, n + 50) for n in range(0, 3000, 50)])
    segments, _ = choose_segments(words, loudness, Limits(60, (0.08,)), 0.01)
    edges = [(before[1], after[0]) for before, after in pairwise(segments)]
    assert len(edges) == len(pauses)
    assert all(begin <= pause[0] < pause[1] <= end for pause, (begin, end) in zip(pauses, edges, strict=True))


def test_quiet_words_are_sound():
    """Words of -46 dB of the others that the greedy pass hears, with a closure of 0.1 s that is silent."""
    loudness = noisy(2000, [(200, 400), (600, 800), (1000, 1200)], np.random.default_rng(0))
    loudness[1500:1540] = loudness[1550:1600] = 0.005
    words = np.array([(200, 400), (600, 800), (1000, 1200), (1500, 1600)])
    assert choose_segments(words, loudness, MINUTE, 0.01)[0][-1] == (1500, 1600)


def test_without_pauses_the_longest_gap_is_taken_and_reported():
    words = np.array([(n, n + 4) for n in range(0, 2000, 4)])
    words[100:, 0] += 1  # one frame between all later words
    words[100, 0] += 1  # two before this one, at frame 402
    segments, doubtful = choose_segments(words, np.ones(2000), MINUTE, STEP)
    cuts = cuts_of(segments)
    assert 400 <= cuts[1] <= 402
    assert doubtful == cuts[1:-1]
    assert np.diff(cuts).max() * STEP <= 60


def test_one_word_that_fills_the_range_is_cut_at_its_quietest_frame():
    loudness = np.ones(1000)
    loudness[300] = 0.0
    segments, doubtful = choose_segments(np.array([(0, 1000)]), loudness, MINUTE, STEP)
    cuts = cuts_of(segments)
    assert cuts[1] in (300, 301)
    assert doubtful == [cuts[1]]


@pytest.mark.parametrize("rate", [8000, 16000, 22050])
def test_a_segment_begins_with_its_sound_to_a_millisecond(rate):
    rng = np.random.default_rng(0)
    for late in (0.0, 0.003, 0.0071, 0.0095):
        samples = 0.001 * rng.standard_normal(rate // 100)
        begin = round(late * rate)
        samples[begin:] += 0.05
        assert begin - rate / 1000 < onset(samples, rate, 0.002) <= begin + rate / 1000
        samples[:begin] = 0.0  # a quiet step is compared with its own sound
        assert abs(onset(samples, rate, 0.5) - begin) <= rate / 1000
    assert onset(np.full(rate // 100, 0.05), rate, 0.002) == 0
    assert onset(np.zeros(rate // 100), rate, 0.002) == onset(np.zeros(3), rate, 0.002) == 0


@pytest.mark.parametrize("length", [3.0, 6.0, 40.0])
def test_the_longest_pause_is_chosen_that_keeps_segments_as_short_as_in_training(length):
    """Sentences of 2 s, with pauses that become longer in turn, from 0.1 to 0.9 s."""
    spans, at = [], 100
    for n in range(180):
        spans.append((at, at + 200))
        at += 200 + 10 * (1 + n % 9)
    loudness = noisy(at + 100, spans, np.random.default_rng(0))
    segments, doubtful = choose_segments(np.array(spans), loudness, Cutting().limits(length), 0.01)
    lengths = np.array([end - begin for begin, end in segments]) * 0.01
    assert not doubtful
    assert lengths.max() <= length
    assert lengths.max() > 0.4 * length


def test_models_without_known_lengths_and_a_chosen_length_have_their_limits():
    assert Cutting().limits(None) == Limits(60, PAUSES[5:])
    assert Cutting().limits(40.0) == Limits(40)
    assert Cutting(8).limits(40.0) == Limits(16)
    assert [Cutting().whole_seconds, Cutting(8).whole_seconds] == [60, 16]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ((1,), "segment_seconds is 1, expected a number >= 2"),
        ((30, 1.5), "min_confidence is 1.5, expected a number in [0, 1]"),
    ],
)
def test_cutting_refuses_values_out_of_range(values, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        Cutting(*values)


def spoken(texts, pauses):
    """A transcript of words of 0.4 s, with a pause after each."""
    words, at = [], 3599.0
    for text, pause in zip(texts, pauses, strict=True):
        words.append(Word(text, round(at, 3), round(at + 0.4, 3)))
        at += 0.4 + pause
    return Transcript(" ".join(texts), words=tuple(words))


def seconds_of(time):
    hours, minutes, seconds = re.split(":", time.replace(",", "."))
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def parsed(content, file_format):
    """(start, end, text) of each line of a file of subtitles."""
    if file_format == "tsv":
        rows = [row.split("\t") for row in content.splitlines()[1:]]
        return [(int(start) / 1000, int(end) / 1000, text) for start, end, text in rows]
    times = r"(\d\d:\d\d:\d\d[,.]\d{3}) --> (\d\d:\d\d:\d\d[,.]\d{3})\n(.*)\n\n"
    return [(seconds_of(a), seconds_of(b), text) for a, b, text in re.findall(times, content)]


def test_subtitle_lines_end_at_pauses():
    words = spoken(["a"] * 5 + ["b"] * 5, [0.1] * 4 + [0.5] + [0.1] * 5)
    assert ["".join(w.word for w in line) for line in lines(words, 0.3)] == [" a a a a a", " b b b b b"]


def test_words_without_pauses_are_divided_in_the_middle():
    assert [len(line) for line in lines(spoken(["abcdefghi"] * 16, [0.0] * 16), 0.3)] == [4, 4, 4, 4]


@pytest.mark.parametrize("file_format", ["srt", "vtt", "tsv"])
def test_subtitles_parse_again(file_format):
    rng = np.random.default_rng(0)
    spoken_words = spoken([f"w<{n}>&" for n in range(200)], rng.choice([0.04, 0.08, 0.16, 0.9], 200).tolist())
    found = parsed(subtitles([spoken_words], file_format, 0.3), file_format)
    texts = [text for _, _, text in found]
    if file_format == "vtt":
        texts = [text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for text in texts]
    assert " ".join(texts) == spoken_words.text
    assert max(map(len, texts)) <= MAX_CHARACTERS
    expected = [(line[0].start, line[-1].end) for line in lines(spoken_words, 0.3)]
    assert np.allclose([each[:2] for each in found], expected, atol=1e-3)
    assert all(a[1] <= b[0] for a, b in pairwise(found))


THAI, KANA = "สวัสดีครับวันนี้อากาศดีมากเลยนะ" * 3, "あいうえおかきくけこさしすせそ。" * 5


@pytest.mark.parametrize("text", [THAI, KANA, "x" * 100], ids=["Thai", "kana", "long"])
@pytest.mark.parametrize("file_format", ["srt", "vtt", "tsv"])
def test_words_without_spaces_are_cut_at_their_pieces(text, file_format):
    pieces = [Word(letter, 0.2 * n + 0.3, 0.2 * n + 0.4) for n, letter in enumerate(text)]
    whole = Word(text, 0.3, pieces[-1].end, pieces=tuple(pieces))
    words = [Word("one", 0.0, 0.2), whole, Word("two", 0.0, 0.1).later(whole.end)]
    found = parsed(subtitles([Transcript(f"one {text} two", words=tuple(words))], file_format, 0.3), file_format)
    assert "".join(text for _, _, text in found).replace(" ", "") == f"one{text}two"
    assert found[0][2].startswith("one ")
    assert found[-1][2].endswith(" two")
    assert max(len(line) for _, _, line in found) <= (MAX_CHARACTERS if text[0] == "x" else 20)
    assert max(end - start for start, end, _ in found) <= 7
    times = {round(time, 3) for piece in pieces for time in (piece.start, piece.end)}
    assert {round(start, 3) for start, _, _ in found[1:]} <= times


def test_subtitles_without_words_are_empty():
    assert subtitles([spoken(["a", "b"], [1, 1])], "txt", 0.3) == "a\nb\n"
    assert subtitles([Transcript("")], "vtt", 0.3) == "WEBVTT\n\n"
    assert subtitles([Transcript("")], "srt", 0.3) == ""
