"""One connection to an engine: sends a request, reads the answer, and is used again while the engine keeps it open.

The engine's framing ends here: what it sent is parsed by httptools, hop-by-hop headers and everything else that is not
on the list are dropped, and the body goes on in pieces without it. Invariant: an answer is done only when its framing
says so; whatever else ends the connection is a broken answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Protocol, cast

import httptools

from llmgw.gateway.balance import Member
from llmgw.gateway.wire import STATUS_LINES, status_line

HEAD_MAX_BYTES: Final = 64 * 2**10
"""Longest head of an engine's answer. Source: engines send some 300 bytes."""

PASSED_BACK: Final = (
    b"content-type",
    b"content-length",
    b"cache-control",
    b"content-encoding",
    b"retry-after",
    b"x-request-id",
)
"""The engine's headers that a client gets to see."""

SSE: Final = b"text/event-stream"

_BARE: Final = 2
"""Headers of an answer that has its type and its length and no other."""

KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 3
"""A node that vanished in the middle of an answer sends nothing: the kernel finds out after some 25 s."""

SMALL_BODY_BYTES: Final = 64 * 2**10
"""Up to here head and body are sent as one piece, and what is sent must be acknowledged within the connect time-out.

A larger body may have to wait in the network for a busy engine to take it.
"""

LARGE_BODY_ACK_S: Final = 60.0


class _Malformed(Exception):
    """What the engine sent is no answer to what it was asked."""


class Answer:
    """What is known of one answer.

    `status` 0: not there yet. `head`: status line and headers for the client, but for those that depend on how *it* is
    to find the body's end. `framed`: by a length or in chunks, else only the connection's end tells. `chunks`: pieces
    of body so far, as the engine framed them (with the engines known, one a token of a stream). `complete`: its framing
    said that it ended. `head_bytes`: fed while the head was not whole.
    """

    __slots__ = ("chunks", "complete", "framed", "has_length", "head", "head_bytes", "keep_alive", "status", "stream")

    def __init__(self) -> None:
        self.status = 0
        self.head = b""
        self.has_length = False
        self.framed = True
        self.stream = False
        self.chunks = 0
        self.complete = False
        self.keep_alive = False
        self.head_bytes = 0

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Take what matters from the head of an answer. Raises _Malformed."""
        self.status = status
        kind = headers.get(b"Content-Type") or headers.get(b"content-type")
        length = headers.get(b"Content-Length") or headers.get(b"content-length")
        line = STATUS_LINES.get(status) or status_line(status)
        if kind is not None and length is not None and len(headers) == _BARE:
            self.has_length = True
            self.stream = kind.startswith(SSE)
            self.head = b"%bcontent-type: %b\r\ncontent-length: %b\r\n" % (line, kind, length)
        else:
            self._read({name.lower(): value for name, value in headers.items()}, line)

    def _read(self, headers: dict[bytes, bytes], line: bytes) -> None:
        coding = headers.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            raise _Malformed("its transfer-encoding is not 'chunked'")
        self.has_length = b"content-length" in headers
        self.framed = self.has_length or coding is not None
        self.stream = headers.get(b"content-type", b"").startswith(SSE)
        self.head = line + b"".join(b"%b: %b\r\n" % (name, headers[name]) for name in PASSED_BACK if name in headers)


class Taker(Protocol):
    """Who asked and gets the answer: `answered` once, `body` any number of times, then `done` or `broke`, once."""

    def answered(self, answer: Answer) -> bool:
        """Status and headers are there. False: not wanted any more, and the connection was given up."""
        ...

    def body(self, data: bytes) -> None:
        """A piece of the body, never empty."""
        ...

    def whole(self) -> bool:
        """Whether the body so far may be all of it, now that the connection has ended and nothing else framed it."""
        ...

    def done(self) -> None:
        """The answer is whole; the connection is free again already."""
        ...

    def broke(self, why: str) -> None:
        """There will be no more of it; the connection is closed."""
        ...


class Upstream(asyncio.Protocol):
    """A connection to `member`. `reused`: it has served a request before the present one. `answer`: to the latest."""

    __slots__ = (
        "_ack_timeout_s",
        "_clock",
        "_headers",
        "_large",
        "_parser",
        "_parts",
        "_taker",
        "_told",
        "answer",
        "heard",
        "idle_since_s",
        "member",
        "on_body",
        "on_header",
        "reused",
        "transport",
    )

    def __init__(self, member: Member, *, ack_timeout_s: float, clock: Callable[[], float]) -> None:
        self.member = member
        self.reused = False
        self.idle_since_s = 0.0
        self.heard = False
        """Whether anything came since somebody last set this to False."""
        self.answer = Answer()
        self._ack_timeout_s = ack_timeout_s
        self._clock = clock
        self._large = False
        self._taker: Taker | None = None
        self._told = False
        self._parts: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        # The parser finds these by name: no Python code runs for a header or a piece of body.
        self.on_body = self._parts.append
        self.on_header = self._headers.__setitem__
        self._parser = httptools.HttpResponseParser(self)

    # --- for the one who asks ---

    def ask(self, taker: Taker, request: bytes) -> None:
        """Send a small request; `taker` gets what comes back."""
        if self._large:
            self._large = False
            self._set_ack_timeout(self._ack_timeout_s)
        self._taker = taker
        self._told = False
        self._headers.clear()  # of trailers
        self.answer = Answer()
        self.transport.write(request)

    def ask_large(self, taker: Taker, head: bytes, body: bytes | bytearray) -> None:
        """Send one with a body over `SMALL_BODY_BYTES`, without copying that."""
        self.ask(taker, head)
        self._large = True
        self._set_ack_timeout(LARGE_BODY_ACK_S)
        self.transport.write(body)

    @property
    def silent(self) -> bool:
        """Whether not a byte of an answer has come."""
        return not self.answer.status and not self.answer.head_bytes

    def close(self) -> None:
        """Give up this connection and whatever is under way on it; the taker is told nothing more."""
        self._taker = None
        self.transport.abort()

    def pause(self) -> None:
        """Let the engine wait: its client is slow."""
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own class, which does not inherit from it
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        self._set_ack_timeout(self._ack_timeout_s)

    def data_received(self, data: bytes) -> None:
        taker = self._taker
        if taker is None:  # nothing was asked
            self.transport.abort()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            if not self.answer.complete:
                self._break(f"malformed answer: {error.__context__ or error}")
                return
            self.answer.keep_alive = False  # more than was asked for: the answer is good, the connection is not
        answer = self.answer
        if not self._told:
            if not answer.status:
                self._bound_head(data)
                return
            self._told = True
            if not taker.answered(answer):
                return
        parts = self._parts
        if parts:
            answer.chunks += len(parts)
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            taker.body(body)
        if answer.complete and self._taker is taker:
            self._end(taker, answer)

    def connection_lost(self, exc: Exception | None) -> None:
        del self._parser  # which holds on to this object
        idle = self.member.idle
        if self in idle:
            idle.remove(self)
        taker = self._taker
        if taker is None:
            return
        if exc is None and self._told and not self.answer.framed and taker.whole():
            self._taker = None
            taker.done()
        else:
            self._break("connection lost" if exc is None else f"connection lost: {exc}")

    # --- called by httptools ---

    def on_headers_complete(self) -> None:
        answer = self.answer
        if answer.complete:
            raise _Malformed("a second answer")
        status = self._parser.get_status_code()
        if status >= 200:  # others are interim and of no interest
            answer.begin(status, self._headers)
        self._headers.clear()

    def on_message_complete(self) -> None:
        answer = self.answer
        if answer.status:
            answer.complete = True
            answer.keep_alive = self._parser.should_keep_alive()

    # --- inside ---

    def _bound_head(self, data: bytes) -> None:
        self.answer.head_bytes += len(data)
        if self.answer.head_bytes > HEAD_MAX_BYTES:
            self._break(f"malformed answer: its head is over {HEAD_MAX_BYTES} bytes")

    def _end(self, taker: Taker, answer: Answer) -> None:
        self._taker = None
        if not answer.keep_alive or self.member.gone or self.transport.is_closing():
            self.transport.abort()
        else:
            self.reused = True
            self.idle_since_s = self._clock()
            self.member.idle.append(self)
        taker.done()

    def _break(self, why: str) -> None:
        taker = self._taker
        self.close()
        if taker is not None:
            taker.broke(why)

    def _set_ack_timeout(self, timeout_s: float) -> None:
        """How long what was sent may go unacknowledged before the kernel calls the connection dead."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))
