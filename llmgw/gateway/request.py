"""From a client's bytes to whole requests: framing, limits, and refusal of everything that could be read two ways.

httptools (llhttp, strict) finds the messages; this module adds what it lets pass. Invariant: a request comes out only
when its end is beyond doubt, so that no byte of one request can be taken for the beginning of another by anybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import httptools

from llmgw.gateway.endpoint import ENGINE, NOWHERE, Endpoint, resolve
from llmgw.gateway.wire import Rejected, Trouble

LOCAL_BODY_MAX_BYTES: Final = 64 * 2**10
"""Body of a request that no engine gets (a GET's, or one to nowhere): read and dropped up to here, refused beyond."""

PASSED_ON: Final = frozenset({b"x-request-id", b"traceparent", b"tracestate"})
"""The client's headers that an engine gets to see. All others are ours, written afresh."""

_WATCHED: Final = PASSED_ON | {b"content-length", b"transfer-encoding", b"host", b"expect"}

_CR: Final = 13
"""CR and LF, and nothing that a method may begin with, are not above it."""

_LENGTH_DIGITS_MAX: Final = 20
"""Of a 64-bit number."""

_USUAL: Final = frozenset({b"content-length", b"host"})
"""Of the watched headers, nearly every request to an engine has these and no others."""


class Request:
    """One request. `endpoint` is a Trouble when nothing is there. `passed`: header lines for the engine, as sent.

    `stream`: the body asks for a stream (found out later, by who reads the body).
    """

    __slots__ = ("body", "endpoint", "http10", "keep_alive", "passed", "stream")

    def __init__(self) -> None:
        self.endpoint: Endpoint | Trouble = NOWHERE
        self.body: bytes | bytearray = b""
        self.passed = b""
        self.http10 = False
        self.keep_alive = True
        self.stream = False


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
        self.in_head = False
        """Whether the head of that request is still to end."""
        self._body_max_bytes = body_max_bytes
        self._header_max_bytes = header_max_bytes
        self._proceed = proceed
        self._request = Request()
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._quiet_bytes = 0
        self._room_bytes = 0
        self._parser = httptools.HttpRequestParser(self)

    def close(self) -> None:
        """Let go of what holds on to this object, or is held on to by it in a circle."""
        del self._parser, self._proceed

    def feed(self, data: bytes) -> None:
        """Read on. Raises Rejected: answer what is `ready`, then the trouble, then close."""
        room_bytes = self._room_bytes
        if not self.in_message:
            if data[0] <= _CR:
                raise _bad("a request begins with its method, not with an empty line")
            if len(data) > self._header_max_bytes and data.find(b"\r\n\r\n", 0, self._header_max_bytes) < 0:
                raise _head_too_large(self._header_max_bytes)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, Rejected):
                raise error.__context__ from None
            raise
        except httptools.HttpParserUpgrade:
            self.ready.pop()  # it counts as whole for the parser
            raise _bad("this connection can't be upgraded") from None
        except httptools.HttpParserError as error:
            raise _bad(f"malformed request: {error}") from None
        if self.in_message:
            # Bytes that bring no body (a head, or trailers) are bounded: httptools keeps unfinished lines.
            self._quiet_bytes = self._quiet_bytes + len(data) if self._room_bytes == room_bytes else 0
            if self._quiet_bytes > self._header_max_bytes:
                raise _head_too_large(self._header_max_bytes)

    # --- called by httptools, in the order of the bytes ---

    def on_url(self, piece: bytes) -> None:
        if self.in_message:
            self._url += piece
            return
        self.in_message = self.in_head = True
        self._url = piece
        self._request = Request()
        self._headers = {}
        self._quiet_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _WATCHED and self.in_head:
            if name in self._headers:
                raise _bad(f"{name.decode()} stands there twice")
            self._headers[name] = value

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
        method = parser.get_method()
        endpoint = (method == b"POST" and ENGINE.get(self._url)) or resolve(method, self._url)
        request.endpoint = endpoint
        self._room_bytes = self._body_max_bytes if endpoint.to_engine else LOCAL_BODY_MAX_BYTES
        headers = self._headers
        if b"host" not in headers and not request.http10:
            raise _bad("a request has a host header")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX:  # llhttp lets white space behind it and zeros pass
            raise _bad("content-length must be a plain number")
        if int(length) > self._room_bytes:
            raise self._body_too_large(endpoint)
        if headers.keys() != _USUAL:
            self._judge_unusual(request, headers)

    def on_body(self, piece: bytes) -> None:
        self._room_bytes -= len(piece)
        request = self._request
        if self._room_bytes < 0:
            raise self._body_too_large(request.endpoint)
        if not request.body:
            request.body = piece
            return
        if isinstance(request.body, bytes):
            request.body = bytearray(request.body)
        request.body += piece

    def on_message_complete(self) -> None:
        self.ready.append(self._request)
        self.in_message = False

    # --- judging ---

    def _judge_unusual(self, request: Request, headers: dict[bytes, bytes]) -> None:
        """The rarer headers. llhttp has refused a length beside a coding, and codings that do not end in chunked."""
        coding = headers.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or request.http10):
            raise _bad("transfer-encoding must be 'chunked', in HTTP/1.1")
        expect = headers.get(b"expect")
        if expect is not None and expect.lower() != b"100-continue":
            raise _bad("only 100-continue can be expected", status=417, code="expectation_failed")
        if isinstance(request.endpoint, Trouble) and (expect is not None or coding is not None):
            raise Rejected(request.endpoint)  # not worth reading on
        for name in PASSED_ON & headers.keys():
            request.passed += b"%b: %b\r\n" % (name, headers[name])
        if expect is not None and not request.http10:
            self._proceed()

    def _body_too_large(self, endpoint: Endpoint | Trouble) -> Rejected:
        if isinstance(endpoint, Trouble):
            return Rejected(endpoint)
        limit = f"{self._body_max_bytes} bytes (body_max_bytes)"
        if not endpoint.to_engine:
            limit = f"{LOCAL_BODY_MAX_BYTES} bytes, which is all that is taken here"
        return _bad(f"the request's body is over {limit}", status=413, code="body_too_large")
