"""What a refusal of etcd means, and what follows from it.

Invariant: a refusal whose meaning is not known for certain is `UNCLEAR`, so that nobody takes a write for undone that
was done.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

from llmgw.store.etcd_wire import ERROR_REPLY, ErrorReply, WatchResult

REASON_CHARS_MAX: Final = 200
"""How much of a foreign server's words goes into our messages."""


class Verdict(enum.Enum):
    """What may be assumed after a refusal, and what helps."""

    LOGIN = "log in again"
    AUTH_OFF = "authentication is not enabled"
    DENIED = "a person must change something"
    LEASE_GONE = "the lease is gone"
    COMPACTED = "the revision is compacted"
    TOO_LARGE = "it never fits"
    ELSEWHERE = "not done; another member may do it"
    NOWHERE = "not done, and no member will"
    UNCLEAR = "it may have been done"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no good answer, in words for people, and what follows from it."""

    verdict: Verdict
    why: str


_BY_TEXT: Final[tuple[tuple[str, Verdict], ...]] = (
    ("invalid auth token", Verdict.LOGIN),
    ("user name is empty", Verdict.LOGIN),
    ("revision of auth store is old", Verdict.LOGIN),
    ("authentication is not enabled", Verdict.AUTH_OFF),
    ("authentication failed", Verdict.DENIED),
    ("user name not found", Verdict.DENIED),
    ("permission denied", Verdict.DENIED),
    ("CommonName of client", Verdict.DENIED),
    ("requested lease not found", Verdict.LEASE_GONE),
    ("has been compacted", Verdict.COMPACTED),
    ("request is too large", Verdict.TOO_LARGE),
    ("larger than max", Verdict.TOO_LARGE),
    ("too many operations", Verdict.TOO_LARGE),
    ("no leader", Verdict.ELSEWHERE),
    ("raft proposal dropped", Verdict.ELSEWHERE),
    ("too many requests", Verdict.ELSEWHERE),
    ("not supported for learner", Verdict.ELSEWHERE),
    ("HTTP request to an HTTPS server", Verdict.ELSEWHERE),
    ("database space exceeded", Verdict.NOWHERE),
)
"""Texts win over codes: 3 is a lost login, a large request and a typing error alike. Source: api/v3rpc/rpctypes."""

_BY_CODE: Final[Mapping[int, Verdict]] = {
    3: Verdict.NOWHERE,  # invalid argument
    7: Verdict.DENIED,
    11: Verdict.NOWHERE,  # out of range: a revision in the future
    16: Verdict.LOGIN,
}


def judge(status: int, body: bytes) -> Failure:
    """What a reply other than a good one means. `status` 0: it came inside a stream."""
    try:
        error = ERROR_REPLY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _judge_text(status, body.decode("utf-8", "replace").strip())
    return judge_error(error)


def judge_error(error: ErrorReply) -> Failure:
    """What an error object means, whichever shape it has."""
    inner = error.error if isinstance(error.error, ErrorReply) else error
    text = inner.message or (error.error if isinstance(error.error, str) else "")
    code = inner.code if inner.grpc_code is None else inner.grpc_code
    verdict = _verdict(text)
    if verdict is None:
        verdict = _BY_CODE.get(code or 0, Verdict.UNCLEAR)
    return Failure(verdict=verdict, why=_words(text) or f"error code {code}")


def judge_canceled(result: WatchResult) -> Failure:
    """What the cancelling of a watch means. Its reason is text only: `rpc error: code = PermissionDenied desc = …`."""
    if result.compact_revision:
        return Failure(verdict=Verdict.COMPACTED, why="the watched revision is compacted")
    verdict = _verdict(result.cancel_reason) or Verdict.ELSEWHERE
    return Failure(verdict=verdict, why=_words(result.cancel_reason) or "the watch was cancelled without a reason")


def _judge_text(status: int, text: str) -> Failure:
    """A reply that is no JSON: from before etcd's gateway, or from something that is no etcd."""
    if status == 404:
        why = "it has no JSON gateway: it runs with --enable-grpc-gateway=false, or it is no etcd"
        return Failure(verdict=Verdict.ELSEWHERE, why=why)
    verdict = _verdict(text)
    if verdict is Verdict.DENIED and "CommonName" in text:
        return Failure(verdict=verdict, why="the client certificate has a CN, which etcd's JSON gateway refuses")
    return Failure(verdict=verdict or Verdict.UNCLEAR, why=f"HTTP {status}: {_words(text) or 'an empty reply'}")


def _verdict(text: str) -> Verdict | None:
    return next((verdict for part, verdict in _BY_TEXT if part in text), None)


def _words(text: str) -> str:
    """The first line of a foreign text, without etcd's own name in front."""
    line = text.removeprefix("etcdserver: ").split("\n", 1)[0]
    return line[:REASON_CHARS_MAX]
