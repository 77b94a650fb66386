"""The store as the rest of llmgw sees it. This docstring is the contract that the conformance suite tests.

Keys are ASCII text, values are bytes. A prefix ends with `/`, always: without it `gpu-1` would also be `gpu-10`.
Every call is linearizable. Revisions are the store's own: one more for each transaction that writes, none for one that
does not; order holds within one prefix of a watch, not between prefixes.

Errors, by what the caller may assume (`llmgw.errors`): `NotApplied` nothing happened; `OutcomeUnknown` a write may have
happened or may still happen; `Unavailable` a read got no answer in time; `LeaseLost`; `Compacted`; `Denied`; `TooLarge`
(judged before anything is sent). Reads are retried elsewhere inside a call, writes only after `NotApplied`.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import msgspec

TXN_COMPARES_MAX: Final = 128
TXN_OPS_MAX: Final = 128
"""Most compares, and most operations, in one transaction. Source: etcd's --max-txn-ops default, measured on 3.4.23."""

REQUEST_BYTES_MAX: Final = 1_500_000
"""Largest request in all, bytes. Source: etcd's --max-request-bytes is 1.5 MiB by default; less, to leave room."""


class KeyValue(msgspec.Struct, frozen=True, kw_only=True):
    """One key as stored. `version` 1 at creation; `lease` 0 for none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


class Target(enum.Enum):
    """Which number of a key is compared. An absent key has all of them 0."""

    CREATE = "CREATE"
    MOD = "MOD"
    VERSION = "VERSION"
    LEASE = "LEASE"


class Op(enum.Enum):
    """How it is compared."""

    EQUAL = "EQUAL"
    GREATER = "GREATER"
    LESS = "LESS"
    NOT_EQUAL = "NOT_EQUAL"


class Compare(msgspec.Struct, frozen=True, kw_only=True):
    """One condition of a transaction. `prefix`: it must hold for every key below `key` (which then ends with `/`)."""

    key: str
    target: Target
    op: Op = Op.EQUAL
    number: int
    prefix: bool = False


def absent(key: str) -> Compare:
    """Nothing is stored at `key`."""
    return Compare(key=key, target=Target.CREATE, number=0)


def created_at(key: str, revision: int) -> Compare:
    """`key` is the one created at `revision`, whatever was written to it since."""
    return Compare(key=key, target=Target.CREATE, number=revision)


def unchanged(key: str, mod_revision: int) -> Compare:
    """`key` was last written at `mod_revision`; 0: it is absent."""
    return Compare(key=key, target=Target.MOD, number=mod_revision)


class PutOp(msgspec.Struct, frozen=True, kw_only=True):
    """Write a key. `lease` 0 detaches it from any lease."""

    key: str
    value: bytes
    lease: int = 0


class DeleteOp(msgspec.Struct, frozen=True, kw_only=True):
    """Remove a key, or with `prefix` every key below it; nothing there is fine."""

    key: str
    prefix: bool = False


class GetOp(msgspec.Struct, frozen=True, kw_only=True):
    """Read a key, or with `prefix` every key below it, inside a transaction; sees the puts before it."""

    key: str
    prefix: bool = False


Operation = PutOp | DeleteOp | GetOp


class TxnResult(msgspec.Struct, frozen=True, kw_only=True):
    """`ok`: the compares held and `ops` ran; otherwise `or_else` did. `reads`: one tuple per `GetOp`, in order."""

    ok: bool
    revision: int
    reads: tuple[tuple[KeyValue, ...], ...] = ()


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Everything below some prefixes at one revision, sorted by key."""

    items: tuple[KeyValue, ...]
    revision: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A granted lease. `ttl_s` is what the store granted, which may be more than was asked for."""

    id: int
    ttl_s: int


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One change. A deletion has `value` None and knows only key and `mod_revision`."""

    key: str
    value: bytes | None
    mod_revision: int
    create_revision: int = 0
    version: int = 0
    lease: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Events of whole revisions, in order; a revision is never split within one prefix.

    `events` may be empty: the store said that everything up to `revision` has been delivered.
    """

    revision: int
    events: tuple[Event, ...] = ()


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """From `follow`: forget what you had, this is everything at one revision.

    `cause`: `start`, `relist`, `compacted`, `went_back` or `overflow`.
    """

    items: tuple[KeyValue, ...]
    revision: int
    cause: str


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a store tells of itself; run modules hand it to the metrics. Counters since start; ages in seconds.

    `watch_progress_age_s` None: nothing is watched.
    """

    endpoint: str
    calls: int
    errors: int
    rotations: int
    logins: int
    resyncs: int
    watch_restarts: int
    watch_progress_age_s: float | None


class Store(Protocol):
    """The port. Two implementations: `EtcdStore` and `MemoryStore`."""

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None. Raises: Unavailable, Denied."""
        ...

    async def list(self, prefixes: Sequence[str]) -> Listing:
        """All keys below `prefixes`, paged, all at one revision. A prefix without a closing `/` names that one key.

        Raises: Unavailable, Denied, Compacted (history moved on between two pages: start again).
        """
        ...

    async def txn(
        self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
    ) -> TxnResult:
        """Run `ops` if every compare holds, else `or_else`; all of it or nothing.

        Raises: NotApplied, OutcomeUnknown (only if there is something to write), Unavailable (nothing to write),
            LeaseLost (a put names a lease that is gone), TooLarge, Denied; ValueError for a key written twice.
        """
        ...

    async def grant(self, ttl_s: int) -> Lease:
        """A new lease. Raises: NotApplied, OutcomeUnknown (the stray lease then lapses by itself), Denied."""
        ...

    async def keepalive(self, lease: int) -> int:
        """Renew; returns the TTL in seconds that it has again. Raises: LeaseLost, Unavailable, Denied."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys in one revision; unknown is fine. Raises: Unavailable, Denied."""
        ...

    def watch(
        self, prefixes: Sequence[str], *, from_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        """Every change below `prefixes` from `from_revision` on, each at most once and in order per prefix.

        It survives the death, freezing or refusal of members by itself, resuming where it was; silence longer than a
        stated bound counts as death. Iteration raises Compacted, WentBack (start over with a list) or Denied, never
        ends by itself. A prefix without a closing `/` watches that one key.
        """
        ...

    def stats(self) -> StoreStats:
        """The figures as of now."""
        ...


def range_end(key: str, *, prefix: bool) -> str | None:
    """The first key after everything below `key`, None for a single key. Raises ValueError for a prefix without `/`."""
    if not prefix:
        return None
    if not key.endswith("/"):
        raise ValueError(f"prefix {key!r} does not end with '/'")
    return key[:-1] + "0"  # '0' is the character after '/'
