"""The server of live streams, over real sockets, before a recognizer that reads numbers out of the audio."""

import asyncio
import contextlib
import gc
import json
import random
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from nemo_gpu_decoding.checks import FieldError, check_int
from nemo_gpu_decoding.cli import serve
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.live import server as server_module
from nemo_gpu_decoding.live.batcher import NAMESPACE, Batcher
from nemo_gpu_decoding.live.interface import Address, Limits, StepOutput, StreamOptions
from nemo_gpu_decoding.live.server import LiveServer
from nemo_gpu_decoding.live.session import Resampler, Session
from nemo_gpu_decoding.search.result import Place, WordOption
from nemo_gpu_decoding.transcript import Alternative, BoostedPhrase, Transcript, Word

RATE, CHUNK = 16000, 160
BAD, FATAL, LONG = 30000, 30001, 30002  # values of chunks that fail, fail the step, or give a long transcript


class NumberReader:
    """Hears the value of a chunk's samples as a word; zeros end an utterance."""

    strategy, sample_rate, chunk_samples, right_context_seconds, languages = "numbers", RATE, CHUNK, 0.0, ("en",)
    max_n_best, model, phrases = 3, "digits", ("one", "two")

    def __init__(self, seconds: float = 0.0) -> None:
        self.streams: dict[int, tuple[list[Word], int]] = {}  # words of the utterance, chunks so far
        self.batches: list[int] = []
        self.seconds = seconds

    def left_out(self, options):
        return []

    def prepare(self, wanted):
        if wanted.language not in (None, "en"):
            raise FieldError("language", wanted.language, "one of en")
        lm = wanted.request and wanted.request.lm
        if lm not in (None, "news"):
            raise FieldError("lm", lm, "one of news")
        check_int("n_best", wanted.n_best, 1, self.max_n_best)
        return wanted

    def step(self, chunks):
        self.batches.append(len(chunks))
        time.sleep(self.seconds)
        if any(self._value(chunk) == FATAL for chunk in chunks):
            raise RuntimeError("the model is broken")
        return [self._step(chunk) for chunk in chunks]

    def drop(self, streams):
        for stream in streams:
            self.streams.pop(stream, None)

    def _value(self, chunk):
        return round(float(chunk.samples[0]) * 32768) if len(chunk.samples) else 0

    def _step(self, chunk):
        assert chunk.is_first == (chunk.stream not in self.streams)
        words, n = self.streams.pop(chunk.stream, ([], 0))
        value, seconds = self._value(chunk), CHUNK / RATE
        if value == BAD and not chunk.is_last:
            self.streams[chunk.stream] = words, n + 1
            return StepOutput(error="not finite")
        if value:
            text = "x" * 100_000 if value == LONG else str(value)
            words = [*words, Word(text, n * seconds, (n + 1) * seconds, confidence=0.5)]
        text, known = (" ".join(word.word for word in own) for own in (words, words[:-1]))
        n_best = [Alternative(f"{text}{'?' * n}", -float(n)) for n in range(chunk.options.n_best)]
        found = Transcript(text, words=tuple(words), committed=known)
        if len(n_best) > 1:
            choices = [WordOption(words[0].word, 0.75), WordOption("", 0.25)] if words else []
            slots = [Place(0, words[0].start, words[0].end, tuple(choices))] if words else []
            found = replace(found, n_best=tuple(n_best), alternatives=tuple(slots))
        request = chunk.options.request
        if request and request.phrases and (chunk.is_last or value == 0):
            said = [phrase.text for phrase in request.phrases if phrase.text in text.split()]
            found = replace(found, phrases=tuple(BoostedPhrase(phrase, 0.25) for phrase in said))
        if chunk.is_last:
            return StepOutput(final=found if words else None)
        is_end = value == 0 and bool(words)
        self.streams[chunk.stream] = ([] if is_end else words, n + 1)
        return StepOutput(final=found) if is_end else StepOutput(partial=found)


def audio(*values):
    """PCM of one chunk for each value."""
    return np.repeat(np.array(values, "<i2"), CHUNK).tobytes()


@contextlib.contextmanager
def running(reader=None, *, limits=None, batch_size=64, tick_seconds=0.002, **address):
    reader = reader or NumberReader()
    batcher = Batcher(reader, limits or Limits(), batch_size=batch_size, tick_seconds=tick_seconds)
    with served(LiveServer(batcher, Address(port=0, **address))) as server:
        yield server


@contextlib.contextmanager
def served(server):
    """A server in a thread; it is stopped at the end and has to stop."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def stream(server, first=None, query="", **options):
    url = server.url.replace("http", "ws") + "stream" + query
    with connect(url, compression=None, max_size=None, **options) as socket:
        with contextlib.suppress(ConnectionClosed):  # a server that is full does not wait for it
            socket.send(json.dumps(first or {}))
        yield socket


def messages(socket):
    """All messages to the end, and the code of the close."""
    found = []
    try:
        while True:
            found.append(json.loads(socket.recv(10)))
    except ConnectionClosed as closed:
        return found, closed.rcvd and closed.rcvd.code


def told(server, *sent, query=""):
    """All messages but `ready`, and the code of the close, of a client that sends just these texts and PCM."""
    with connect(server.url.replace("http", "ws") + "stream" + query, compression=None, max_size=None) as socket:
        with contextlib.suppress(ConnectionClosed):  # a server that is full does not wait
            for message in sent:
                socket.send(message)
        found, code = messages(socket)
    assert not found or found[0]["type"] in ("ready", "error")
    return [message for message in found if message["type"] != "ready"], code


def conversation(server, *sent, first=None):
    """The same with a first message and the end around what is sent."""
    return told(server, json.dumps(first or {}), *sent, '{"type": "end"}')


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def counted(server, name, **labels):
    """The present value of a metric; 0 if nothing was counted."""
    return server.batcher.metrics.registry.get_sample_value(f"{NAMESPACE}_{name}", labels) or 0.0


def finals(found):
    return [message["text"] for message in found if message["type"] == "final"]


def get(server, path, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# ------------------------------------------------------------------------------------- protocol
def test_stream_has_finals_of_all_utterances():
    with running() as server:
        found, code = conversation(server, audio(1, 2), audio(3, 0, 4)[:400], audio(3, 0, 4)[400:])
    assert code == 1000
    assert finals(found) == ["1 2 3", "4"]
    words = [word for message in found if message["type"] == "final" for word in message["words"]]
    assert words[2] == {"word": "3", "start": 0.02, "end": 0.03, "confidence": 0.5}
    assert words[3]["start"] == 0.04  # counted from the beginning of the stream
    with running() as server:
        found, _ = conversation(server, audio(1, 2, 3), first={"partials": False})
    assert [message["type"] for message in found] == ["final"]


def test_partial_messages_follow_the_audio():
    with running() as server, stream(server) as socket:
        ready = json.loads(socket.recv(10))
        assert ready["type"] == "ready"
        assert ready["chunk_seconds"] == CHUNK / RATE
        assert ready["limits"]["max_streams"] == 64
        assert ready["limits"]["max_n_best"] == 3
        for n in range(1, 4):
            socket.send(audio(7))
            partial = json.loads(socket.recv(10))
            assert (partial["type"], partial["text"]) == ("partial", " ".join(["7"] * n))
            assert partial["audio_seconds"] == n * CHUNK / RATE
        socket.send('{"type": "end"}')
        assert finals(messages(socket)[0]) == ["7 7 7"]


def test_messages_have_committed_text_and_alternatives():
    with running() as server:
        found, _ = conversation(server, audio(1, 2, 0, 3, 4)[:-10], first={"n_best": 2})
        plain, _ = conversation(server, audio(1, 2), first={})
    partials = [message for message in found if message["type"] == "partial"]
    assert all(message["committed"] == " ".join(message["text"].split()[:-1]) for message in partials)
    assert [message["n_best"] for message in found if message["type"] == "final"] == [
        [{"text": text, "score": 0.0}, {"text": f"{text}?", "score": -1.0}] for text in ("1 2", "3 4")
    ]
    (slot,) = next(message for message in found if message["type"] == "final")["word_alternatives"]
    assert slot["alternatives"] == [{"word": "1", "posterior": 0.75}, {"word": "", "posterior": 0.25}]
    assert (slot["word_index"], slot["start"], slot["end"]) == (0, 0.0, round(CHUNK / RATE, 3))
    assert all(len(message["n_best"]) == 2 for message in partials)
    assert not any("n_best" in message for message in plain)
    assert "committed" not in plain[-1]


def test_final_messages_name_the_phrases_found():
    with running() as server:
        found, _ = conversation(server, audio(1, 2, 0, 3, 4)[:-10], first={"phrases": ["2", "7"]})
    named = [message.get("found_phrases") for message in found if message["type"] == "final"]
    assert named == [[{"phrase": "2", "evidence": 0.25}], None]
    assert not any("found_phrases" in message for message in found if message["type"] == "partial")


@pytest.mark.parametrize("samples", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK])
def test_audio_of_any_length_is_heard_whole(samples):
    with running() as server:
        found, code = conversation(server, audio(*[5] * 6)[: 2 * samples])
    assert code == 1000
    assert finals(found) == ([" ".join(["5"] * -(-samples // CHUNK))] if samples else [])


@pytest.mark.parametrize("cut", [2, 998, 4096])
def test_resampled_audio_does_not_depend_on_messages(cut):
    pytest.importorskip("soxr")
    rate = 44100
    samples = 0.25 * np.sin(np.arange(rate) / 20).astype(np.float32)
    whole = Resampler(rate, RATE)(samples, is_last=True)
    resample = Resampler(rate, RATE)
    parts = [resample(samples[at : at + cut]) for at in range(0, rate, cut)] + [resample(samples[:0], is_last=True)]
    assert len(whole) == pytest.approx(RATE, abs=2)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_other_rates_reach_the_model_in_its_own():
    pytest.importorskip("soxr")
    with running() as server:
        found, _ = conversation(server, np.full(48000, 1000, "<i2").tobytes(), first={"sample_rate": 48000})
    (text,) = finals(found)
    assert len(text.split()) == pytest.approx(RATE / CHUNK, abs=1)
    assert text.split()[50] == "1000"


def test_odd_number_of_bytes_ends_the_stream_after_its_text():
    with running() as server:
        found, code = conversation(server, audio(1, 2), b"abc")
    assert code == 1008
    assert finals(found) == ["1 2"]
    assert found[-1]["field"] == "audio"


# ---------------------------------------------------------------------------------- many streams
def test_streams_are_decoded_in_common_steps():
    reader = NumberReader(seconds=0.01)
    with running(reader, batch_size=8) as server, ThreadPoolExecutor(20) as pool:
        spoken = [random.Random(i).choices(range(1, 100), k=20) for i in range(20)]
        found = list(pool.map(lambda values: conversation(server, *[audio(v) for v in values])[0], spoken))
    assert [finals(own) for own in found] == [[" ".join(map(str, values))] for values in spoken]
    assert max(reader.batches) == 8
    assert len(reader.batches) < 20 * 20 / 2
    assert not reader.streams


def test_killed_clients_do_not_change_other_streams():
    reader, deaths = NumberReader(seconds=0.002), random.Random(1)

    def client(i):
        values = random.Random(i).choices(range(1, 100), k=30)
        with stream(server) as socket:
            for n, value in enumerate(values):
                socket.send(audio(value))
                if i % 2 and n == 10 + i:
                    socket.socket.close()  # without a word
                    return None
            socket.send('{"type": "end"}')
            return finals(messages(socket)[0]) == [" ".join(map(str, values))]

    with running(reader) as server:
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(client, deaths.sample(range(16), 16)))
        assert found.count(None) == 8
        assert found.count(True) == 8
        wait_for(lambda: not server.batcher.sessions and not reader.streams)


def test_failing_stream_does_not_change_other_streams():
    with running(tick_seconds=0.05) as server, stream(server) as first, stream(server) as second:
        for value in (1, BAD, 3):
            first.send(audio(value))
            second.send(audio(2))
        second.send('{"type": "end"}')
        failed, code = messages(first)
        assert failed[-1] == {"type": "error", "field": "audio", "message": "not finite"}
        assert code == 1008
        assert finals(messages(second)[0]) == ["2 2 2"]


# ---------------------------------------------------------------------------------------- limits
def test_stream_beyond_the_limit_is_refused():
    with running(limits=Limits(max_streams=2)) as server, stream(server) as first, stream(server) as second:
        for socket in (first, second):
            assert json.loads(socket.recv(10))["type"] == "ready"
        (error,), code = conversation(server)
        assert (error["field"], code) == ("streams", 1013)
        first.send('{"type": "end"}')
        messages(first)
        assert finals(conversation(server, audio(1))[0]) == ["1"]


def test_stream_counts_while_it_is_prepared():
    reader = NumberReader()
    reader.prepare = lambda wanted: time.sleep(0.2) or NumberReader.prepare(reader, wanted)
    with running(reader, limits=Limits(max_streams=1)) as server, stream(server) as first, stream(server) as second:
        kinds = sorted(json.loads(socket.recv(10))["type"] for socket in (first, second))
    assert kinds == ["error", "ready"]


def test_too_long_and_too_early_messages_are_refused():
    with running(limits=Limits(max_message_bytes=1000)) as server, stream(server) as socket:
        with contextlib.suppress(ConnectionClosed):
            socket.send(bytes(2000))
        assert messages(socket)[1] == 1009
    with running() as server, connect(server.url.replace("http", "ws") + "stream") as socket:
        socket.send(audio(1))
        (error,), _ = messages(socket)
    assert "expected a JSON object before any audio" in error["message"]


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ('{"type": "end"}', ([], 1000)),
        ('{"type": "stop"}', "type is 'stop', expected start or end in the first message"),
        ('{"type": "end", "n_best": 2}', "type is 'end', expected start or end in the first message"),
        ('{"type": null}', "type is None, expected start or end in the first message"),
    ],
)
def test_the_type_of_a_first_message_is_start_or_end(first, expected):
    with running() as server:
        found, code = told(server, first)
        assert (found, code) == expected if isinstance(expected, tuple) else found[0]["message"] == expected
        assert finals(conversation(server, audio(7), first={"type": "start"})[0]) == ["7"]
        wait_for(lambda: not server.batcher.sessions)


def test_idle_client_is_disconnected():
    with running(limits=Limits(idle_seconds=0.1)) as server:
        with stream(server) as socket:
            socket.send(audio(1))
            found, code = messages(socket)
        assert finals(found) == ["1"]
        assert (found[-1]["field"], code) == ("idle_seconds", 1008)
        with connect(server.url.replace("http", "ws") + "stream") as socket:
            (error,), _ = messages(socket)
        assert error["field"] == "idle_seconds"


def test_long_utterances_are_cut():
    with running(limits=Limits(utterance_seconds=0.05)) as server:
        found, _ = conversation(server, audio(*range(1, 13)))
    assert finals(found) == ["1 2 3 4 5", "6 7 8 9 10", "11 12"]
    starts = [word["start"] for message in found if message["type"] == "final" for word in message["words"]]
    assert starts == [round(n * CHUNK / RATE, 3) for n in range(12)]
    # The length counts from the end of the utterance before.
    with running(limits=Limits(utterance_seconds=0.05)) as server:
        found, _ = conversation(server, audio(1, 2, 0, 3, 4, 5, 0))
    assert finals(found) == ["1 2", "3 4 5"]


def test_fast_client_is_slowed_to_the_pending_limit():
    limits, reader = Limits(pending_seconds=0.1), NumberReader(seconds=0.02)
    with running(reader, limits=limits, tick_seconds=0.0) as server, stream(server) as socket:
        values = range(1, 101)
        for value in values:
            socket.send(audio(value))
        socket.send('{"type": "end"}')
        wait_for(lambda: server.batcher.sessions)
        (session,) = server.batcher.sessions.values()
        most = 0
        while not session.is_over:
            most = max(most, session._pending)
            time.sleep(0.002)
        found, _ = messages(socket)
    assert finals(found) == [" ".join(map(str, values))]
    assert limits.pending_seconds * RATE <= most <= limits.pending_seconds * RATE + 2 * CHUNK


def test_latency_counts_from_the_arrival_of_the_audio():
    async def seconds():
        session = Session(StreamOptions(sample_rate=RATE), None, (RATE, CHUNK), Limits(), lambda: 0)
        session.feed(audio(1))
        await asyncio.sleep(0.05)
        session.feed(audio(2))
        return [session.receive(session.take(), StepOutput()) for _ in range(2)]

    first, second = asyncio.run(seconds())
    assert first - second == pytest.approx(0.05, abs=0.02)


def test_client_that_does_not_read_is_disconnected(caplog):
    caplog.set_level("WARNING", "nemo_gpu_decoding")
    with running(limits=Limits(send_seconds=0.2)) as server:
        with stream(server, max_queue=1, close_timeout=0.1) as socket:
            with contextlib.suppress(ConnectionClosed):
                for _ in range(500):
                    socket.send(audio(LONG, 0))
            wait_for(lambda: counted(server, "streams_total", outcome="send_seconds") == 1)
        assert "does not read" in caplog.text
        assert finals(conversation(server, audio(1))[0]) == ["1"]


def test_garbage_collection_does_not_visit_the_model():
    with running() as server:
        assert finals(conversation(server, audio(1))[0]) == ["1"]
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


# ------------------------------------------------------------------------- who may come in; the rest
def test_wrong_token_and_foreign_origin_are_refused():
    with pytest.raises(FieldError):
        Address(token=" ")
    with running(token="secret") as server:
        for query, headers in (("?token=secret", {}), ("", {"Authorization": "Bearer secret"})):
            with stream(server, query=query, additional_headers=headers) as socket:
                assert json.loads(socket.recv(10))["type"] == "ready"
        for query, headers in (("", {}), ("?token=secre", {}), ("?token=secret", {"Authorization": "Bearer no"})):
            with pytest.raises(InvalidStatus, match="401"), stream(server, query=query, additional_headers=headers):
                pass
        assert get(server, "metrics")[0] == 401
        assert get(server, "metrics", Authorization="Bearer secret")[0] == 200
        assert get(server, "healthz")[0] == get(server, "")[0] == 200
    with running() as server:
        with pytest.raises(InvalidStatus, match="403"), stream(server, origin="https://example.org"):
            pass
        with stream(server, origin=server.url.rstrip("/")) as socket:
            assert json.loads(socket.recv(10))["type"] == "ready"


def test_metrics_count_streams_and_outcomes():
    with running() as server, running() as other:
        conversation(server, audio(1, 0, 2))
        for first in ({"phrases": [""]}, {"beam": 1}, {"lattice": 1}):
            conversation(server, first=first)
        assert json.loads(get(server, "healthz")[1]) == {"status": "ok", "streams": 0}
        status, text = get(server, "metrics")
        openmetrics = get(server, "metrics", Accept="application/openmetrics-text; version=1.0.0")[1]
        assert 'outcome="' not in get(other, "metrics")[1]
    assert status == 200
    assert openmetrics.endswith("# EOF\n")
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert families["nemo_gpu_decoding_process_cpu_seconds"] == families["nemo_gpu_decoding_finals"] == "counter"
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    values = {key.removeprefix("nemo_gpu_decoding_"): float(value) for key, value in lines.items()}
    assert values["streams_open"] == 0
    assert values['streams_total{outcome="end"}'] == 1
    assert values['streams_total{outcome="phrases"}'] == 1
    assert values['streams_total{outcome="message"}'] == 2  # clients cannot make up outcomes
    assert values["finals_total"] == 2
    assert values["audio_seconds_total"] == pytest.approx(0.03)
    assert values["process_resident_memory_bytes"] > 1e6
    assert values["process_cpu_seconds_total"] > 0
    assert values['partial_seconds_bucket{le="+Inf"}'] == values["partial_seconds_count"]
    assert values["step_seconds_sum"] > 0
    assert values["step_streams_sum"] == 3


def test_shutdown_finishes_open_utterances():
    with running() as server, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(stream(server)) for _ in range(3)]
        for n, socket in enumerate(sockets):
            socket.send(audio(n + 1, n + 1)[:-10])
            assert json.loads(socket.recv(10))["type"] == "ready"
            assert json.loads(socket.recv(10))["type"] == "partial"
        server.should_exit = True
        for n, socket in enumerate(sockets):
            found, code = messages(socket)
            assert finals(found) == [f"{n + 1} {n + 1}"]
            assert code == 1012


def test_command_serves_with_its_options(monkeypatch, capsys):
    build, built, codes = serve.build_server, [], []
    monkeypatch.setattr(serve, "build_recognizer", lambda options: NumberReader())
    monkeypatch.setattr(serve, "build_server", lambda options: built.append(build(options)) or built[0])
    monkeypatch.setenv(serve.TOKEN_VARIABLE, "secret")
    arguments = ["serve", "model=a.nemo", "port=0", "max_phrases=7", "shutdown_seconds=3"]
    thread = threading.Thread(target=lambda: codes.append(main(arguments)), daemon=True)
    thread.start()
    wait_for(lambda: built and built[0].started)
    (server,) = built
    assert server.address == Address(port=0, token="secret", shutdown_seconds=3.0)
    assert server.batcher.limits == Limits(max_phrases=7)
    with stream(server, query="?token=secret") as socket:
        assert json.loads(socket.recv(10))["type"] == "ready"
    server.should_exit = True
    thread.join(20)
    assert codes == [0]
    assert "serving numbers on http://127.0.0.1:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("host=0.0.0.0", "host is '0.0.0.0', expected 127.0.0.1 or ::1, or a token, or open_to_all=true"),
        ("port=-1", "port is -1, expected an integer 0 .. 65535"),
        ("send_seconds=0", "send_seconds is 0.0, expected a finite number > 0"),
        ("max_streams=0", "max_streams is 0"),
        ("batch_size=0", "batch_size is 0, expected an integer >= 1"),
    ],
)
def test_wrong_options_of_serve_are_named(argument, message, capsys, monkeypatch):
    monkeypatch.delenv(serve.TOKEN_VARIABLE, raising=False)
    assert main(["serve", "model=a.nemo", argument]) == 2
    assert message in capsys.readouterr().err


def test_disconnect_after_the_end_is_counted():
    with running(NumberReader(seconds=0.05)) as server:
        with stream(server) as socket:
            socket.send(audio(*range(1, 101)))
            socket.send('{"type": "end"}')
        wait_for(lambda: counted(server, "streams_total", outcome="disconnect") == 1, seconds=2.0)


def test_shutdown_ends_after_its_seconds():
    with running(NumberReader(seconds=0.2), shutdown_seconds=0.1) as server, stream(server) as socket:
        socket.send(audio(*range(1, 100)))
        assert json.loads(socket.recv(10))["type"] == "ready"
        server.should_exit = True
        _, code = messages(socket)
        assert code != 1000


def test_free_memory_returns_to_the_system_while_the_server_runs(monkeypatch):
    trimmed = []

    class Library:
        def __init__(self, name):
            assert name is None

        def malloc_trim(self, kept):
            trimmed.append(kept)

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setattr(server_module, "TRIM_SECONDS", 0.01)
    with running():
        wait_for(lambda: len(trimmed) >= 2)
    assert set(trimmed) == {0}
    ended = len(trimmed)
    time.sleep(0.05)
    assert len(trimmed) == ended
