"""No client hurts another one, and none keeps a slot behind its end."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from nemo_gpu_decoding.live import batcher as batcher_module
from nemo_gpu_decoding.live.batcher import Batcher
from nemo_gpu_decoding.live.interface import Limits, StreamOptions
from nemo_gpu_decoding.live.server import LiveServer
from nemo_gpu_decoding.live.session import Session, read_start
from tests.live.test_server import (
    FATAL,
    NumberReader,
    audio,
    conversation,
    counted,
    finals,
    get,
    messages,
    running,
    stream,
    told,
    wait_for,
)

DEEP = "[" * 400_000
VICTIM = {"n_best": 2}  # how a victim begins


@contextlib.contextmanager
def bystander(server):
    """A stream that speaks before and behind the block, and hears all."""
    with stream(server) as socket:
        assert json.loads(socket.recv(10))["type"] == "ready"
        socket.send(audio(1))
        yield
        socket.send(audio(2))
        socket.send('{"type": "end"}')
        found, code = messages(socket)
    assert code == 1000
    assert finals(found) == ["1 2"]
    wait_for(lambda: not server.batcher.sessions)


# -------------------------------------------------------------------------------------- messages
FIRST = {
    DEEP: ("message", "message is '[[[[["),
    '{"sample_rate": ' + "[" * 800 + "]" * 800 + "}": ("sample_rate", "'a list of 1'"),
    '{"end_silence": 1e12}': ("end_silence", "a number <= 60"),
    '{"end_silence": NaN}': ("end_silence", "nan, expected a number"),
    '{"phrases": ["a"], "boosting_weight": 1%s}' % ("0" * 400): ("boosting_weight", "at most 100"),
    '{"phrases": ["a"], "boosting_weight": NaN}': ("boosting_weight", "a number > 0, at most 100"),
    '{"n_best": 1%s}' % ("0" * 400): ("n_best", "an integer 1 .. 1000"),
    '{"n_best": 1%s}' % ("0" * 5000): ("message", "expected a JSON object"),
    '{"\\ud800": 1}': ("\ud800", "expected none; the keys are sample_rate"),
    json.dumps({"ä" * 90: "ö" * 100_000}): ("ä" * 80, "expected none"),
    '{"phrases": ["a", "\\ud800"]}': ("phrases[1]", "a text without lone surrogates"),
    json.dumps({"phrases": ["a" * 200] * 3}): ("phrases", "at most 500 in all phrases together"),
    '{"phrases": {"a": 1}}': ("phrases", "'an object of 1'"),
    '{"phrases": [{"phrase": "a", "weight": 9}]}': ("phrases[0]", "an object with phrase and a list of aliases"),
    '{"phrases": [{"phrase": "a", "aliases": "b"}]}': ("phrases[0]", "an object with phrase and a list of aliases"),
    '{"phrases": [{"phrase": "a", "aliases": [" "]}]}': ("phrases[0]", "a text of 1 .. 200 characters"),
    '{"phrases": [{"aliases": ["a"]}]}': ("phrases[0]", "a text of 1 .. 200 characters"),
    json.dumps({"phrases": [{"phrase": "a", "aliases": ["b"] * 10}]}): ("phrases", "at most 10 phrases and aliases"),
    '{"language": "\\ud800"}': ("language", "expected one of en"),
    "blah": ("message", "message is 'blah', expected a JSON object"),
    "[]": ("message", "message is"),
    '{"beam": 8}': ("beam", "beam is"),
    '{"sample_rate": 100}': ("sample_rate", "sample_rate is"),
    '{"sample_rate": "16000"}': ("sample_rate", "sample_rate is"),
    '{"phrases": "a"}': ("phrases", "phrases is"),
    json.dumps({"phrases": ["a"] * 11}): ("phrases", "phrases"),
    '{"phrases": ["a", ""]}': ("phrases[1]", "phrases[1] is"),
    json.dumps({"phrases": ["a" * 201]}): ("phrases[0]", "phrases[0] is"),
    '{"boosting_weight": 3}': ("boosting_weight", "boosting_weight is"),
    '{"end_silence": "long"}': ("end_silence", "end_silence is"),
    '{"language": "fr"}': ("language", "language is"),
    '{"lm": 3}': ("lm", "lm is 3, expected a string or None"),
    '{"allowed_scripts": "Latin"}': ("allowed_scripts", "expected a list of texts that are not blank"),
    '{"allowed_tokens": []}': ("allowed_tokens", "expected a list of texts that are not blank"),
    '{"grammar": 5}': ("grammar", "expected a list of sentences"),
    '{"allowed_price": NaN}': ("allowed_price", "expected a number >= 0 (or inf)"),
    '{"grammar": "/etc/passwd"}': ("grammar", "expected a list of sentences"),
    '{"grammar": {"a": 1}}': ("grammar", "expected a list of sentences"),
    '{"grammar": ["a", " "]}': ("grammar", "expected a list of sentences"),
    '{"grammar": ["%s"]}' % ("a" * 20_005): ("grammar", "is '20005 characters', expected at most 20000"),
    '{"grammar": ["a"], "grammar_price": 0}': ("grammar_price", "expected a number > 0 (or inf)"),
    '{"grammar": ["a"], "phrases": ["a"]}': ("phrases", "expected none with a grammar"),
    '{"lm": "law"}': ("lm", "lm is 'law', expected one of news"),
    '{"partials": 1}': ("partials", "partials is"),
    '{"n_best": 4}': ("n_best", "n_best is"),
}


def test_wrong_first_messages_are_named():
    with running(limits=Limits(max_phrases=10)) as server, bystander(server):
        for text, (field, words) in FIRST.items():
            (error,), code = told(server, text)
            assert (error["type"], error["field"], code) == ("error", field, 1008), text[:80]
            assert words in error["message"]
            assert error["message"].startswith(field)
            assert len(error["message"]) < 1000
            assert len(server.batcher.sessions) == 1


@pytest.mark.parametrize("text", [DEEP, "blah", "{}", '{"type": "stop"}', '{"type": "end", "a": 1}', '"\\ud800"'])
def test_wrong_later_messages_are_named(text):
    with running() as server, bystander(server):
        found, code = told(server, "{}", audio(7), text)
    assert code == 1008
    assert finals(found) == ["7"]
    assert found[-1]["message"] == f'message is {text[:80]!r}, expected audio, or {{"type": "end"}}'


def test_first_messages_at_their_limits_are_accepted():
    wanted = '{"type": "start", "end_silence": 60, "phrases": ["%s"], "boosting_weight": 100}' % ("ä" * 200)
    assert read_start(wanted, Limits()).end_silence == 60
    assert read_start('{"end_silence": -1e300}', Limits()).end_silence == -1e300


# ---------------------------------------------------------------------------------------- faults
class Fragile(NumberReader):
    """Its steps raise an error where a chunk says so; the streams are then as before."""

    error: BaseException = RuntimeError("the model is broken")

    def step(self, chunks):
        self.batches.append(len(chunks))
        if any(self._value(chunk) == FATAL for chunk in chunks):
            raise self.error
        return [self._step(chunk) for chunk in chunks]


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError(), RecursionError(), SystemExit(3)])
def test_a_step_that_raises_ends_the_stream_at_fault(error, caplog):
    reader = Fragile()
    reader.error = error
    with running(reader, tick_seconds=0.05) as server, bystander(server), stream(server) as good:
        for _ in range(20):
            good.send(audio(3))
        found, code = conversation(server, audio(5, FATAL))
        good.send('{"type": "end"}')
        assert finals(messages(good)[0]) == [" ".join(["3"] * 20)]
        assert code == 1011
        assert found[-1]["field"] == "server"
        assert get(server, "healthz")[0] == 200
    assert type(error).__name__ in caplog.text
    assert not reader.streams
    assert counted(server, "streams_total", outcome="server") == 1


def test_stream_at_fault_is_found_in_a_batch():
    reader = Fragile()
    with running(reader, tick_seconds=0.2) as server, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(stream(server)) for _ in range(4)]
        wait_for(lambda: len(server.batcher.sessions) == 4)
        for n, socket in enumerate(sockets):
            socket.send(audio(FATAL if n == 2 else n + 1))
            socket.send('{"type": "end"}')
        found = [messages(socket) for socket in sockets]
    assert reader.batches[:5] == [4, 1, 1, 1, 1]
    assert [code for _, code in found] == [1000, 1000, 1011, 1000]
    assert [finals(own) for own, _ in found] == [["1"], ["2"], [], ["4"]]


def test_stream_that_crashes_before_its_step_is_dropped():
    """The step begins the stream, so a drop before the step is too early."""
    reader = NumberReader()
    batcher = Batcher(reader, Limits())

    async def run():
        session = await batcher.open(StreamOptions())
        session.feed(audio(1))
        batch = batcher._take()
        batcher.crash(session, ValueError("the client has gone"))
        await batcher._step(batch)
        assert list(reader.streams)
        batcher._drop()

    asyncio.run(run())
    batcher.close()
    assert not reader.streams


def test_streams_beyond_the_batch_size_take_turns():
    """All of them have audio all the time; none waits for the end of another one."""
    reader, heard = NumberReader(), []
    reader.step = lambda chunks: heard.extend(chunk.stream for chunk in chunks) or NumberReader.step(reader, chunks)
    with running(reader, batch_size=1, tick_seconds=0.2) as server, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(stream(server)) for _ in range(3)]
        for socket in sockets:
            socket.send(audio(1, 2, 3, 4))
            socket.send('{"type": "end"}')
        found = [finals(messages(socket)[0]) for socket in sockets]
    assert found == [["1 2 3 4"]] * 3
    assert [sorted(heard[n : n + 3]) for n in range(0, 12, 3)] == [sorted(heard[:3])] * 4
    assert len(set(heard)) == 3


METHODS = [
    name
    for name, member in vars(Session).items()
    if (callable(member) or isinstance(member, property)) and name not in ("kill", "crash")  # which end a stream
]


def behaviours(server, query=""):
    """What a victim does, one way after the other: it ends, errs, leaves."""
    first = json.dumps(VICTIM)
    yield lambda: told(server, first, audio(5, 0, 6), '{"type": "end"}', query=query)
    yield lambda: told(server, first, audio(5), "nonsense", query=query)

    def leave():
        with contextlib.suppress(ConnectionClosed), stream(server, VICTIM, query) as socket:
            socket.send(audio(5))
            wait_for(lambda: len(server.batcher.sessions) < 2 or json.loads(socket.recv(10))["type"] == "partial")
        return [], None

    yield leave


def failing(member, is_victim, calls):

    def method(*args, **options):
        if is_victim(*args):
            calls.append(args)
            raise MemoryError("injected")
        return member.fget(*args) if isinstance(member, property) else member(*args, **options)

    return property(method) if isinstance(member, property) else method


@pytest.mark.parametrize("name", METHODS)
def test_fault_in_a_session_ends_only_its_stream(name, monkeypatch, caplog):
    caplog.set_level("CRITICAL", "nemo_gpu_decoding")
    calls, reader = [], NumberReader()

    def is_victim(session, *args):
        start = args[0] if name == "__init__" else session.start
        return start.n_best == 2

    monkeypatch.setattr(Session, name, failing(vars(Session)[name], is_victim, calls))
    with running(reader) as server:
        for behave in behaviours(server):
            before = len(calls)
            with bystander(server):
                found, code = behave()
            if len(calls) > before and code is not None:
                assert code == 1011
                assert found[-1]["field"] == "server"
            wait_for(lambda: not reader.streams)
    assert calls


@pytest.mark.parametrize("name", ["_converse", "_transcribe", "_read", "_write", "_send", "_refuse"])
def test_fault_in_a_connection_ends_only_its_stream(name, monkeypatch, caplog):
    caplog.set_level("CRITICAL", "nemo_gpu_decoding")
    calls, reader = [], NumberReader()

    def is_victim(server, socket, *args):
        return "victim" in socket.query_params

    monkeypatch.setattr(LiveServer, name, failing(vars(LiveServer)[name], is_victim, calls))
    with running(reader) as server:
        for behave in behaviours(server, "?victim=1"):
            with bystander(server):
                behave()
            wait_for(lambda: not reader.streams)
    assert calls


@pytest.mark.parametrize("name", ["prepare", "drop"])
def test_fault_in_prepare_or_drop_ends_only_its_stream(name, monkeypatch):
    reader = Fragile()
    with running(reader) as server, bystander(server):
        with monkeypatch.context() as patch:

            def broken(*args):
                raise MemoryError("injected")

            patch.setattr(reader, name, broken)
            found, code = told(server, "{}", audio(FATAL))
        assert code == 1011
        assert found[-1]["field"] == "server"
        assert finals(conversation(server, audio(4))[0]) == ["4"]


def test_a_reading_task_that_is_cancelled_ends_its_stream(monkeypatch):
    read = LiveServer._read

    async def cancelled(self, socket, session):
        if "victim" in socket.query_params:
            raise asyncio.CancelledError
        await read(self, socket, session)

    monkeypatch.setattr(LiveServer, "_read", cancelled)
    with running() as server, bystander(server):
        told(server, "{}", query="?victim=1")
        wait_for(lambda: len(server.batcher.sessions) == 1)


# --------------------------------------------------------------------------------- the server's end
def test_dead_batcher_fails_the_health_check(caplog):
    with running() as server:
        with stream(server) as socket:
            assert json.loads(socket.recv(10))["type"] == "ready"
            server.batcher._take = lambda: 1 / 0
            socket.send(audio(1))
            (error,), code = messages(socket)
        assert (error["field"], code) == ("server", 1011)
        status, text = get(server, "healthz")
        assert (status, json.loads(text)) == (503, {"status": "failed", "streams": 0})
        (error,), code = told(server, "{}")
        assert (error["field"], code) == ("server", 1011)
    assert "the batcher ended" in caplog.text


def test_stuck_step_fails_the_health_check(monkeypatch):
    monkeypatch.setattr(batcher_module, "STUCK_SECONDS", 0.05)
    with running(NumberReader(seconds=0.5)) as server, stream(server) as socket:
        assert get(server, "healthz")[0] == 200
        socket.send(audio(1))
        wait_for(lambda: get(server, "healthz")[0] == 503, seconds=0.5)
        wait_for(lambda: get(server, "healthz")[0] == 200)


SERVED = """
import sys
from nemo_gpu_decoding.cli import main, serve
from tests.live.test_server import NumberReader
serve.build_recognizer = lambda options: NumberReader()
sys.exit(main.main(["serve", "model=a.nemo", "port=0"]))
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_open_utterances_and_ends_with_status_0(sent):
    environment = {name: value for name, value in os.environ.items() if name != "NEMO_GPU_DECODING_TOKEN"}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    with process:
        try:
            url = re.search(r"http://\S+", process.stdout.readline())[0]
            with connect(url.replace("http", "ws") + "stream", compression=None) as socket:
                socket.send("{}")
                socket.send(audio(3, 4)[:-10])
                assert json.loads(socket.recv(10))["type"] == "ready"
                assert json.loads(socket.recv(10))["type"] == "partial"
                process.send_signal(sent)
                found, code = messages(socket)
            assert finals(found) == ["3 4"]
            assert code == 1012
            assert process.wait(20) == 0, process.stderr.read()
        finally:
            process.kill()


def test_page_facts_need_the_token_and_metrics_have_no_created_series():
    with running(token="secret") as server:
        assert get(server, "about")[0] == 401
        text = get(server, "about?token=secret")[1]
    assert json.loads(text) == {"model": "digits", "strategy": "numbers", "phrases": ["one", "two"]}
    with running() as server:
        time.sleep(0.01)
        assert "_created" not in get(server, "metrics")[1]
