"""What the gateway itself says in HTTP: status lines, OpenAI-style error objects, whole replies. Pure functions.

Invariant: every error a client sees, whether ours or put in an engine's place, is one JSON object of the form
`{"error": {"message", "type", "param", "code"}}`, so that the official clients turn it into their own exception.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec

JSON: Final = b"application/json"
TEXT: Final = b"text/plain; charset=utf-8"

STATUS_LINES: Final = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}

BODILESS: Final = frozenset({204, 304})
"""Statuses whose answers have no body, and so no framing of one."""

_CHUNK_HEADS: Final = tuple(b"%x\r\n" % size for size in range(4096))
"""The first line of a chunk, by its size: tokens are small, and there are many of them."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_ENCODER: Final = msgspec.json.Encoder()


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request gets no answer from an engine, as the client is told it.

    `retry_after_s` None: trying again would not help. `allow`: the methods a path has, for 405.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    allow: str | None = None
    to_engine: bool = False
    """Never: this stands where an `Endpoint` may stand."""

    @property
    def kind(self) -> str:
        """OpenAI's `type`: whose fault it is."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"

    def body(self) -> bytes:
        """The error object."""
        return _ENCODER.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    def headers(self) -> bytes:
        """The header lines that belong to it."""
        lines = b""
        if self.retry_after_s is not None:
            lines += b"retry-after: %d\r\n" % self.retry_after_s
        if self.allow is not None:
            lines += b"allow: %b\r\n" % self.allow.encode()
        return lines


class Rejected(Exception):
    """A request that must not go any further; the connection it came on can't be trusted or is not worth reading on."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble
        super().__init__(trouble.message)


def chunk(data: bytes) -> bytes:
    """`data`, which is not empty, as one chunk of a chunked body."""
    size = len(data)
    return (_CHUNK_HEADS[size] if size < len(_CHUNK_HEADS) else b"%x\r\n" % size) + data + b"\r\n"


def status_line(status: int) -> bytes:
    """The first line of a response; codes without a registered phrase get none."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def encode_json(value: Any) -> bytes:
    """Any builtin as JSON."""
    return _ENCODER.encode(value)


def reply(
    status: int,
    body: bytes,
    *,
    content_type: bytes = JSON,
    headers: bytes = b"",
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """A whole response. `head_only`: to HEAD, so the length is told and the body left out."""
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
        status_line(status),
        content_type,
        len(body),
        headers,
        b"connection: close\r\n" if close else b"",
        b"" if head_only else body,
    )


def error_event(trouble: Trouble, *, after: bytes) -> bytes:
    """The one event that ends an SSE stream which can't be finished. `after`: what was sent last, maybe half of one."""
    if not after.endswith((b"\n\n", b"\r\n\r\n")):
        end = b"\n" if after.endswith(b"\n") else b"\n\n"
        return end + error_event(trouble, after=b"\n\n")
    return b"data: %b\n\n" % trouble.body()
