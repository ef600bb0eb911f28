"""Serve live streams over WebSockets and recordings over HTTP; `batcher.py` decodes them.

    GET /          a page that transcribes the microphone or a file
    WS  /stream    one stream; see `session.py` for the messages
    POST /v1/audio/transcriptions   a recording; see `transcriptions.py`
    GET /v1/models, /v1/models/NAME   the model, in the form of OpenAI's API
    GET /about     JSON: model, strategy, and the server's phrases
    GET /healthz   200, or 503 if the server accepts no streams
    GET /metrics   counters for Prometheus

If the server has a token, all but / and /healthz require it: "Authorization: Bearer TOKEN", or ?token=TOKEN for
browsers, which cannot set headers.
"""

import asyncio
import contextlib
import gc
import hmac
import json
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from nemo_gpu_decoding.cache import return_memory
from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.live import transcriptions
from nemo_gpu_decoding.live.batcher import Batcher, ServerFullError
from nemo_gpu_decoding.live.interface import Address
from nemo_gpu_decoding.live.session import SHOWN, START_KEYS, Session, read_json, read_start

logger = logging.getLogger("nemo_gpu_decoding")

DONE, RESTART, REFUSED, FULL, FAILED = 1000, 1012, 1008, 1013, 1011  # codes of RFC 6455 and its registry
# Outcomes of streams in the metrics: fields of errors among them, but no names chosen by clients.
OUTCOMES = frozenset(START_KEYS).union(
    ("end", "restart", "disconnect", "send_seconds", "streams", "idle_seconds", "audio", "file", "server")
)
MESSAGES = 4  # maximum number of unread messages per client
TRIM_SECONDS = 10.0  # between two returns of free memory to the system
PAGE_RULES = (
    "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class LiveServer(uvicorn.Server):
    """A server that decodes streams until a signal or `shutdown`, and then finishes open utterances.

    Args:
        batcher: the streams.
        address: the address to listen on.
    """

    def __init__(self, batcher: Batcher, address: Address) -> None:
        self.batcher, self.address = batcher, address
        self.is_draining = False
        self.handlers: set[asyncio.Task[Any]] = set()
        routes = [
            Route("/", self._page),
            Route("/about", self._about),
            Route("/healthz", self._health),
            Route("/metrics", self._metrics),
            WebSocketRoute("/stream", self._stream),
            Route("/v1/audio/transcriptions", self._recording, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
        ]
        limits = batcher.limits
        handlers: Any = {HTTPException: transcriptions.refusal}
        app = Starlette(routes=routes, lifespan=self._life, exception_handlers=handlers)
        super().__init__(
            uvicorn.Config(
                app, host=address.host, port=address.port, log_level="warning", access_log=False, server_header=False,
                ws_max_size=limits.max_message_bytes, ws_max_queue=MESSAGES, ws_per_message_deflate=False,
                ws_ping_interval=limits.idle_seconds, ws_ping_timeout=limits.idle_seconds,
                timeout_graceful_shutdown=1,
            )
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Return the URL of the server's page, which is known while the server runs."""
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down at a signal; at the second Ctrl+C, end at once. uvicorn's method would raise the signal again at
        the end; without that, the process ends with status 0.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        """Refuse new streams, finish open utterances, and close all connections."""
        self.is_draining = True
        self.batcher.end()
        for task in self.handlers:
            if task.get_name() == transcriptions.UPLOADING:
                task.cancel()
        if self.handlers:
            await asyncio.wait(self.handlers, timeout=self.address.shutdown_seconds)
        for session in self.batcher.sessions.values():
            session.leave()  # not finished within `shutdown_seconds`
        await super().shutdown(sockets)

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self._running = asyncio.create_task(self.batcher.run())
        trimming = asyncio.create_task(_return_free_memory())
        # NeMo and a model are 750,000 objects that live as long as the server. Frozen objects are not visited by the
        # collector, so that collections are short and free the objects of ended streams early.
        gc.freeze()
        gc.collect()  # resets the counts that determine when the collector runs next
        try:
            yield
        finally:
            gc.unfreeze()
            self._running.cancel()
            trimming.cancel()
            await asyncio.to_thread(self.batcher.close)

    # ------------------------------------------------------------------------------------- routes

    async def _page(self, request: Request) -> Response:
        page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_RULES})

    async def _health(self, request: Request) -> Response:
        status = "stopping" if self.is_draining else "ok" if self.batcher.is_well else "failed"
        state = {"status": status, "streams": len(self.batcher.sessions)}
        return JSONResponse(state, 200 if status == "ok" else 503)

    async def _about(self, request: Request) -> Response:
        if not self._knows_token(request):
            return PlainTextResponse("token is missing or wrong\n", 401)
        recognizer = self.batcher.recognizer
        about = {"model": recognizer.model, "strategy": recognizer.strategy, "phrases": list(recognizer.phrases)}
        return JSONResponse(about)

    async def _metrics(self, request: Request) -> Response:
        if not self._knows_token(request):
            return PlainTextResponse("token is missing or wrong\n", 401)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.batcher.metrics.registry), headers={"Content-Type": content_type})

    async def _models(self, request: Request) -> Response:
        if not self._knows_token(request):
            return transcriptions.failure(401, "token is missing or wrong")
        model = {"id": self.batcher.recognizer.model, "object": "model", "created": 0, "owned_by": "nemo_gpu_decoding"}
        # requests may name any model: there is one
        return JSONResponse(model if request.path_params else {"object": "list", "data": [model]})

    async def _recording(self, request: Request) -> Response:
        if not self._knows_token(request):
            return transcriptions.failure(401, "token is missing or wrong")
        if not _is_same_origin(request):
            return transcriptions.failure(403, "pages of other servers are not let in")
        if self.is_draining:
            return transcriptions.failure(503, "the server stops")
        with self._handling("server") as outcomes:
            outcome, response = await transcriptions.answer(request, self.batcher)
            outcomes.append(outcome)
        return response

    @contextlib.contextmanager
    def _handling(self, default: str) -> Iterator[list[str]]:
        """Register this task as a handler; at the end, count the last outcome in the yielded list, or `default`."""
        task, outcomes = asyncio.current_task(), [default]
        assert task is not None
        self.handlers.add(task)
        try:
            yield outcomes
        finally:
            self.handlers.discard(task)
            self.batcher.metrics.streams.labels(_outcome(outcomes[-1])).inc()

    def _knows_token(self, request: HTTPConnection) -> bool:
        if self.address.token is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = request.query_params.get("token", "")
        return hmac.compare_digest(given.strip().encode(), self.address.token.encode())

    # ------------------------------------------------------------------------------------ streams

    async def _stream(self, socket: WebSocket) -> None:
        if not self._knows_token(socket):
            await socket.send_denial_response(PlainTextResponse("token is missing or wrong\n", 401))
            return
        if not _is_same_origin(socket):
            await socket.send_denial_response(PlainTextResponse("pages of other servers are not let in\n", 403))
            return
        await socket.accept()
        with self._handling("disconnect") as outcomes:
            try:
                outcomes.append(await self._converse(socket))
            except WebSocketDisconnect:
                pass
            except asyncio.TimeoutError:
                outcomes.append("send_seconds")
                logger.warning("a client is dropped: it does not read its messages")
                self._abort(socket)
            except Exception as error:
                states = socket.client_state, socket.application_state
                if WebSocketState.DISCONNECTED not in states:  # else Starlette raised it: the connection was closed
                    outcomes.append("server")
                    logger.error("a connection ended by a fault of the server", exc_info=error)
                    with contextlib.suppress(Exception):
                        await self._refuse(socket, "server", "the server failed; its log has the reason", FAILED)

    async def _converse(self, socket: WebSocket) -> str:
        """Serve a WebSocket connection from first message to close; return the outcome for the metrics."""
        limits = self.batcher.limits
        try:
            if self.is_draining or self.batcher.is_full:
                raise ServerFullError
            first = await asyncio.wait_for(_receive(socket), limits.idle_seconds)
            if not isinstance(first, str):
                raise FieldError("message", f"{len(first)} bytes", "a JSON object before any audio")
            if read_json(first) == {"type": "end"}:
                await self._timely(socket.close(DONE))
                return "end"
            session = await self.batcher.open(read_start(first, limits))
        except ServerFullError:
            return await self._refuse(
                socket, "streams", f"no more than {limits.max_streams} are served at a time", FULL
            )
        except asyncio.TimeoutError:
            return await self._refuse(socket, "idle_seconds", "there was no first message", REFUSED)
        except ValueError as error:
            return await self._refuse(socket, getattr(error, "field", "message"), str(error), REFUSED)
        try:
            return await self._transcribe(socket, session)
        finally:
            session.kill()
            self.batcher.wake()

    async def _transcribe(self, socket: WebSocket, session: Session) -> str:
        """Read audio and send transcripts until the connection closes; return the outcome for the metrics."""
        reading = asyncio.create_task(self._read(socket, session))
        reading.add_done_callback(lambda task: self._watch(task, session))
        try:
            if self.is_draining:  # the shutdown began during `open`
                session.end()
            await self._send(socket, self._ready(session))
            await self._write(socket, session)
        finally:
            session.kill()  # first, for `_watch`
            reading.cancel()
        if session.error is not None:
            return await self._refuse(socket, *session.error, FAILED if session.error[0] == "server" else REFUSED)
        await self._timely(socket.close(RESTART if self.is_draining else DONE))
        return "restart" if self.is_draining else "end"

    def _watch(self, reading: asyncio.Task[None], session: Session) -> None:
        """End the stream when the task that reads its audio has ended or failed."""
        if not reading.cancelled() and (error := reading.exception()) is not None:
            self.batcher.crash(session, error)
        elif not session.is_ending:
            session.leave()
            self.batcher.wake()

    def _ready(self, session: Session) -> dict[str, Any]:
        recognizer, limits = self.batcher.recognizer, self.batcher.limits
        seconds = recognizer.chunk_samples / recognizer.sample_rate
        return {
            "type": "ready", "strategy": recognizer.strategy, "sample_rate": recognizer.sample_rate,
            "chunk_seconds": seconds, "right_context_seconds": recognizer.right_context_seconds,
            "languages": recognizer.languages, "limits": vars(limits) | {"max_n_best": recognizer.max_n_best},
            "left_out": session.left_out,
        }  # fmt: skip

    async def _read(self, socket: WebSocket, session: Session) -> None:
        """Read audio from a client until the stream ends, the client disconnects, or an error or timeout occurs."""
        limits = self.batcher.limits
        try:
            while not session.is_ending:
                await session.read_on.wait()
                message = await asyncio.wait_for(_receive(socket), limits.idle_seconds)
                if isinstance(message, bytes):
                    session.feed(message)
                elif read_json(message) == {"type": "end"}:
                    session.end()
                else:
                    raise FieldError("message", message[:SHOWN], 'audio, or {"type": "end"}')
                self.batcher.wake()
            while True:  # wait for the client to disconnect
                await _receive(socket)
        except asyncio.TimeoutError:
            session.fail("idle_seconds", f"there was no message for {limits.idle_seconds:g} seconds")
        except WebSocketDisconnect:
            session.leave()
        except ValueError as error:
            session.fail(getattr(error, "field", "message"), str(error))
        self.batcher.wake()

    async def _write(self, socket: WebSocket, session: Session) -> None:
        """Send transcripts to a client until its stream has ended.

        Raises:
            WebSocketDisconnect: the client has disconnected.
            TimeoutError: the client does not read.
        """
        while True:
            await session.changed.wait()
            if session.is_stuck:
                raise asyncio.TimeoutError
            if session.has_left:
                raise WebSocketDisconnect
            is_over = session.is_over or session.is_dead
            for message in session.messages():
                await self._send(socket, message)
            if is_over:
                return

    async def _refuse(self, socket: WebSocket, field: str, message: str, code: int) -> str:
        """Send an error message to the client, close the connection, and return `field`."""
        await self._send(socket, {"type": "error", "field": field, "message": message})
        await self._timely(socket.close(code, f"{_outcome(field)}: see the message before"))
        return field

    async def _send(self, socket: WebSocket, message: dict[str, Any]) -> None:
        text = json.dumps(message, ensure_ascii=False)
        # a lone surrogate becomes its escape sequence, which is equivalent in JSON
        await self._timely(socket.send_text(text.encode("utf-8", "backslashreplace").decode()))

    async def _timely(self, sending: Any) -> None:
        await asyncio.wait_for(sending, self.batcher.limits.send_seconds)

    def _abort(self, socket: WebSocket) -> None:
        """Abort the connection to a client that does not read: a close message would wait in the send buffer."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None and getattr(connection, "client", None) == socket.scope["client"]:
                transport.abort()


async def _return_free_memory() -> None:
    """Return free memory to the system every `TRIM_SECONDS`: fragments would make the heap grow for hours."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        return_memory()


async def _receive(socket: WebSocket) -> str | bytes:
    """Return the next text or binary message of a client.

    Raises:
        WebSocketDisconnect: the client has disconnected.
    """
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    text = message.get("text")
    return message["bytes"] if text is None else text


def _outcome(field: str) -> str:
    """Return the metrics' outcome for an error's field ("phrases" for phrases[3]); unknown fields are "message"."""
    field = field.partition("[")[0]
    return field if field in OUTCOMES else "message"


def _is_same_origin(socket: HTTPConnection) -> bool:
    """Return whether a request comes from a program or from the server's page. Browsers let every page open
    WebSockets and send forms, but state the page's origin.
    """
    origin = socket.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == socket.headers.get("host")
