"""etcd's JSON gateway as typed records: what is sent and what comes back.

Nothing here does I/O. What is particular to the gateway stays here: int64 as JSON strings, zero values left out, bytes
as base64, and three shapes of error (3.4 and 3.5 unary, 3.4 and 3.5 in a stream, 3.6 and later).

Source of the shapes: measured on etcd 3.4.23 (2026-12-01); 3.5 and 3.6 from their sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from llmgw.store.port import (
    Compare,
    DeleteOp,
    Event,
    GetOp,
    KeyValue,
    Operation,
    PutOp,
    Target,
    TxnResult,
    range_end,
)

RANGE: Final = "/kv/range"
TXN: Final = "/kv/txn"
GRANT: Final = "/lease/grant"
REVOKE: Final = "/lease/revoke"
KEEPALIVE: Final = "/lease/keepalive"
AUTHENTICATE: Final = "/auth/authenticate"
STATUS: Final = "/maintenance/status"
WATCH: Final = "/watch"


# --- what comes back ------------------------------------------------------------------------------------------------


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Where the answering member stands. In a reply to a linearizable call only does it speak for the store."""

    revision: int = 0
    raft_term: int = 0


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key as etcd has it."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease: int = 0


class RangeReply(msgspec.Struct, frozen=True, kw_only=True):
    """To `RANGE`, and inside a transaction (where `header` is absent). `more`: the page ended before the range did."""

    header: Header = Header()
    kvs: tuple[StoredKey, ...] = ()
    more: bool = False


class _TxnPart(msgspec.Struct, frozen=True, kw_only=True):
    response_range: RangeReply | None = None


class TxnReply(msgspec.Struct, frozen=True, kw_only=True):
    """To `TXN`. `succeeded` is absent when the compares failed."""

    header: Header
    succeeded: bool = False
    responses: tuple[_TxnPart, ...] = ()


class GrantReply(msgspec.Struct, frozen=True, kw_only=True):
    """To `GRANT`. `ttl_s` is the granted one."""

    id: int = msgspec.field(name="ID")
    ttl_s: int = msgspec.field(name="TTL")


class _Renewed(msgspec.Struct, frozen=True, kw_only=True):
    ttl_s: int = msgspec.field(name="TTL", default=0)


class KeepaliveReply(msgspec.Struct, frozen=True, kw_only=True):
    """To `KEEPALIVE`, a stream of one. A lease that is gone has no TTL, and the HTTP status is 200 all the same."""

    result: _Renewed


class RevokeReply(msgspec.Struct, frozen=True, kw_only=True):
    """To `REVOKE`; that it came is all it says."""

    header: Header


class AuthenticateReply(msgspec.Struct, frozen=True, kw_only=True):
    """To `AUTHENTICATE`."""

    token: str


class StatusReply(msgspec.Struct, frozen=True, kw_only=True):
    """To `STATUS`. `leader` 0: the member knows none. `version` is the member's own."""

    version: str = ""
    leader: int = 0


class _WatchedEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "PUT"
    kv: StoredKey


class WatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One message about one watch: made, cancelled (perhaps both at once), events, or none of it: progress."""

    header: Header = Header()
    watch_id: int = 0
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[_WatchedEvent, ...] = ()


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Every shape of error in one: in a stream `error` is an object, in a unary reply of 3.4 and 3.5 a text."""

    error: str | ErrorReply | None = None
    message: str = ""
    code: int | None = None
    grpc_code: int | None = None


class WatchMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a watch stream."""

    result: WatchResult | None = None
    error: ErrorReply | None = None


class Lines:
    """Cuts a stream into lines. Etcd sends one message a line, but whoever lies between may cut it anywhere."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that are complete now, without empty ones."""
        if b"\n" not in chunk:
            self._parts.append(chunk)
            return []
        *lines, rest = b"".join((*self._parts, chunk)).split(b"\n")
        self._parts = [rest]
        return [line for line in lines if line]


RANGE_REPLY: Final = msgspec.json.Decoder(RangeReply, strict=False)
TXN_REPLY: Final = msgspec.json.Decoder(TxnReply, strict=False)
GRANT_REPLY: Final = msgspec.json.Decoder(GrantReply, strict=False)
REVOKE_REPLY: Final = msgspec.json.Decoder(RevokeReply, strict=False)
KEEPALIVE_REPLY: Final = msgspec.json.Decoder(KeepaliveReply, strict=False)
AUTHENTICATE_REPLY: Final = msgspec.json.Decoder(AuthenticateReply, strict=False)
STATUS_REPLY: Final = msgspec.json.Decoder(StatusReply, strict=False)
WATCH_MESSAGE: Final = msgspec.json.Decoder(WatchMessage, strict=False)
ERROR_REPLY: Final = msgspec.json.Decoder(ErrorReply, strict=False)


def key_text(raw: bytes) -> str:
    """A key as text. Ours are ASCII; a foreign one must not break a listing, so its other bytes are written in hex."""
    return raw.decode("ascii", "backslashreplace")


def key_value(stored: StoredKey) -> KeyValue:
    """As the port has it."""
    return KeyValue(
        key=key_text(stored.key),
        value=stored.value,
        create_revision=stored.create_revision,
        mod_revision=stored.mod_revision,
        version=stored.version,
        lease=stored.lease,
    )


def txn_result(reply: TxnReply) -> TxnResult:
    """As the port has it."""
    reads = tuple(
        tuple(key_value(stored) for stored in part.response_range.kvs)
        for part in reply.responses
        if part.response_range is not None
    )
    return TxnResult(ok=reply.succeeded, revision=reply.header.revision, reads=reads)


def events(result: WatchResult, *, from_revision: int) -> tuple[Event, ...]:
    """The events that were not seen before; some etcd releases deliver a revision twice."""
    return tuple(
        Event(
            key=key_text(event.kv.key),
            value=None if event.type == "DELETE" else event.kv.value,
            mod_revision=event.kv.mod_revision,
            create_revision=event.kv.create_revision,
            version=event.kv.version,
            lease=event.kv.lease,
        )
        for event in result.events
        if event.kv.mod_revision >= from_revision
    )


# --- what is sent ---------------------------------------------------------------------------------------------------


class _Range(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    key: bytes
    range_end: bytes | None = None
    limit: int = 0
    revision: int = 0


class _Put(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    key: bytes
    value: bytes
    lease: int = 0


class _Operation(msgspec.Struct, frozen=True, kw_only=True):
    request_range: _Range | UnsetType = UNSET
    request_put: _Put | UnsetType = UNSET
    request_delete_range: _Range | UnsetType = UNSET


class _Compare(msgspec.Struct, frozen=True, kw_only=True):
    key: bytes
    range_end: bytes | UnsetType = UNSET
    result: str
    target: str
    create_revision: int | UnsetType = UNSET
    mod_revision: int | UnsetType = UNSET
    version: int | UnsetType = UNSET
    lease: int | UnsetType = UNSET


class _Txn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    compare: tuple[_Compare, ...] = ()
    success: tuple[_Operation, ...] = ()
    failure: tuple[_Operation, ...] = ()


class _WatchCreate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    key: bytes
    range_end: bytes | None = None
    start_revision: int
    watch_id: int
    progress_notify: bool


class _WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    create_request: _WatchCreate


_encode: Final = msgspec.json.Encoder().encode

_NUMBER: Final[Mapping[Target, str]] = {
    Target.CREATE: "create_revision",
    Target.MOD: "mod_revision",
    Target.VERSION: "version",
    Target.LEASE: "lease",
}


def _bounds(key: str, *, prefix: bool) -> tuple[bytes, bytes | None]:
    """First key and range end as etcd wants them."""
    end = range_end(key, prefix=prefix)
    return key.encode("ascii"), None if end is None else end.encode("ascii")


def range_request(key: str, *, prefix: bool, limit: int = 0, revision: int = 0, after: bytes | None = None) -> bytes:
    """That one key, or everything below it; `after`: from the key behind this one on; `revision` 0: now."""
    first, end = _bounds(key, prefix=prefix)
    if after is not None:
        first = after + b"\0"
    return _encode(_Range(key=first, range_end=end, limit=limit, revision=revision))


def txn_request(compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation]) -> bytes:
    """A transaction."""
    return _encode(
        _Txn(
            compare=tuple(_compare(compare) for compare in compares),
            success=tuple(_operation(op) for op in ops),
            failure=tuple(_operation(op) for op in or_else),
        )
    )


def _compare(compare: Compare) -> _Compare:
    key, end = _bounds(compare.key, prefix=compare.prefix)
    return _Compare(
        key=key,
        range_end=UNSET if end is None else end,
        result=compare.op.value,
        target=compare.target.value,
        **{_NUMBER[compare.target]: compare.number},
    )


def _operation(op: Operation) -> _Operation:
    match op:
        case PutOp():
            return _Operation(request_put=_Put(key=op.key.encode("ascii"), value=op.value, lease=op.lease))
        case DeleteOp():
            key, end = _bounds(op.key, prefix=op.prefix)
            return _Operation(request_delete_range=_Range(key=key, range_end=end))
        case GetOp():
            key, end = _bounds(op.key, prefix=op.prefix)
            return _Operation(request_range=_Range(key=key, range_end=end))


def grant_request(ttl_s: int) -> bytes:
    """A lease; etcd chooses its id."""
    return _encode({"TTL": ttl_s})


def lease_request(lease: int) -> bytes:
    """To `KEEPALIVE` and `REVOKE`."""
    return _encode({"ID": lease})


def authenticate_request(user: str, password: str) -> bytes:
    """A login."""
    return _encode({"name": user, "password": password})


def watch_request(prefixes: Sequence[str], next_revisions: Sequence[int]) -> bytes:
    """One watch for each prefix, all in one body: over HTTP/1.1 none can be added later. Their ids count from 1."""
    requests = []
    for number, (prefix, revision) in enumerate(zip(prefixes, next_revisions, strict=True), start=1):
        key, end = _bounds(prefix, prefix=prefix.endswith("/"))
        create = _WatchCreate(key=key, range_end=end, start_revision=revision, watch_id=number, progress_notify=True)
        requests.append(_encode(_WatchRequest(create_request=create)))
    return b"".join(requests)
