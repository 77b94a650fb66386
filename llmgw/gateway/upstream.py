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

HEAD_MAX_BYTES: Final = 64 * 2**10
"""Longest head of an engine's answer. Source: engines send some 300 bytes."""

PASSED_BACK: Final = (b"cache-control", b"content-encoding", b"retry-after", b"x-request-id")
"""The engine's headers that a client gets to see, beside content-type and the length."""

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

    `status` 0: not there yet. `lines`: header lines for the client, ready to be sent, but for the type and the framing.
    `length`: in digits; None and not `chunked`: nothing but the connection's end frames the body. `chunks`: pieces of
    body so far, as the engine framed them (with the engines known, one a token of a stream). `complete`: its framing
    said that it ended. `head_bytes`: fed while the head was not whole.
    """

    status = 0
    content_type: bytes | None = None
    length: bytes | None = None
    chunked = False
    lines = b""
    chunks = 0
    complete = False
    keep_alive = False
    head_bytes = 0

    def read(self, headers: dict[bytes, bytes]) -> None:
        """Take what matters from the head of an answer. Raises _Malformed."""
        self.content_type = headers.get(b"Content-Type") or headers.get(b"content-type")
        self.length = headers.get(b"Content-Length") or headers.get(b"content-length")
        if self.content_type is not None and self.length is not None and len(headers) == _BARE:
            return
        lowered = {name.lower(): value for name, value in headers.items()}
        self.content_type = lowered.get(b"content-type")
        self.length = lowered.get(b"content-length")
        coding = lowered.get(b"transfer-encoding")
        if coding is not None:
            if coding.lower() != b"chunked":
                raise _Malformed("its transfer-encoding is not 'chunked'")
            self.chunked = True
        self.lines = b"".join(b"%b: %b\r\n" % (name, lowered[name]) for name in PASSED_BACK if name in lowered)


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

    def ask(self, taker: Taker, head: bytes, body: bytes | bytearray = b"") -> None:
        """Send a request; `taker` gets what comes back."""
        self._taker = taker
        self._told = False
        self._headers.clear()  # of trailers
        self.answer = Answer()
        large = len(body) > SMALL_BODY_BYTES
        if large is not self._large:
            self._large = large
            self._set_ack_timeout(LARGE_BODY_ACK_S if large else self._ack_timeout_s)
        if large:
            self.transport.write(head)
            self.transport.write(body)
        else:
            self.transport.write(head + body)

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
        answer = self.answer
        if exc is None and self._told and answer.length is None and not answer.chunked and taker.whole():
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
            answer.status = status
            answer.read(self._headers)
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
