"""One client's store seen through a bad network: every fault the port allows, switched or scripted by a test.

`FaultyStore` wraps a `MemoryStore` and keeps the port's contract: it only does what a real store, a real network and
real clocks may do to one client. What befalls the store as a whole (outage, restore, compaction, an election of etcd's
that renews every lease) is `MemoryCluster`'s. Nothing here draws lots: whoever wants chance hands in a seeded source.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup

from llmgw.errors import NotApplied, OutcomeUnknown, StoreError, Unavailable
from llmgw.store.follow import ungrouped
from llmgw.store.limits import check_txn, writes
from llmgw.store.port import Batch, Compare, KeyValue, Lease, Listing, Operation, Store, StoreStats, TxnResult
from llmgw.testing.virtual import pause

CALL_TIMEOUT_S: Final = 3.0
"""How long a call without an answer takes. Source: EtcdConfig's connect and read time-outs."""

T = TypeVar("T")


class Link(enum.Enum):
    """How a client reaches the store. `REFUSED`: fails at once, nothing was sent. `SILENT`: calls time out.

    `FROZEN`: as if the process were stopped (SIGSTOP): calls wait until it goes on, and a transaction that was about to
    be sent is sent then, even if nobody waits for it any more. While it is not up its watches hear nothing; afterwards
    they resume where they were, as the port says.
    """

    UP = "up"
    REFUSED = "refused"
    SILENT = "silent"
    FROZEN = "frozen"


class Fate(enum.Enum):
    """What becomes of one transaction that writes.

    `REFUSED`: certainly not applied. `LOST`: never arrives. `ANSWER_LOST`: applied, but the caller can't know. `LATE`:
    lands long after the caller gave up.
    """

    REFUSED = "refused"
    LOST = "lost"
    ANSWER_LOST = "answer_lost"
    LATE = "late"


class TxnFault(msgspec.Struct, frozen=True, kw_only=True):
    """A `Fate` for a transaction; `delay_s`: when a late one lands, counted from when it was sent."""

    fate: Fate
    delay_s: float = 10.0


Operations = Sequence[Operation]
Judge = Callable[[Operations], TxnFault | None]
"""Decides what goes wrong with a transaction, given what it would write; None for nothing."""


def once(fault: TxnFault, *, where: Callable[[Operations], bool] = lambda _: True) -> Judge:
    """Strikes the first transaction for which `where` holds, and no other."""
    left = [fault]
    return lambda ops: left.pop() if left and where(ops) else None


class FaultyStore:
    """A `Store` with faults. As made it has none; `latency` in seconds is drawn for each way, 0 if None.

    `tasks` run what outlives the call that sent it. `timeout_s`: after which an unanswered call gives up.
    """

    def __init__(
        self,
        store: Store,
        tasks: TaskGroup,
        *,
        latency: Callable[[], float] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._latency = latency
        self._timeout_s = timeout_s
        self._link = Link.UP
        self._changed = anyio.Event()
        self._watches: dict[_Stream, None] = {}
        self.judges: deque[Judge] = deque()
        """Asked in turn about each transaction that writes; the first that finds a fault decides."""
        self.keepalives_fail = False
        self.watch_lag_s = 0.0
        """Everything a watch hears comes this much later (a slow follower)."""
        self.watches_lose = False
        """Events are dropped and nobody says so, as some etcd releases do."""
        self.watches_repeat = False
        """Every batch comes twice."""

    # --- switches ---

    @property
    def link(self) -> Link:
        """How the store is reached now."""
        return self._link

    @link.setter
    def link(self, link: Link) -> None:
        if link is self._link:
            return
        self._link = link
        for stream in self._watches:
            stream.cut()
        self._move()

    def break_watches(self, error: StoreError) -> None:
        """Every watch raises `error` (Compacted or WentBack) next."""
        for stream in self._watches:
            stream.fail(error)

    def heal(self) -> None:
        """No faults from now on."""
        self.judges.clear()
        self.keepalives_fail = self.watches_lose = self.watches_repeat = False
        self.watch_lag_s = 0.0
        self.link = Link.UP

    def _move(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # --- the port ---

    async def get(self, key: str) -> KeyValue | None:
        return await self._read(lambda: self._store.get(key))

    async def list(self, prefixes: Sequence[str]) -> Listing:
        return await self._read(lambda: self._store.list(prefixes))

    async def txn(
        self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
    ) -> TxnResult:
        check_txn(compares, ops, or_else)
        if not writes((*ops, *or_else)):
            return await self._read(lambda: self._store.txn(compares, ops, or_else))
        try:
            await self._send_write()
        except anyio.get_cancelled_exc_class():
            if self._link is Link.FROZEN:
                self._tasks.start_soon(self._land_when_up, compares, ops, or_else)
            raise
        fault = next((found for judge in self.judges if (found := judge(ops)) is not None), None)
        if fault is None:
            result = await self._store.txn(compares, ops, or_else)
            await self._hear(OutcomeUnknown)
            return result
        match fault.fate:
            case Fate.REFUSED:
                raise NotApplied("too many requests")
            case Fate.ANSWER_LOST:
                await self._store.txn(compares, ops, or_else)
            case Fate.LATE:
                self._tasks.start_soon(self._land, fault.delay_s, compares, ops, or_else)
            case Fate.LOST:
                pass
        await anyio.sleep(self._timeout_s)
        raise OutcomeUnknown(f"no answer within {self._timeout_s:g} s")

    async def grant(self, ttl_s: int) -> Lease:
        await self._send_write()
        lease = await self._store.grant(ttl_s)
        await self._hear(OutcomeUnknown)
        return lease

    async def keepalive(self, lease: int) -> int:
        if self.keepalives_fail:
            await anyio.sleep(self._timeout_s)
            raise Unavailable("no answer to a keepalive")
        await self._send(Unavailable, Unavailable)  # its answer takes no time: so many are sent, and nothing is read
        return await self._store.keepalive(lease)

    async def revoke(self, lease: int) -> None:
        await self._read(lambda: self._store.revoke(lease))

    @asynccontextmanager
    async def watch(self, prefixes: Sequence[str], *, from_revision: int) -> AsyncIterator[AsyncIterator[Batch]]:
        stream = _Stream(self, self._store, prefixes, from_revision)
        self._watches[stream] = None
        try:
            with ungrouped():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(stream.run)
                    yield stream
                    tasks.cancel_scope.cancel()
        finally:
            del self._watches[stream]

    def stats(self) -> StoreStats:
        return self._store.stats()

    # --- the network ---

    async def _read(self, call: Callable[[], Awaitable[T]]) -> T:
        await self._send(Unavailable, Unavailable)
        answer = await call()
        await self._hear(Unavailable)
        return answer

    async def _send_write(self) -> None:
        await self._send(NotApplied, OutcomeUnknown)

    async def _send(self, refused: type[StoreError], unanswered: type[StoreError]) -> None:
        """The way there."""
        await self._delay()
        if self._link is Link.FROZEN:
            await self.wait_up()
        if self._link is Link.REFUSED:
            raise refused("connection refused")
        if self._link is Link.SILENT:
            await anyio.sleep(self._timeout_s)
            raise unanswered(f"no answer within {self._timeout_s:g} s")

    async def _hear(self, unanswered: type[StoreError]) -> None:
        """The way back; the answer is lost if the link is down by then."""
        await self._delay()
        if self._link is Link.FROZEN:
            await self.wait_up()
        if self._link is not Link.UP:
            await anyio.sleep(self._timeout_s)
            raise unanswered(f"no answer within {self._timeout_s:g} s")

    async def _delay(self) -> None:
        if self._latency is None:
            await anyio.lowlevel.checkpoint()
        else:
            await pause(self._latency())

    async def _land(
        self, delay_s: float, compares: Sequence[Compare], ops: Operations, or_else: Sequence[Operation]
    ) -> None:
        await anyio.sleep(delay_s)
        with suppress(StoreError):  # nobody is left to hear of it
            await self._store.txn(compares, ops, or_else)

    async def _land_when_up(self, compares: Sequence[Compare], ops: Operations, or_else: Operations) -> None:
        await self.wait_up()
        await self._land(0.0, compares, ops, or_else)

    async def wait_up(self) -> None:
        """Until the link is up."""
        while self._link is not Link.UP:
            await self._changed.wait()


class _Stream:
    """A watch through `FaultyStore`: batches wait here until they are due; a cut loses them and asks for them again."""

    def __init__(self, owner: FaultyStore, store: Store, prefixes: Sequence[str], from_revision: int) -> None:
        self._owner = owner
        self._store = store
        self._prefixes = prefixes
        self._told = from_revision - 1
        self._waiting: deque[tuple[float, Batch]] = deque()
        self._failure: StoreError | None = None
        self._arrived = anyio.Event()
        self._open: anyio.CancelScope | None = None

    def cut(self) -> None:
        """The connection is gone."""
        self._waiting.clear()
        if self._open is not None:
            self._open.cancel()

    def fail(self, error: StoreError) -> None:
        """Raise `error` next, whatever waits."""
        self._failure = error
        self._arrived.set()

    async def run(self) -> None:
        """Receive until cancelled, or until the store ends the watch; across cuts."""
        while True:
            await self._owner.wait_up()
            with anyio.CancelScope() as self._open:
                try:
                    async with self._store.watch(self._prefixes, from_revision=self._told + 1) as batches:
                        while True:
                            self._arrive(await anext(batches))
                except StoreError as error:
                    self.fail(error)
                    return

    def _arrive(self, batch: Batch) -> None:
        if batch.events and self._owner.watches_lose:
            return
        due_s = anyio.current_time() + self._owner.watch_lag_s
        if self._waiting:
            due_s = max(due_s, self._waiting[-1][0])
        for _ in range(1 + self._owner.watches_repeat):
            self._waiting.append((due_s, batch))
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        if self._waiting:
            await anyio.lowlevel.checkpoint()
        while True:
            if self._failure is not None:
                raise self._failure
            if not self._waiting:
                self._arrived = anyio.Event()
                await self._arrived.wait()
                continue
            due_s = self._waiting[0][0]
            if due_s <= anyio.current_time():
                _, batch = self._waiting.popleft()
                self._told = max(self._told, batch.revision)
                return batch
            with anyio.CancelScope(deadline=due_s):
                self._arrived = anyio.Event()
                await self._arrived.wait()
