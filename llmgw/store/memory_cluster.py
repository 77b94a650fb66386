"""The data of a store in memory, with etcd's semantics: no waiting, no task, no thread.

Time is `anyio.current_time()`. Leases lapse, and revisions are spent on it, when somebody next looks; nobody can tell
that from a clock at work, because whoever waits for a change (`llmgw.store.memory`) also waits for the next lease to
lapse. The semantics are those checked on etcd 3.4.23; the conformance suite holds both to the same tests.
"""

from __future__ import annotations

import bisect
import heapq
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import anyio

from llmgw.errors import Compacted, LeaseLost
from llmgw.store.port import (
    Batch,
    Compare,
    Event,
    GetOp,
    KeyValue,
    Lease,
    Op,
    Operation,
    PutOp,
    Target,
    TxnResult,
    range_end,
)

LEASE_TTL_MIN_S: Final = 2
"""Shortest lease; less is raised to it. Source: etcd, one and a half election time-outs, measured on 3.4.23."""

EXPIRY_TICK_S: Final = 0.5
"""Leases lapse on multiples of this, so up to this late. Source: etcd's lessor looks every 500 ms."""

LEASES_FEW: Final = 4
"""A watch of more leased keys than this waits for the next lease of all to lapse: looking again is cheaper."""

_COMPARE: Final[Mapping[Op, Callable[[int, int], bool]]] = {
    Op.EQUAL: operator.eq,
    Op.NOT_EQUAL: operator.ne,
    Op.GREATER: operator.gt,
    Op.LESS: operator.lt,
}
_NUMBER: Final[Mapping[Target, Callable[[KeyValue], int]]] = {
    Target.CREATE: lambda item: item.create_revision,
    Target.MOD: lambda item: item.mod_revision,
    Target.VERSION: lambda item: item.version,
    Target.LEASE: lambda item: item.lease,
}
_NOTHING: Final = KeyValue(key="", value=b"", create_revision=0, mod_revision=0, version=0)


@dataclass(kw_only=True)
class _Lease:
    """`lapses_s`: the first tick at which the store sees that the dead-line has passed."""

    ttl_s: int
    deadline_s: float = 0.0
    lapses_s: float = 0.0
    keys: set[str] = field(default_factory=set)

    def renew(self, now_s: float) -> None:
        """Its full time again."""
        self.deadline_s = now_s + self.ttl_s
        self.lapses_s = math.ceil(self.deadline_s / EXPIRY_TICK_S) * EXPIRY_TICK_S


@dataclass(kw_only=True)
class _State:
    """Everything a backup of the store holds. `history` has one batch for each revision after `base`.

    `order`, `leased`: all keys, and those under a lease, sorted.
    """

    revision: int = 1
    compacted: int = 0
    base: int = 1
    items: dict[str, KeyValue] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    leased: list[str] = field(default_factory=list)
    history: list[Batch] = field(default_factory=list)
    leases: dict[int, _Lease] = field(default_factory=dict)

    def copy(self) -> _State:
        return _State(
            revision=self.revision,
            compacted=self.compacted,
            base=self.base,
            items=dict(self.items),
            order=list(self.order),
            leased=list(self.leased),
            history=list(self.history),
            leases={id_: replace(lease, keys=set(lease.keys)) for id_, lease in self.leases.items()},
        )


class Watcher(Protocol):
    """Somebody who waits for changes; called at once when something happens, so it must not wait itself."""

    def happened(self, batch: Batch) -> None:
        """A revision was written."""
        ...

    def restored(self, *, before: int, revision: int) -> None:
        """The store is another one now, and stands at `revision`; the one that is gone stood at `before`."""
        ...

    def wake(self) -> None:
        """Look again: something else than a revision changed."""
        ...


class MemorySnapshot:
    """A backup of a `MemoryCluster`, to be restored later; opaque."""

    def __init__(self, state: _State) -> None:
        self._state = state

    def state(self) -> _State:
        """A private copy, so that one backup can be restored more than once."""
        return self._state.copy()


class MemoryCluster:
    """The data of one store, shared by its clients' `MemoryStore` handles, and what happens to it as a whole."""

    def __init__(self) -> None:
        self.running = True
        self.term = 2
        """Of the store's own leader: grows with each of its elections, and starts again with a restore."""
        self._state = _State()
        self._lease_next = 0x6D656D0001  # outside the state: ids stay unique over a restore, as etcd's do
        self._watchers: dict[Watcher, tuple[str, ...]] = {}  # ordered, so that a seeded run repeats
        self.lookouts: set[Watcher] = set()
        """Watches of all there is that are always waited on: whatever lapses, one of them is there to see it."""
        self._watching: dict[str, dict[Watcher, None]] = {}
        """Prefix or key -> who watches it: what a revision costs does not grow with those whom it does not concern."""
        self._lapses: list[tuple[float, int]] = []
        """A heap of (when it lapses, lease). Leases that were renewed since stand in it twice; the later one holds."""

    # --- what an operator does ---

    @property
    def revision(self) -> int:
        """The newest revision; leases that should have lapsed by now have."""
        self._settle()
        return self._state.revision

    def compact(self, revision: int) -> None:
        """Forget history below `revision`. Raises Compacted if that is gone already, ValueError for the future."""
        self._settle()
        state = self._state
        if revision <= state.compacted:
            raise Compacted(state.compacted)
        if revision > state.revision:
            raise ValueError(f"revision {revision} is in the future, the store is at {state.revision}")
        dropped = max(0, revision - 1 - state.base)
        del state.history[:dropped]
        state.base += dropped
        state.compacted = revision
        self._wake_all()

    def stop(self) -> None:
        """All members are down: calls fail, watches fall silent, no lease lapses."""
        self._settle()
        self.running = False

    def start(self) -> None:
        """All members are back: watches go on where they were, every lease starts again at its full TTL."""
        self._renew_all()
        self.term += 1
        self.running = True

    def elect(self) -> None:
        """Another member leads the store: every lease starts again at its full TTL."""
        self._settle()
        self.term += 1
        self._renew_all()

    def snapshot(self) -> MemorySnapshot:
        """A backup as of now."""
        self._settle()
        return MemorySnapshot(self._state.copy())

    def restore(self, snapshot: MemorySnapshot | None) -> None:
        """Become what `snapshot` holds; None wipes the store. Revisions go back, and watches that notice say so."""
        before = self._state.revision
        self._state = _State() if snapshot is None else snapshot.state()
        self.term = 2
        for watcher in self._watchers:
            watcher.restored(before=before, revision=self._state.revision)
        self._renew_all()

    # --- what the clients do ---

    def find(self, key: str, *, prefix: bool) -> tuple[KeyValue, ...]:
        """What is stored at or below `key`, sorted."""
        self._settle()
        return self._find(key, prefix=prefix)

    def commit(self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation]) -> TxnResult:
        """One transaction, already within the limits. Raises LeaseLost."""
        self._settle()
        ok = all(self._holds(compare) for compare in compares)
        branch = ops if ok else or_else
        for op in branch:
            if isinstance(op, PutOp) and op.lease and op.lease not in self._state.leases:
                raise LeaseLost(op.lease)
        reads: list[tuple[KeyValue, ...]] = []
        events: list[Event] = []
        for op in branch:
            if isinstance(op, PutOp):
                events.append(self._put(op))
            elif isinstance(op, GetOp):
                reads.append(self._find(op.key, prefix=op.prefix))
            else:
                events.extend(self._delete(item) for item in self._find(op.key, prefix=op.prefix))
        self._append(events)
        return TxnResult(ok=ok, revision=self._state.revision, reads=tuple(reads))

    def grant(self, ttl_s: int) -> Lease:
        """A new lease."""
        self._settle()
        ttl_s = max(ttl_s, LEASE_TTL_MIN_S)
        lease = Lease(id=self._lease_next, ttl_s=ttl_s)
        self._lease_next += 1
        held = self._state.leases[lease.id] = _Lease(ttl_s=ttl_s)
        held.renew(anyio.current_time())
        heapq.heappush(self._lapses, (held.lapses_s, lease.id))
        return lease

    def keepalive(self, lease: int) -> int:
        """Renew. Raises LeaseLost; past its dead-line a lease is lost, although its keys may live a moment longer."""
        self._settle()
        held = self._state.leases.get(lease)
        now_s = anyio.current_time()
        if held is None or held.deadline_s <= now_s:
            raise LeaseLost(lease)
        held.renew(now_s)
        heapq.heappush(self._lapses, (held.lapses_s, lease))
        return held.ttl_s

    def revoke(self, lease: int) -> None:
        """End a lease; its keys go in one revision."""
        self._settle()
        if lease in self._state.leases:
            self._lapse(lease)

    def attach(self, watcher: Watcher, prefixes: Sequence[str]) -> None:
        """Tell `watcher` of what happens at or below `prefixes`, until `detach`. One without a closing `/` is a key."""
        self._watchers[watcher] = tuple(prefixes)
        for prefix in prefixes:
            self._watching.setdefault(prefix, {})[watcher] = None

    def detach(self, watcher: Watcher) -> None:
        """Tell `watcher` nothing more."""
        for prefix in self._watchers.pop(watcher, ()):
            self._watching[prefix].pop(watcher, None)
            if not self._watching[prefix]:
                del self._watching[prefix]
        self.lookouts.discard(watcher)
        if not self.lookouts:
            self._wake_all()

    def written(self, revision: int) -> Batch:
        """What `revision`, which must not be in the future, wrote. Raises Compacted."""
        if revision < self._state.compacted:
            raise Compacted(self._state.compacted)
        return self._state.history[revision - self._state.base - 1]

    def lapse_s(self, watcher: Watcher) -> float:
        """The earliest moment at which a key that `watcher` watches can lapse; infinity if none will."""
        if not self.running:
            return math.inf
        state, soonest_s = self._state, math.inf
        for prefix in self._watchers[watcher]:
            end = range_end(prefix, prefix=prefix.endswith("/"))
            first = bisect.bisect_left(state.leased, prefix)
            last = bisect.bisect_right(state.leased, prefix) if end is None else bisect.bisect_left(state.leased, end)
            if last - first > LEASES_FEW:
                return self._next_lapse_s()
            for key in state.leased[first:last]:
                soonest_s = min(soonest_s, state.leases[state.items[key].lease].lapses_s)
        return soonest_s

    # --- inside ---

    def _next_lapse_s(self) -> float:
        """When the next lease lapses if nobody renews it; infinity if none will."""
        if not self.running:
            return math.inf
        lapses, leases = self._lapses, self._state.leases
        while lapses and not ((lease := leases.get(lapses[0][1])) and lease.lapses_s == lapses[0][0]):
            heapq.heappop(lapses)  # it is gone, or was renewed
        return lapses[0][0] if lapses else math.inf

    def _find(self, key: str, *, prefix: bool) -> tuple[KeyValue, ...]:
        items, order = self._state.items, self._state.order
        end = range_end(key, prefix=prefix)
        if end is None:
            return (items[key],) if key in items else ()
        first, last = bisect.bisect_left(order, key), bisect.bisect_left(order, end)
        return tuple(items[key] for key in order[first:last])

    def _holds(self, compare: Compare) -> bool:
        """For a prefix: of every key below it; where there is none, of an absent key."""
        found = self._find(compare.key, prefix=compare.prefix) or (_NOTHING,)
        return all(_COMPARE[compare.op](_NUMBER[compare.target](item), compare.number) for item in found)

    def _put(self, op: PutOp) -> Event:
        state, revision = self._state, self._state.revision + 1
        old = state.items.get(op.key)
        if old is None:
            bisect.insort(state.order, op.key)
        elif old.lease:
            self._unlease(old)
        if op.lease:
            state.leases[op.lease].keys.add(op.key)
            bisect.insort(state.leased, op.key)
        new = KeyValue(
            key=op.key,
            value=op.value,
            create_revision=revision if old is None else old.create_revision,
            mod_revision=revision,
            version=1 if old is None else old.version + 1,
            lease=op.lease,
        )
        state.items[op.key] = new
        return Event(
            key=new.key,
            value=new.value,
            mod_revision=revision,
            create_revision=new.create_revision,
            version=new.version,
            lease=new.lease,
        )

    def _delete(self, item: KeyValue) -> Event:
        state = self._state
        del state.items[item.key]
        del state.order[bisect.bisect_left(state.order, item.key)]
        if item.lease:
            self._unlease(item)
        return Event(key=item.key, value=None, mod_revision=state.revision + 1)

    def _unlease(self, item: KeyValue) -> None:
        state = self._state
        state.leases[item.lease].keys.discard(item.key)
        del state.leased[bisect.bisect_left(state.leased, item.key)]

    def _append(self, events: Sequence[Event]) -> None:
        """One revision for a transaction that changed something, none for one that did not."""
        if not events:
            return
        state = self._state
        state.revision += 1
        batch = Batch(revision=state.revision, events=tuple(events))
        state.history.append(batch)
        for watcher in {watcher: None for event in events for watcher in self._watchers_of(event.key)}:
            watcher.happened(batch)

    def _watchers_of(self, key: str) -> Iterator[Watcher]:
        """Who watches the key, or a prefix of it."""
        yield from self._watching.get(key, ())
        end = key.find("/")
        while end != -1:
            yield from self._watching.get(key[: end + 1], ())
            end = key.find("/", end + 1)

    def _lapse(self, lease: int) -> None:
        keys = sorted(self._state.leases[lease].keys)
        self._append([self._delete(self._state.items[key]) for key in keys])
        del self._state.leases[lease]

    def _settle(self) -> None:
        """Let lapse what should have by now, in the order in which it should have."""
        if not self.running:
            return
        now_s = anyio.current_time()
        while self._next_lapse_s() <= now_s:
            self._lapse(self._lapses[0][1])

    def _renew_all(self) -> None:
        now_s, leases = anyio.current_time(), self._state.leases
        for lease in leases.values():
            lease.renew(now_s)
        self._lapses = sorted((lease.lapses_s, id_) for id_, lease in leases.items())
        self._wake_all()

    def _wake_all(self) -> None:
        for watcher in self._watchers:
            watcher.wake()
