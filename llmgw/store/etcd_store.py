"""The port, spoken to etcd: which call each of its methods is, and what a refusal of that call means.

Threads, members, logins and time-outs lie below, in `etcd_call`; the watch in `etcd_watch`. Every answer that carries a
raft term is remembered, so that a watch knows a member that was left behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Final

import anyio
import anyio.lowlevel

from llmgw.errors import Compacted, LeaseLost, TooLarge
from llmgw.store import etcd_wire as wire
from llmgw.store.etcd_call import Caller, Lane, Rejected
from llmgw.store.etcd_verdict import Verdict
from llmgw.store.etcd_watch import Ledger, Watch
from llmgw.store.limits import check_key, check_txn, writes
from llmgw.store.port import (
    REQUEST_BYTES_MAX,
    Batch,
    Compare,
    KeyValue,
    Lease,
    Listing,
    Operation,
    PutOp,
    StoreStats,
    TxnResult,
)

PAGE_KEYS: Final = 1000
"""Keys in one page of a listing. Source: 10,000 keys of 1 KiB took no longer so than in one piece (measured)."""


class EtcdStore:
    """Implements `llmgw.store.port.Store`. Made by `llmgw.store.etcd.open_etcd`."""

    def __init__(self, caller: Caller, *, silence_s: float) -> None:
        self._caller = caller
        self._silence_s = silence_s
        self._ledger = Ledger()

    async def get(self, key: str) -> KeyValue | None:
        check_key(key)
        reply = await self._range(wire.range_request(key, prefix=False))
        return wire.key_value(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefixes: Sequence[str]) -> Listing:
        return await self.list_at(prefixes, revision=0)

    async def list_at(self, prefixes: Sequence[str], *, revision: int) -> Listing:
        """`list` as of an earlier revision (0: now), for people who look back; not part of the port.

        Raises: Compacted (history no longer reaches so far), Unavailable (also for a revision in the future), Denied.
        """
        for prefix in prefixes:
            check_key(prefix)
        found: dict[str, KeyValue] = {}
        for prefix in prefixes:
            more, after = True, None
            while more:
                reply = await self._range(
                    wire.range_request(
                        prefix, prefix=prefix.endswith("/"), limit=PAGE_KEYS, revision=revision, after=after
                    )
                )
                items = [wire.key_value(stored) for stored in reply.kvs]
                found.update((item.key, item) for item in items)
                revision = revision or reply.header.revision
                more, after = reply.more, reply.kvs[-1].key if reply.kvs else None
                await anyio.lowlevel.checkpoint()
        return Listing(items=tuple(found[key] for key in sorted(found)), revision=revision)

    async def txn(
        self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
    ) -> TxnResult:
        check_txn(compares, ops, or_else)
        body = wire.txn_request(compares, ops, or_else)
        leases = [op.lease for op in (*ops, *or_else) if isinstance(op, PutOp) and op.lease]
        with _refusals(lease=leases[0] if leases else 0, size=len(body)):
            reply = await self._caller.call(wire.TXN, body, wire.TXN_REPLY, again=not writes((*ops, *or_else)))
        self._caller.raft_term = max(self._caller.raft_term, reply.header.raft_term)
        return wire.txn_result(reply)

    async def grant(self, ttl_s: int) -> Lease:
        with _refusals():
            reply = await self._caller.call(wire.GRANT, wire.grant_request(ttl_s), wire.GRANT_REPLY, again=False)
        return Lease(id=reply.id, ttl_s=reply.ttl_s)

    async def keepalive(self, lease: int) -> int:
        with _refusals(lease=lease):
            reply = await self._caller.call(
                wire.KEEPALIVE, wire.lease_request(lease), wire.KEEPALIVE_REPLY, again=True, lane=Lane.KEEPALIVE
            )
        if reply.result.ttl_s <= 0:
            raise LeaseLost(lease)
        return reply.result.ttl_s

    async def revoke(self, lease: int) -> None:
        try:
            with _refusals(lease=lease):
                await self._caller.call(wire.REVOKE, wire.lease_request(lease), wire.REVOKE_REPLY, again=True)
        except LeaseLost:
            return  # as wished

    def watch(
        self, prefixes: Sequence[str], *, from_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        for prefix in prefixes:
            check_key(prefix)
        return Watch(self._caller, prefixes, from_revision, silence_s=self._silence_s, ledger=self._ledger)

    def stats(self) -> StoreStats:
        caller, now_s = self._caller, anyio.current_time()
        return StoreStats(
            endpoint=caller.members.current,
            calls=caller.calls,
            errors=caller.errors,
            rotations=caller.members.rotations,
            logins=caller.logins,
            resyncs=self._ledger.resyncs,
            watch_restarts=self._ledger.restarts,
            watch_progress_age_s=max((now_s - watch.heard_s for watch in self._ledger.open), default=None),
        )

    async def _range(self, body: bytes) -> wire.RangeReply:
        with _refusals():
            reply = await self._caller.call(wire.RANGE, body, wire.RANGE_REPLY, again=True)
        self._caller.raft_term = max(self._caller.raft_term, reply.header.raft_term)
        return reply


@contextmanager
def _refusals(*, lease: int = 0, size: int = 0) -> Iterator[None]:
    """Etcd's refusals as the port's errors. Where several leases are named, etcd does not say which one is gone."""
    try:
        yield
    except Rejected as error:
        match error.failure.verdict:
            case Verdict.LEASE_GONE:
                raise LeaseLost(lease) from error
            case Verdict.COMPACTED:
                raise Compacted(0) from error
            case _:
                what = f"etcd's --max-request-bytes is below what llmgw needs ({error}): request"
                raise TooLarge(what=what, size=size, limit=REQUEST_BYTES_MAX, unit="bytes") from error
