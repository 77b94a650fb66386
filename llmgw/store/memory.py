"""A store in memory with etcd's semantics, for tests and simulation: pure async, no thread, no task of its own.

A `MemoryStore` is one client's handle on a `MemoryCluster`, which is the data. Faults that hit one client alone are
`llmgw.testing.faults`; here the store either works or, as a whole, does not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, TypeVar

import anyio
import anyio.lowlevel

from llmgw.errors import NotApplied, StoreError, Unavailable, WentBack
from llmgw.store.limits import check_key, check_txn, writes
from llmgw.store.memory_cluster import MemoryCluster
from llmgw.store.port import Batch, Compare, KeyValue, Lease, Listing, Operation, StoreStats, TxnResult

__all__ = ["MemoryCluster", "MemoryStore"]

PROGRESS_S: Final = 2.0
"""A watch without events says how far it is this often. Source: the progress interval that deploy/etcd sets."""

ALL_DEPTH: Final = 2
"""A prefix of no more slashes than this (`/llmgw/`) is all there is."""

T = TypeVar("T")


class MemoryStore:
    """One client of a `MemoryCluster`. Implements `llmgw.store.port.Store`.

    `waits` False: whoever wraps it lets the others have their turn before each call, and reads its watches at once,
    always.
    """

    def __init__(self, cluster: MemoryCluster, *, progress_s: float = PROGRESS_S, waits: bool = True) -> None:
        self.cluster = cluster
        self.progress_s = progress_s
        self._waits = waits
        self._calls = 0
        self._errors = 0
        self._watches: dict[_Watch, None] = {}

    async def get(self, key: str) -> KeyValue | None:
        check_key(key)
        found = await self._call(lambda: self.cluster.find(key, prefix=False), Unavailable)
        return found[0] if found else None

    async def list(self, prefixes: Sequence[str]) -> Listing:
        for prefix in prefixes:
            check_key(prefix)

        def read() -> Listing:
            found = {
                item.key: item for prefix in prefixes for item in self.cluster.find(prefix, prefix=prefix.endswith("/"))
            }
            return Listing(items=tuple(found[key] for key in sorted(found)), revision=self.cluster.revision)

        return await self._call(read, Unavailable)

    async def txn(
        self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
    ) -> TxnResult:
        check_txn(compares, ops, or_else)
        down = NotApplied if writes((*ops, *or_else)) else Unavailable
        return await self._call(lambda: self.cluster.commit(compares, ops, or_else), down)

    async def grant(self, ttl_s: int) -> Lease:
        return await self._call(lambda: self.cluster.grant(ttl_s), NotApplied)

    async def keepalive(self, lease: int) -> int:
        return await self._call(lambda: self.cluster.keepalive(lease), Unavailable)

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self.cluster.revoke(lease), Unavailable)

    def watch(
        self, prefixes: Sequence[str], *, from_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        for prefix in prefixes:
            check_key(prefix)
        return _Watch(
            self.cluster,
            prefixes,
            from_revision,
            progress_s=self.progress_s,
            among=self._watches,
            waited_on=not self._waits,
        )

    def stats(self) -> StoreStats:
        now = anyio.current_time()
        return StoreStats(
            endpoint="memory",
            calls=self._calls,
            errors=self._errors,
            rotations=0,
            logins=0,
            resyncs=0,
            watch_restarts=0,
            watch_progress_age_s=max((now - watch.heard_s for watch in self._watches), default=None),
        )

    async def _call(self, act: Callable[[], T], down: type[Unavailable]) -> T:
        """The way to the store: others get their turn first, and a cancelled call has done nothing.

        `down`: what a stopped store answers.
        """
        if self._waits:
            await anyio.lowlevel.checkpoint()
        self._calls += 1
        try:
            if not self.cluster.running:
                raise down("the store is stopped")
            return act()
        except StoreError:
            self._errors += 1
            raise


class _Watch:
    """One watch: a place in the cluster's history, one batch for each revision that concerns it.

    `due` are the revisions to look through; one that does not concern a watch that is up to date never comes into it,
    so that an idle watch never falls behind a compaction.
    """

    def __init__(
        self,
        cluster: MemoryCluster,
        prefixes: Sequence[str],
        from_revision: int,
        *,
        progress_s: float,
        among: dict[_Watch, None],
        waited_on: bool,
    ) -> None:
        self._cluster = cluster
        self._prefixes = tuple(prefixes)
        self._below = tuple(prefix for prefix in prefixes if prefix.endswith("/"))
        self._exact = frozenset(prefix for prefix in prefixes if not prefix.endswith("/"))
        self._from_revision = max(from_revision, 2)  # an empty store stands at 1
        self._due: deque[int] = deque()
        self._progress_s = progress_s
        self._among, self._waited_on = among, waited_on
        self._term = 0
        self._went_back: WentBack | None = None
        self._wake = anyio.Event()
        self.heard_s = 0.0

    async def __aenter__(self) -> AsyncIterator[Batch]:
        await anyio.lowlevel.checkpoint()
        self.heard_s = anyio.current_time()
        self._among[self] = None
        self.restored(before=0, revision=self._cluster.revision)
        self._cluster.attach(self, self._prefixes)
        if self._waited_on and any(prefix.count("/") <= ALL_DEPTH for prefix in self._below):
            self._cluster.lookouts.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._among[self]
        self._cluster.detach(self)

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        if self._due:
            await anyio.lowlevel.checkpoint()  # one that finds something at once still lets the others have their turn
        while True:
            batch = self._take() if self._cluster.running else None
            if batch is not None:
                self.heard_s = anyio.current_time()
                return batch
            self._wake = anyio.Event()
            progress_s = self.heard_s + self._progress_s if self._cluster.running else math.inf
            with anyio.CancelScope(deadline=min(progress_s, self._lapse_s())):
                await self._wake.wait()

    def _lapse_s(self) -> float:
        """When it must look whether something has lapsed; never while somebody else does so for it."""
        lookouts = self._cluster.lookouts
        if self._waited_on and lookouts and self not in lookouts:
            return math.inf
        return self._cluster.lapse_s(self)

    def happened(self, batch: Batch) -> None:
        if batch.revision >= self._from_revision:
            self._due.append(batch.revision)
            self._wake.set()

    def restored(self, *, before: int, revision: int) -> None:
        at = self._due[0] if self._due else max(self._from_revision, before + 1)
        if at > revision + 1:
            self._went_back = WentBack(seen=at - 1, got=revision)
        elif self._cluster.term < self._term:
            self._went_back = WentBack(seen=self._term, got=self._cluster.term, what="raft term")
        self._from_revision, self._due = at, deque(range(at, revision + 1))

    def wake(self) -> None:
        self._wake.set()

    def _concerns(self, key: str) -> bool:
        return key.startswith(self._below) or key in self._exact

    def _take(self) -> Batch | None:
        """The next batch of events; word of progress when one is due; else None. Raises Compacted, WentBack."""
        revision = self._cluster.revision
        self._term = self._cluster.term
        if self._went_back is not None:
            raise self._went_back
        while self._due:
            batch = self._cluster.written(self._due[0])
            self._due.popleft()
            events = tuple(event for event in batch.events if self._concerns(event.key))
            if events:
                return Batch(revision=batch.revision, events=events)
        if anyio.current_time() >= self.heard_s + self._progress_s:
            return Batch(revision=revision)
        return None
