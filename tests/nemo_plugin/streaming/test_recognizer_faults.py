"""A fault at any point of a step ends one stream, and no other."""

import asyncio
import inspect
import sys
from pathlib import Path

import nemo.collections.asr.inference as inference
import pytest
import soundfile

import nemo_gpu_decoding
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.cli.serve import ServeOptions, build_recognizer
from nemo_gpu_decoding.live.batcher import Batcher
from nemo_gpu_decoding.live.interface import Limits, StreamOptions
from nemo_gpu_decoding.nemo_plugin.streaming import stream_state
from tests.assets import ASSETS

NAMES = "ctc", "hybrid_rnnt", "streaming"
CTC, HYBRID, CAUSAL = (f"model={ASSETS / 'models' / f'self_{name}.nemo'}" for name in NAMES)
KINDS = {
    "buffered ctc": (CTC, f"lm={ASSETS / 'lm' / 'tok3.arpa'}"),
    "buffered rnnt": (HYBRID, "strategy=alsd_pp"),
    "cache-aware ctc": (CAUSAL,),
    "cache-aware rnnt": (CAUSAL, "strategy=aes_pp"),
    "greedy": (CAUSAL, "strategy=greedy"),
}
OURS = Path(nemo_gpu_decoding.__file__).parent
FOLDERS = tuple(str(path) for path in (OURS / "live", OURS / "nemo_plugin", Path(inference.__file__).parent))


class Faulty:
    """Its steps raise at one point for a chunk of the victim. Without a point they note all points of a step."""

    def __init__(self, own):
        self.own, self.victim, self.point = own, None, None
        self.has_raised = False  # in the last step of a victim
        self.points: dict[tuple, None] = {}

    def __getattr__(self, name):
        return getattr(self.own, name)

    def step(self, chunks):
        if self.victim not in [chunk.stream for chunk in chunks]:
            return self.own.step(chunks)
        self.has_raised = False
        sys.setprofile(self.hook)
        try:
            return self.own.step(chunks)
        finally:
            sys.setprofile(None)

    def hook(self, frame, event, arg):
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(FOLDERS):
            return
        undoes = code.co_filename == stream_state.__file__ and code.co_name.startswith(("_undo", "_cop", "put_back"))
        if undoes or code.co_name == "step":
            return  # what puts a failed step back
        if code.co_flags & inspect.CO_GENERATOR:
            return  # each resumption is a call, each yield a return
        if self.point is None:
            self.points[code, event] = None
        elif self.point == (code, event):
            sys.setprofile(None)
            self.has_raised = True
            raise MemoryError("injected")


class Crowd:
    """Two clients that speak the same utterances again and again."""

    def __init__(self, batcher, speech, expected):
        self.batcher, self.speech, self.expected = batcher, speech, expected
        self.places = [(None, i, 0) for i in range(2)]
        self.heard = 0

    async def speak(self):
        """A chunk of each."""
        n = self.batcher.recognizer.chunk_samples
        for i, (session, number, at) in enumerate(self.places):
            session = session or await self.batcher.open(StreamOptions())
            session.feed(self.speech[number][at : at + n].tobytes())
            if at + n >= len(self.speech[number]):
                session.end()
                self.places[i] = session, number, None
            else:
                self.places[i] = session, number, at + n

    def check(self, point):
        for i, (session, number, at) in enumerate(self.places):
            assert session.error is None, point
            assert not session.is_dead
            if at is None:
                assert session.is_over
                found = [message["text"] for message in session.messages() if message["type"] == "final"]
                assert " ".join(found) == self.expected[number], point
                self.heard += 1
                self.places[i] = None, (number + 1) % len(self.speech), 0


async def step(batcher):
    await batcher._step(batcher._take())


async def spoken(batcher, samples):
    """The text of a stream alone."""
    session = await batcher.open(StreamOptions())
    session.feed(samples.tobytes())
    session.end()
    while not session.is_over:
        await step(batcher)
    return " ".join(message["text"] for message in session.messages() if message["type"] == "final")


async def victim_of(batcher, crowd, faulty, samples, phase, point):
    """A third client, whose first, second or last chunk meets the fault."""
    session, n = await batcher.open(StreamOptions()), batcher.recognizer.chunk_samples
    for now in range(phase + 1):
        session.feed(samples[now * n : (now + 1) * n].tobytes())
        if now == 2:
            session.end()
        await crowd.speak()
        if now == phase:
            faulty.point, batch = point, batcher._take()
            faulty.victim = next(chunk.stream for own, chunk in batch if own is session)
            await batcher._step(batch)
            faulty.victim = None
        else:
            await step(batcher)
        crowd.check(point)
    return session


CASES = [pytest.param(kind, marks=() if kind == "greedy" else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", CASES)
def test_fault_at_any_point_of_a_step_ends_one_stream(kind, files, caplog):
    caplog.set_level("ERROR", "nemo_gpu_decoding")
    own = build_recognizer(parse_options(ServeOptions, [*KINDS[kind], "max_streams=4", "end_silence=-1"]))
    faulty, speech = Faulty(own), [soundfile.read(file, dtype="int16")[0] for file in files[:3]]

    async def run():
        batcher = Batcher(faulty, Limits())
        crowd = Crowd(batcher, speech, [await spoken(batcher, samples) for samples in speech])
        ended = 0
        for phase in range(3):
            known, point = dict(faulty.points), None
            session = await victim_of(batcher, crowd, faulty, speech[2], phase, point)
            if phase < 2:
                batcher.crash(session, ValueError("it has had its turn"))
            for point in [point for point in faulty.points if point not in known]:
                session = await victim_of(batcher, crowd, faulty, speech[2], phase, point)
                if not faulty.has_raised:  # it was for another stream of the step that the point was reached
                    batcher.crash(session, ValueError("it has had its turn"))
                    continue
                ended += 1
                assert session.is_over, point
                assert session.error is not None, point
                assert session.error[0] == "server", point
                assert session not in batcher.sessions.values()
                batcher._drop()
                going = {place[0]._stream for place in crowd.places if place[0] is not None}
                assert set(own.pipeline._state_pool) == going - {None}, point
        assert crowd.heard > 5
        return ended

    ended = asyncio.run(run())
    assert ended > 60
    print(kind, ended, "of", len(faulty.points), "points")
