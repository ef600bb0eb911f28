"""Long recordings: segments joined again, on the shipped models and speech."""

import json
import platform
import subprocess
import sys
import tracemalloc
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_gpu_decoding.audio import part_of
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.nemo_plugin.cutting import Cutting
from tests.assets import ASSETS, ROOT

soundfile = pytest.importorskip("soundfile")
pytestmark = pytest.mark.slow

RATE = 16000


def joined_speech(folder, count=10, suffix="flac"):
    """A file of shipped utterances with pauses of 0.1-3 s and noise, and the seconds of each utterance."""
    rng = np.random.default_rng(0)
    parts, spans, at = [], [], 0
    for line in (ASSETS / "speech" / "test.json").read_text().splitlines()[:count]:
        samples, _ = soundfile.read(ASSETS / "speech" / json.loads(line)["audio_filepath"], dtype="float32")
        pause = int(rng.uniform(0.1, 3) * RATE)
        spans.append((at / RATE, (at + len(samples)) / RATE))
        parts += [samples, np.zeros(pause, np.float32)]
        at += len(samples) + pause
    samples = np.concatenate(parts)
    samples += 1e-4 * rng.standard_normal(len(samples)).astype(np.float32)
    file = folder / f"joined.{suffix}"
    soundfile.write(file, samples, RATE)
    return file, spans


def load(name, head, strategy, timestamps=True):
    from omegaconf import OmegaConf

    from nemo_gpu_decoding.nemo_plugin.model import Model

    model = Model.load(str(ASSETS / "models" / f"{name}.nemo"), device="cpu")
    decoding = {"strategy": strategy, "compute_timestamps": timestamps, "beam": {"beam_size": 4}}
    model.head(head).use(OmegaConf.create(decoding))
    return model


@pytest.mark.parametrize(
    ("name", "head", "strategy"),
    [
        ("self_ctc", "ctc", "flexctc_beam"),
        ("self_hybrid_rnnt", "rnnt", "alsd_pp"),
        ("self_hybrid_tdt", "rnnt", "alsd_pp"),
        ("self_hybrid_tdt", "ctc", "flexctc_beam"),
    ],
)
def test_text_of_a_recording_is_that_of_its_segments(name, head, strategy, tmp_path):
    from nemo_gpu_decoding.nemo_plugin.transcribing import transcribe_long

    file, _ = joined_speech(tmp_path)
    model = load(name, head, strategy)
    found = transcribe_long(model, file, cutting=Cutting(8), batch_size=3)
    samples, _ = soundfile.read(file, dtype="float32")
    assert model.current_head.name == head
    assert model.current_head.config.strategy == strategy
    assert len(found.segments) > 3
    assert found.segments[-1].end <= len(samples) / RATE + 1e-3
    alone, words = [], []
    for n, segment in enumerate(found.segments):
        assert segment.end - segment.start <= 16
        assert n == 0 or segment.start >= found.segments[n - 1].end
        own = tmp_path / f"{n}.wav"
        soundfile.write(own, samples[round(segment.start * RATE) : round(segment.end * RATE)], RATE, subtype="FLOAT")
        (outputs,) = model.encode([own], 1)
        (transcript,) = model.decode(outputs)
        alone.append(transcript.text)
        words += [(word.word, word.start + segment.start, word.end + segment.start) for word in transcript.words]
    # batches differ, and so sums of floats: a beam may take the other one of two equal words
    assert word_errors([" ".join(alone)], [found.text]).wer < 0.02
    assert [word.word for word in found.words] == found.text.split()
    if len(words) == len(found.words):
        times = np.array([(word.start, word.end) for word in found.words])
        assert np.abs(times - np.array([times for _, *times in words])).max() <= 0.08 + 1e-6
    assert all(a.start <= b.start for a, b in pairwise(found.words))


def test_segments_without_confidence_are_left_out():
    from nemo_gpu_decoding.nemo_plugin.long_audio import joined
    from nemo_gpu_decoding.transcript import Transcript, Word

    found = [
        Transcript("a b", -1.0, (Word("a", 0.1, 0.2, 0.9), Word("b", 0.3, 0.4, 0.5))),
        Transcript("c", -2.0, (Word("c", 0.1, 0.2, 0.6),)),
        Transcript("", -4.0),
        Transcript("d", -8.0, (Word("d", 0.1, 0.2),)),
        "cannot be decoded",
    ]
    spans = [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0), (4.0, 5.0)]
    for least, text, score, starts in (
        (0.6, "a b c d", -15.0, [0.0, 1.0, 2.0, 3.0, 4.0]),
        (0.61, "a b d", -13.0, [0.0, 2.0, 3.0, 4.0]),
        (0.71, "d", -12.0, [2.0, 3.0, 4.0]),
    ):
        whole = joined(spans, found, "", least)
        assert (whole.text, whole.score) == (text, score)
        assert [segment.start for segment in whole.segments] == starts
        assert " ".join(word.word for word in whole.words) == text
        assert whole.error.startswith("cannot be decoded")


def test_noise_gets_no_words(tmp_path):
    from nemo_gpu_decoding.nemo_plugin.transcribing import transcribe_long

    file, spans = joined_speech(tmp_path, 4)
    samples, _ = soundfile.read(file, dtype="float32")
    noise = 0.05 * np.random.default_rng(0).standard_normal(5 * RATE)
    soundfile.write(tmp_path / "noisy.wav", np.concatenate([samples, noise, np.zeros(RATE), samples]), RATE)
    model = load("self_ctc", "ctc", "greedy_batch")
    section = model.current_head.config
    section.confidence_cfg = {"aggregation": "mean", "method_cfg": {"name": "max_prob", "alpha": 1.0}}
    model.current_head.use(section)
    begin, end = len(samples) / RATE, len(samples) / RATE + 5
    found = {}
    for least in (0.0, 0.65):
        long = transcribe_long(model, tmp_path / "noisy.wav", cutting=Cutting(min_confidence=least))
        found[least] = [(segment.start, segment.end) for segment in long.segments]
    kept = [span for span in found[0.0] if span[1] <= begin + 0.1 or span[0] >= end]
    assert len(kept) < len(found[0.0])
    assert found[0.65] == kept
    assert len(kept) >= 2 * len(spans)


def test_one_channel_of_a_long_recording_is_decoded(tmp_path):
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.nemo_plugin.transcribing import transcribe_long

    file, _ = joined_speech(tmp_path, 4)
    model = load("self_ctc", "ctc", "greedy_batch")
    expected = transcribe_long(model, file, cutting=Cutting(4))
    samples, _ = soundfile.read(file, dtype="int16")
    soundfile.write(file, np.stack([samples[::-1], samples], 1), RATE)
    assert transcribe_long(Model(model.model, 1), file, cutting=Cutting(4)) == expected


def test_cuts_avoid_the_utterances(tmp_path):
    from nemo_gpu_decoding.nemo_plugin.transcribing import transcribe_long

    file, spans = joined_speech(tmp_path, 20)
    model = load("self_ctc", "ctc", "greedy_batch", timestamps=False)
    found = transcribe_long(model, file, cutting=Cutting(20), timestamps=True)
    assert len(found.words) > 100
    assert not model.current_head.config.compute_timestamps  # as before
    cuts = [segment.start for segment in found.segments[1:]]
    assert len(cuts) >= 3
    edge = 0.03  # of an utterance: some begin with silence
    assert not [cut for cut in cuts for start, end in spans if start + edge < cut < end - edge]


def test_damaged_end_loses_only_later_words(tmp_path):
    from nemo_gpu_decoding.nemo_plugin.transcribing import transcribe_long

    file, _ = joined_speech(tmp_path)
    model = load("self_ctc", "ctc", "greedy_batch")
    cutting = Cutting(8)
    whole = transcribe_long(model, file, cutting=cutting)
    assert not whole.error
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])
    found = transcribe_long(model, file, cutting=cutting)
    assert "cannot be read after 0:00:" in found.error
    assert 0 < len(found.segments) < len(whole.segments)
    assert [s.text for s in found.segments[:2]] == [s.text for s in whole.segments[:2]]
    file.write_bytes(data[:2000])
    for wrong, message in (({}, "cannot be read as audio"), ({"model": None}, "model is"), ({"file": 5}, "audio is")):
        with pytest.raises(ValueError, match=message):
            transcribe_long(**{"model": model, "file": file, "cutting": cutting} | wrong)


def test_noise_without_pauses_is_reported_with_its_file_and_time(tmp_path, monkeypatch):
    from nemo_gpu_decoding.nemo_plugin import long_audio, transcribing

    file = tmp_path / "noise.wav"
    soundfile.write(file, 0.1 * np.random.default_rng(0).standard_normal(40 * RATE), RATE)
    model = load("self_ctc", "ctc", "greedy_batch")
    warnings = []
    monkeypatch.setattr(long_audio.logger, "warning", lambda message, *values: warnings.append(message % values))
    found = transcribing.transcribe_long(model, file, cutting=Cutting(5))
    assert max(segment.end - segment.start for segment in found.segments) <= 10
    assert any(f"{file}: no pause of 0.3 s at 0:00:0" in warning for warning in warnings)


class SilentModel:
    frame_seconds, trained_seconds = 0.08, None
    channel_selector = None

    def encode(self, files, batch_size):
        yield list(files)

    def hypotheses(self, outputs):
        return [None] * len(outputs)

    @contextmanager
    def using(self, section):
        vocabulary = SimpleNamespace(words=lambda ids: [])
        yield SimpleNamespace(greedy_tokens=lambda hypothesis: [], vocabulary=lambda: vocabulary)


class ExactModel(SilentModel):
    """A model that hears word n as a constant sample of n / 4096; nothing of it depends on the context."""

    def __init__(self):
        from nemo_gpu_decoding.vocabulary import WordSpan

        vocabulary = SimpleNamespace(words=lambda ids: [WordSpan(str(i), n, n + 1) for n, i in enumerate(ids)])
        self.head = SimpleNamespace(greedy_tokens=self.tokens, vocabulary=lambda: vocabulary)

    @contextmanager
    def using(self, section):
        yield self.head

    def hypotheses(self, outputs):
        return outputs

    @staticmethod
    def words(path):
        """First sample, end sample and number of each word, and the rate."""
        samples, rate = soundfile.read(part_of(path).path, dtype="float32")
        numbers = np.rint(samples * 4096).astype(int)
        runs = pairwise([0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)])
        return [(begin, end, int(numbers[begin])) for begin, end in runs if begin < end and numbers[begin]], rate

    def tokens(self, path):
        words, rate = self.words(path)
        step = rate * self.frame_seconds
        return [(int(begin / step), int(np.ceil(end / step)), number) for begin, end, number in words]

    def decode(self, outputs):
        from nemo_gpu_decoding.transcript import BoostedPhrase, Transcript, Word

        for path in outputs:
            words, rate = self.words(path)
            found = tuple(Word(str(number), begin / rate, end / rate) for begin, end, number in words)
            phrases = tuple(BoostedPhrase(word.word, 0.5) for word in found if word.word.endswith("7"))
            yield Transcript(" ".join(word.word for word in found), -1.0, found, phrases=phrases)


def test_no_word_is_lost_or_doubled_at_a_thousand_cuts(tmp_path):
    """Two hours: words of 0.1-0.8 s, pauses of 0.1-3 s. Words that a cut or a window halves would be found twice."""
    from nemo_gpu_decoding.nemo_plugin.long_audio import find_cuts, joined, segment_files

    rng, rate = np.random.default_rng(0), 1000
    parts, expected, at = [], [], 0
    for number in range(1, 3601):
        length, pause = int(rng.integers(100, 800)), int(rng.integers(100, 3000))
        parts += [np.full(length, number / 4096, np.float32), np.zeros(pause, np.float32)]
        expected.append((str(number), at / rate, (at + length) / rate))
        at += length + pause
    file = tmp_path / "hours.wav"
    soundfile.write(file, np.concatenate(parts), rate, subtype="FLOAT")
    model = ExactModel()
    plan = find_cuts(model, file, Cutting(6), 8)
    found = [each for files in segment_files(model, file, plan, 8) for each in model.decode(files)]
    whole = joined(plan.spans(), found)
    assert len(whole.segments) > 1000
    assert whole.text == " ".join(word for word, *_ in expected)
    assert [word.word for word in whole.words] == [word for word, *_ in expected]
    assert [phrase.phrase for phrase in whole.phrases] == [word for word, *_ in expected if word.endswith("7")]
    times = [(word.start, word.end) for word in whole.words]
    # a segment begins with its sound, to 1 ms
    late = np.array(times) - [own for _, *own in expected]
    assert late.min() >= -1e-3
    assert late.max() <= 2e-3


def peak_of(file):
    """The plan of a file, and the peak of memory of both passes in bytes."""
    from nemo_gpu_decoding.nemo_plugin.long_audio import find_cuts, segment_files

    model = SilentModel()
    tracemalloc.start()
    plan = find_cuts(model, file, Cutting(), 2)
    for files in segment_files(model, file, plan, 2):
        assert all(soundfile.info(path).duration <= 60 for path in files)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return plan, peak


FRAGMENTS = """
import sys
import numpy as np
from nemo_gpu_decoding.nemo_plugin.cutting import Cutting
from nemo_gpu_decoding.nemo_plugin.long_audio import find_cuts, segment_files
from tests.nemo_plugin.test_long_audio import SilentModel

live = []


def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096


def use_memory():
    blocks = [np.ones(100_000, np.uint8) for _ in range(2000)]
    live.append(np.ones(100_000, np.uint8))  # above the others, so that the heap cannot shrink


class Model(SilentModel):
    def encode(self, files, batch_size):
        use_memory()
        yield list(files)


before = resident()
if sys.argv[1] == "both":
    plan = find_cuts(Model(), sys.argv[2], Cutting(), 2)
    print(resident() - before)
    for files in segment_files(Model(), sys.argv[2], plan, 2):
        use_memory()
else:
    use_memory()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps blocks below live ones")
def test_memory_that_a_batch_frees_is_returned(tmp_path):
    file = tmp_path / "silence.wav"
    soundfile.write(file, np.full(120 * 8000, 99, np.int16), 8000)

    def kept(what):
        run = subprocess.run([sys.executable, "-c", FRAGMENTS, what, file], cwd=ROOT, capture_output=True, check=True)
        return [int(line) / 1e6 for line in run.stdout.split()]

    (alone,) = kept("alone")
    assert alone > 150  # MB: the system keeps what is freed
    assert max(kept("both")) < 100


def test_memory_does_not_grow_with_the_recording(tmp_path):
    peaks = []
    for minutes in (5, 60):
        file = tmp_path / f"{minutes}.wav"
        soundfile.write(file, np.full(minutes * 60 * 8000, 99, np.int16), 8000)
        plan, peak = peak_of(file)
        assert plan.seconds == minutes * 60
        assert plan.spans()[-1][1] == minutes * 60
        peaks.append(peak)
    frames = 60 * 750
    assert peaks[1] < peaks[0] + 64 * frames  # a few numbers per frame, of which a sample array would need 640


def test_an_interrupted_call_continues_with_the_next_segment(tmp_path, monkeypatch):
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.nemo_plugin.transcribing import transcribe_long

    file, _ = joined_speech(tmp_path)
    model = load("self_hybrid_rnnt", "rnnt", "alsd_pp", timestamps=False)
    options = {"timestamps": True, "batch_size": 2, "resume": tmp_path / "log"}
    expected = transcribe_long(model, file, **{**options, "resume": None}, cutting=Cutting(8))
    decode, calls = Model.decode, []

    def stopped(self, outputs, **more):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(outputs)
        yield from decode(self, outputs, **more)

    monkeypatch.setattr(Model, "decode", stopped)
    with pytest.raises(KeyboardInterrupt):
        transcribe_long(model, file, **options, cutting=Cutting(8))
    kept = options["resume"].read_bytes()
    monkeypatch.setattr(Model, "decode", lambda *given, **more: calls.append(given) or decode(*given, **more))
    calls.clear()
    assert transcribe_long(model, file, **options, cutting=Cutting(8)) == expected
    batches = (len(expected.segments) + 1) // 2
    assert len(calls) == batches - 2
    assert not options["resume"].exists()
    options["resume"].write_bytes(kept)
    calls.clear()
    with torch_weights_changed(model):
        transcribe_long(model, file, **options, cutting=Cutting(8))
    assert len(calls) >= batches  # the segments are those of other weights


@contextmanager
def torch_weights_changed(model):
    """One weight of the model is larger by a little."""
    import torch

    weight = next(model.model.parameters())
    with torch.no_grad():
        weight.view(-1)[0] += 1e-3
        yield
        weight.view(-1)[0] -= 1e-3
