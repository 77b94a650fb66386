"""From a client's bytes to whole requests: framing, limits, and refusal of everything that could be read two ways.

httptools (llhttp, strict) finds the messages; this module adds what it lets pass. Invariant: a request comes out only
when its end is beyond doubt, so that no byte of one request can be taken for the beginning of another by anybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import httptools

from llmgw.gateway.endpoint import NOWHERE, Endpoint, resolve
from llmgw.gateway.wire import Rejected, Trouble

LOCAL_BODY_MAX_BYTES: Final = 64 * 2**10
"""Body of a request that no engine gets (a GET's, or one to nowhere): read and dropped up to here, refused beyond."""

PASSED_ON: Final = frozenset({b"x-request-id", b"traceparent", b"tracestate"})
"""The client's headers that an engine gets to see. All others are ours, written afresh."""

_WATCHED: Final = PASSED_ON | {b"content-length", b"transfer-encoding", b"host", b"expect"}


class Request:
    """One request. `endpoint` is a Trouble when nothing is there. `passed`: header lines for the engine, as sent.

    `stream`: the body asks for a stream (found out later, by who reads the body).
    """

    endpoint: Endpoint | Trouble = NOWHERE
    body: bytes | bytearray = b""
    passed = b""
    http10 = False
    keep_alive = True
    stream = False


def _bad(message: str, *, status: int = 400, code: str = "bad_request") -> Rejected:
    return Rejected(Trouble(status=status, code=code, message=message))


def _head_too_large(limit_bytes: int) -> Rejected:
    return _bad(
        f"the request's head is over {limit_bytes} bytes (header_max_bytes)", status=431, code="header_too_large"
    )


class RequestParser:
    """The reader of one connection: `feed` bytes, take `ready` requests in order. After `Rejected` it is of no use.

    `proceed` is called when a client waits for `100 Continue` and its head was found good.
    """

    def __init__(self, *, body_max_bytes: int, header_max_bytes: int, proceed: Callable[[], None]) -> None:
        self.ready: deque[Request] = deque()
        self.in_message = False
        """Whether a request has begun and is not whole yet."""
        self._body_max_bytes = body_max_bytes
        self._header_max_bytes = header_max_bytes
        self._proceed = proceed
        self._request = Request()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self.in_head = False
        """Whether the head of that request is still to end."""
        self._quiet_bytes = 0
        self._body_room_bytes = 0
        self._parser = httptools.HttpRequestParser(self)

    def close(self) -> None:
        """Let go of the parser, which holds on to this object."""
        del self._parser

    def feed(self, data: bytes) -> None:
        """Read on. Raises Rejected: answer what is `ready`, then the trouble, then close."""
        if not self.in_message:
            if data[0] in b"\r\n":
                raise _bad("a request begins with its method, not with an empty line")
            limit = self._header_max_bytes
            if len(data) > limit and data.find(b"\r\n\r\n", 0, limit) < 0:
                raise _head_too_large(limit)
            self._quiet_bytes = 0
        room = self._body_room_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, Rejected):
                raise error.__context__ from None
            raise
        except httptools.HttpParserUpgrade:
            self.ready.clear()  # it counts as whole for the parser
            raise _bad("this connection can't be upgraded") from None
        except httptools.HttpParserError as error:
            raise _bad(f"malformed request: {error}") from None
        if self.in_message:
            # Bytes that bring no body (a head, or trailers) are bounded: httptools keeps unfinished lines.
            self._quiet_bytes = self._quiet_bytes + len(data) if self._body_room_bytes == room else 0
            if self._quiet_bytes > self._header_max_bytes:
                raise _head_too_large(self._header_max_bytes)

    # --- called by httptools, in the order of the bytes ---

    def on_url(self, piece: bytes) -> None:
        self.in_message = self.in_head = True
        self._url += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _WATCHED:  # what comes in trailers is dropped with the message
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        request = self._request
        self.in_head = False
        version = parser.get_http_version()
        if version == "1.1":
            request.keep_alive = parser.should_keep_alive()
        elif version == "1.0":
            request.http10 = True
            request.keep_alive = False
        else:
            raise _bad(f"HTTP/{version} is not spoken here", status=505, code="http_version_not_supported")
        request.endpoint = resolve(parser.get_method(), self._url)
        self._judge_head(request)

    def on_body(self, piece: bytes) -> None:
        self._body_room_bytes -= len(piece)
        if self._body_room_bytes < 0:
            raise self._body_too_large(self._request.endpoint)
        request = self._request
        if not request.body:
            request.body = piece
            return
        if isinstance(request.body, bytes):
            request.body = bytearray(request.body)
        request.body += piece

    def on_message_complete(self) -> None:
        self.ready.append(self._request)
        self.in_message = False
        self._request = Request()
        self._url = b""
        self._headers.clear()

    # --- judging ---

    def _judge_head(self, request: Request) -> None:
        """Length, host and expectation. llhttp has refused two lengths, a length beside a coding, and odd digits."""
        length, hosts = 0, 0
        others = None
        for name, value in self._headers:
            if name == b"content-length":
                if not value.isdigit():  # white space behind it
                    raise _bad("content-length must be digits only")
                length = int(value)
            elif name == b"host":
                hosts += 1
            else:
                others = self._headers
        if hosts != 1 and not (hosts == 0 and request.http10):
            raise _bad(f"a request has one host header, not {hosts}")
        endpoint = request.endpoint
        self._body_room_bytes = self._body_max_bytes if endpoint.to_engine else LOCAL_BODY_MAX_BYTES
        chunked = expect = False
        if others is not None:
            chunked, expect = _judge_others(request, others)
        if length > self._body_room_bytes:
            raise self._body_too_large(endpoint)
        if isinstance(endpoint, Trouble) and (expect or chunked):
            raise Rejected(endpoint)  # not worth reading on
        if expect and (length or chunked):
            self._proceed()

    def _body_too_large(self, endpoint: Endpoint | Trouble) -> Rejected:
        limit = f"{self._body_max_bytes} bytes (body_max_bytes)"
        if not endpoint.to_engine:
            limit = f"{LOCAL_BODY_MAX_BYTES} bytes, which is all that is taken here"
        return _bad(f"the request's body is over {limit}", status=413, code="body_too_large")


def _judge_others(request: Request, headers: list[tuple[bytes, bytes]]) -> tuple[bool, bool]:
    """The rarer headers: whether the body is chunked, and whether the client waits to be told to send it."""
    chunked = expect = False
    for name, value in headers:
        if name == b"transfer-encoding":
            if value.lower() != b"chunked" or request.http10:
                raise _bad("transfer-encoding must be 'chunked', in HTTP/1.1")
            chunked = True
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise _bad("only 100-continue can be expected", status=417, code="expectation_failed")
            expect = not request.http10
        elif name in PASSED_ON:
            request.passed += b"%b: %b\r\n" % (name, value)
    return chunked, expect
