"""An engine that does what a test says: HTTP/1.1 on loopback, one act for each request, faults included.

It speaks as engines do (its own key, `/slots`, chunked streams) and notices what a real one would: who asked with which
bytes, and who left before the end. Runs on trio and asyncio. Waiting is for a condition (`until`), never for a while.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketStream, TaskStatus

WITHIN_S: Final = 10.0
"""Dead-line of every wait: far above what it takes, so that only a hang meets it."""

HEAD_END: Final = b"\r\n\r\n"

ANSWER: Final = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}]}'
)


class Act(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is done with one request. `headers`: more header lines."""

    headers: tuple[bytes, ...] = ()


class Reply(Act, frozen=True, kw_only=True):
    """A whole answer. `pieces`: written one by one (the body is all of them); chunked unless `length`.

    `close`: the connection ends with it, as after llama.cpp's hundredth request. `framed` False: nothing but the
    connection's end tells where the body ends.
    """

    status: int = 200
    pieces: tuple[bytes, ...] = (ANSWER,)
    length: bool = True
    close: bool = False
    framed: bool = True
    content_type: bytes = b"application/json"


class Stream(Act, frozen=True, kw_only=True):
    """An SSE stream of `events`, one write each. `pause_s` between them.

    `bytewise`: one write a byte. `die_after`: the connection ends after so many events, with a reset or without.
    `hang_after`: nothing more comes after so many.
    """

    events: tuple[bytes, ...]
    pause_s: float = 0.0
    bytewise: bool = False
    die_after: int | None = None
    reset: bool = False
    hang_after: int | None = None


class Flood(Act, frozen=True, kw_only=True):
    """`size` bytes as fast as the reader takes them, `piece` again and again, as an SSE stream."""

    size: int
    piece: bytes = b"data: " + b"x" * 8184 + b"\n\n"


class Silent(Act, frozen=True, kw_only=True):
    """Nothing at all, until the client leaves."""


class Die(Act, frozen=True, kw_only=True):
    """The connection ends after `sent` has been written: before any answer, or in the middle of one."""

    sent: bytes = b""
    reset: bool = False


class Raw(Act, frozen=True, kw_only=True):
    """Just these bytes; the connection stays."""

    sent: bytes


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it came."""

    line: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    connection: int

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, None when it is not there."""
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass(kw_only=True)
class StubEngine:
    """One engine. `script`: an act for each request to come, then `default`. All counts are of this engine's life."""

    key: str
    port: int = 0
    script: deque[Act] = field(default_factory=deque)
    default: Act = field(default_factory=Reply)
    seen: list[Seen] = field(default_factory=list)
    slots: tuple[bool, ...] | None = None
    """What `/slots` says of each slot; None: 501, as an engine that has no such thing."""
    slots_asked: int = 0
    connections: int = 0
    open: int = 0
    active: int = 0
    """Requests being answered."""
    left: int = 0
    """Requests whose client left before the end."""
    sent_bytes: int = 0
    """Body bytes that the reader's side has taken."""
    scope: anyio.CancelScope | None = None
    """What it runs in; None when it does not."""
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def until(self, condition: Callable[[StubEngine], bool]) -> None:
        """Until `condition` holds, with a dead-line; it is looked at after every change here."""
        with anyio.fail_after(WITHIN_S):
            while not condition(self):
                await self._changed.wait()

    async def stop(self) -> None:
        """End it: no new connections, and those there are reset."""
        if self.scope is not None:
            self.scope.cancel()
        await self.until(lambda engine: engine.scope is None)

    def note(self) -> None:
        """Something has changed."""
        self._changed.set()
        self._changed = anyio.Event()


@asynccontextmanager
async def stub_engine(*, key: str, script: Sequence[Act] = (), port: int = 0) -> AsyncIterator[StubEngine]:
    """A running engine on `port` (0: any)."""
    engine = StubEngine(key=key, script=deque(script))
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    engine.port = listener.extra(SocketAttribute.local_port)  # noqa: S610  # anyio's, not Django's

    async def handle(stream: SocketStream) -> None:
        engine.connections += 1
        engine.open += 1
        engine.note()
        try:
            await _Connection(engine, stream, engine.connections).run()
        except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError):
            pass  # the client went
        finally:
            engine.open -= 1
            engine.note()
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    async def serve(*, task_status: TaskStatus[None]) -> None:
        async with listener:
            with anyio.CancelScope() as engine.scope:
                task_status.started()
                await listener.serve(handle)
        engine.scope = None
        engine.note()

    async with anyio.create_task_group() as tasks:
        await tasks.start(serve)
        try:
            yield engine
        finally:
            tasks.cancel_scope.cancel()


class _Connection:
    """One connection: requests one after the other, each acted upon while somebody watches for the client leaving."""

    def __init__(self, engine: StubEngine, stream: SocketStream, number: int) -> None:
        self.engine = engine
        self.stream = stream
        self.number = number
        self._buffer = bytearray()

    async def run(self) -> None:
        while True:
            seen = await self._read()
            if seen is None:
                return
            if not await self._answer(seen):
                return

    async def _read(self) -> Seen | None:
        while (end := self._buffer.find(HEAD_END)) < 0:
            try:
                self._buffer += await self.stream.receive()
            except anyio.EndOfStream:
                return None
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + len(HEAD_END)]
        pairs = (line.partition(b":") for line in lines[1:])
        headers = tuple((name, value.strip()) for name, _, value in pairs)
        length = int(next((value for name, value in headers if name.lower() == b"content-length"), b"0"))
        while len(self._buffer) < length:
            self._buffer += await self.stream.receive()
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return Seen(line=lines[0], headers=headers, body=body, connection=self.number)

    async def _answer(self, seen: Seen) -> bool:
        """Act; whether the connection goes on."""
        engine = self.engine
        if seen.line.startswith(b"GET /slots "):
            engine.slots_asked += 1
            engine.note()
            return await self._reply(self._slots())
        if seen.header(b"authorization") != b"Bearer " + engine.key.encode():
            engine.note()
            return await self._reply(Reply(status=401, pieces=(b'{"error":"Unauthorized"}',)))
        engine.seen.append(seen)
        act = engine.script.popleft() if engine.script else engine.default
        engine.active += 1
        engine.note()
        try:
            return await self._act(act)
        finally:
            engine.active -= 1
            engine.note()

    def _slots(self) -> Reply:
        slots = self.engine.slots
        if slots is None:
            return Reply(status=501, pieces=(b'{"error":{"message":"no slots"}}',))
        text = msgspec.json.encode([{"id": n, "is_processing": busy} for n, busy in enumerate(slots)])
        return Reply(pieces=(text,))

    async def _act(self, act: Act) -> bool:
        goes_on = finished = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, tasks.cancel_scope)
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                goes_on = await self._perform(act)
                finished = True
            tasks.cancel_scope.cancel()
        if not finished:
            self.engine.left += 1
        return goes_on

    async def _perform(self, act: Act) -> bool:
        """Do it; whether the connection goes on afterwards."""
        match act:
            case Reply():
                return await self._reply(act)
            case Stream():
                return await self._stream(act)
            case Flood():
                return await self._flood(act)
            case Silent():
                await anyio.sleep_forever()
            case Die():
                await self.stream.send(act.sent)
                await self._die(reset=act.reset)
            case Raw():
                await self.stream.send(act.sent)
                return True
            case _:
                raise AssertionError(act)
        return False

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Cancel what is done for a client who leaves."""
        try:
            while True:
                self._buffer += await self.stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            scope.cancel()

    async def _reply(self, act: Reply) -> bool:
        lines = [b"HTTP/1.1 %d X" % act.status, b"content-type: " + act.content_type, *act.headers]
        if act.framed:
            size = sum(map(len, act.pieces))
            lines.append(b"content-length: %d" % size if act.length else b"transfer-encoding: chunked")
        if act.close or not act.framed:
            lines.append(b"connection: close")
        await self.stream.send(b"\r\n".join(lines) + HEAD_END)
        chunked = act.framed and not act.length
        for piece in act.pieces:
            await self.stream.send(_chunk(piece) if chunked else piece)
            self.engine.sent_bytes += len(piece)
        if chunked:
            await self.stream.send(b"0\r\n\r\n")
        return not act.close and act.framed

    async def _open_stream(self, act: Act) -> None:
        lines = [b"HTTP/1.1 200 OK", b"content-type: text/event-stream", b"transfer-encoding: chunked", *act.headers]
        await self.stream.send(b"\r\n".join(lines) + HEAD_END)

    async def _stream(self, act: Stream) -> bool:
        await self._open_stream(act)
        for n, event in enumerate(act.events):
            if n == act.hang_after:
                await anyio.sleep_forever()
            if n == act.die_after:
                await self._die(reset=act.reset)
                return False
            for piece in (bytes([byte]) for byte in event) if act.bytewise else (event,):
                await self.stream.send(_chunk(piece))
                self.engine.sent_bytes += len(piece)
            self.engine.note()
            if act.pause_s:
                await anyio.sleep(act.pause_s)
        if act.die_after is not None:
            await self._die(reset=act.reset)
            return False
        await self.stream.send(b"0\r\n\r\n")
        return True

    async def _flood(self, act: Flood) -> bool:
        await self._open_stream(act)
        chunk, left = _chunk(act.piece), act.size
        while left > 0:
            await self.stream.send(chunk)
            left -= len(act.piece)
            self.engine.sent_bytes += len(act.piece)
        await self.stream.send(b"0\r\n\r\n")
        return True

    async def _die(self, *, reset: bool) -> None:
        if reset:
            raw = self.stream.extra(SocketAttribute.raw_socket)  # noqa: S610  # anyio's, not Django's
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.stream.aclose()


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def sse(*texts: str, done: bool = True) -> tuple[bytes, ...]:
    """Events as an engine streams them: one chunk object for each of `texts`, then the end mark."""
    events = [
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":%b}}]}\n\n'
        % msgspec.json.encode(text)
        for text in texts
    ]
    return (*events, *([b"data: [DONE]\n\n"] if done else []))
