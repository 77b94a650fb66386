"""The same random operations on `MemoryStore` and on real etcd: every answer, every event and every refusal agree."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import httpx2
import msgspec
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from llmgw.config import EtcdConfig
from llmgw.errors import Compacted, LeaseLost
from llmgw.store.etcd import open_etcd
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import Compare, DeleteOp, Event, GetOp, KeyValue, Op, Operation, PutOp, Store, Target
from llmgw.testing.conformance import events_until, put
from llmgw.testing.etcd import Etcd

pytestmark = pytest.mark.etcd

T = TypeVar("T")
NAMES = ("a", "b", "d/a", "d/b", "d0")
PREFIXES = ("", "d/")


class Number(msgspec.Struct, frozen=True):
    """A number to compare with, the same on both sides: `of` a revision, a version or a lease, counted from 0."""

    target: Target
    of: int


Condition = tuple[str, Number, Op]
Step = tuple[str, str, bytes, int]
"""An operation: what, on which key or prefix, with which value and lease (0 for none)."""

targets = st.sampled_from(Target).flatmap(lambda target: st.builds(Number, st.just(target), st.integers(0, 12)))
compares = st.tuples(st.sampled_from((*NAMES, *PREFIXES)), targets, st.sampled_from(Op))
puts = st.tuples(st.just("put"), st.sampled_from(NAMES), st.binary(max_size=3), st.integers(0, 3))
others = st.tuples(st.sampled_from(("get", "delete")), st.sampled_from((*NAMES, *PREFIXES)), st.just(b""), st.just(0))
operations = st.lists(st.one_of(puts, others), max_size=4)


class Side:
    """One of the two stores, and how its numbers look from the outside."""

    def __init__(self, store: Store, root: str, portal: BlockingPortal, forget: Callable[[int], None]) -> None:
        self.store, self.root, self.portal, self.forget = store, root, portal, forget
        self.leases: list[int] = []
        self.base = self.run(lambda: put(store, root + "base"))

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        async def main() -> T:
            return await call()

        return self.portal.call(main)

    def revision(self, stored: int) -> int:
        """A revision as both sides count it; 0 stays 0."""
        return stored and stored - self.base + 1

    def lease(self, stored: int) -> int:
        return self.leases.index(stored) + 1 if stored else 0

    def item(self, item: KeyValue) -> object:
        numbers = self.revision(item.create_revision), self.revision(item.mod_revision), item.version
        return item.key.removeprefix(self.root), item.value, numbers, self.lease(item.lease)

    def event(self, event: Event) -> object:
        numbers = self.revision(event.create_revision), self.revision(event.mod_revision), event.version
        return event.key.removeprefix(self.root), event.value, numbers, self.lease(event.lease)

    def compare(self, key: str, number: Number, op: Op) -> Compare:
        match number.target:
            case Target.VERSION:
                value = number.of
            case Target.LEASE:
                value = self.leases[(number.of - 1) % len(self.leases)] if number.of and self.leases else 0
            case _:
                value = number.of and number.of + self.base - 1
        at = self.root + key
        return Compare(key=at, target=number.target, op=op, number=value, prefix=at.endswith("/"))

    def operation(self, kind: str, key: str, value: bytes, lease: int) -> Operation:
        at = self.root + key
        match kind:
            case "put":
                return PutOp(
                    key=at, value=value, lease=self.leases[lease % len(self.leases)] if lease and self.leases else 0
                )
            case "get":
                return GetOp(key=at, prefix=at.endswith("/"))
            case _:
                return DeleteOp(key=at, prefix=at.endswith("/"))

    def txn(
        self,
        conditions: Sequence[Condition],
        then: Sequence[Step],
        otherwise: Sequence[Step],
    ) -> object:
        try:
            result = self.run(
                lambda: self.store.txn(
                    [self.compare(*condition) for condition in conditions],
                    [self.operation(*op) for op in then],
                    [self.operation(*op) for op in otherwise],
                )
            )
        except (ValueError, LeaseLost) as error:
            return type(error)
        reads = [[self.item(item) for item in read] for read in result.reads]
        return result.ok, self.revision(result.revision), reads

    def list(self, prefixes: Sequence[str]) -> object:
        listing = self.run(lambda: self.store.list([self.root + prefix for prefix in prefixes]))
        return [self.item(item) for item in listing.items], self.revision(listing.revision)

    def get(self, key: str) -> object:
        found = self.run(lambda: self.store.get(self.root + key))
        return found and self.item(found)

    def grant(self) -> object:
        lease = self.run(lambda: self.store.grant(600))
        self.leases.append(lease.id)
        return lease.ttl_s

    def renew(self, which: int) -> object:
        lease = self.leases[which % len(self.leases)]
        try:
            return self.run(lambda: self.store.keepalive(lease))
        except LeaseLost:
            return LeaseLost

    def revoke(self, which: int) -> None:
        lease = self.leases[which % len(self.leases)]
        self.run(lambda: self.store.revoke(lease))

    def watched(self, prefix: str, start: int) -> object:
        """Everything from `start` to a last write that is made for the purpose."""

        async def main() -> list[Event]:
            last = await put(self.store, self.root + prefix + "last")
            async with self.store.watch([self.root + prefix], from_revision=start + self.base - 1) as batches:
                return await events_until(batches, last)

        try:
            return [self.event(event) for event in self.run(main)]
        except Compacted as error:
            return Compacted, self.revision(error.revision)

    def now(self) -> int:
        listing = self.run(lambda: self.store.list([self.root + "none"]))
        return self.revision(listing.revision)

    def compact(self, revision: int) -> None:
        self.forget(revision + self.base - 1)


class Both(RuleBasedStateMachine):
    make: ClassVar[Callable[[], tuple[Side, Side]]]

    def __init__(self) -> None:
        super().__init__()
        self.sides = type(self).make()
        self.compacted = 0

    def agree(self, ask: Callable[[Side], T]) -> T:
        memory, etcd = (ask(side) for side in self.sides)
        assert memory == etcd
        return memory

    @rule(conditions=st.lists(compares, max_size=3), then=operations, otherwise=operations)
    def txn(self, conditions: list[Condition], then: list[Step], otherwise: list[Step]) -> None:
        self.agree(lambda side: side.txn(conditions, then, otherwise))

    @rule(writes=st.lists(puts, min_size=1, max_size=3, unique_by=lambda op: op[1]))
    def write(self, writes: list[Step]) -> None:
        self.agree(lambda side: side.txn([], writes, []))

    @rule(prefixes=st.lists(st.sampled_from((*NAMES, *PREFIXES)), min_size=1, max_size=3))
    def listing(self, prefixes: list[str]) -> None:
        self.agree(lambda side: side.list(prefixes))

    @rule(key=st.sampled_from(NAMES))
    def get(self, key: str) -> None:
        self.agree(lambda side: side.get(key))

    @rule()
    def grant(self) -> None:
        self.agree(lambda side: side.grant())

    @precondition(lambda self: self.sides[0].leases)
    @rule(which=st.integers(0, 9))
    def renew(self, which: int) -> None:
        self.agree(lambda side: side.renew(which))

    @precondition(lambda self: self.sides[0].leases)
    @rule(which=st.integers(0, 9))
    def revoke(self, which: int) -> None:
        self.agree(lambda side: side.revoke(which))

    @rule(prefix=st.sampled_from(PREFIXES), back=st.integers(0, 30))
    def watch(self, prefix: str, back: int) -> None:
        start = max(1, self.agree(lambda side: side.now()) + 1 - back)
        # etcd before 3.4.36 may lose a deletion at the very revision that was compacted: not asked for here.
        if start != self.compacted:
            self.agree(lambda side: side.watched(prefix, start))

    @rule(back=st.integers(0, 8))
    def compact(self, back: int) -> None:
        revision = self.agree(lambda side: side.now()) - back
        if revision > max(self.compacted, 1):
            self.compacted = revision
            self.agree(lambda side: side.compact(revision))


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal(backend="trio") as portal:
        yield portal


def test_memory_and_etcd_agree(etcd: Etcd, portal: BlockingPortal) -> None:
    roots = (f"/t{n}/" for n in itertools.count())
    with (
        portal.wrap_async_context_manager(open_etcd(EtcdConfig(endpoints=etcd.endpoints))) as real,
        httpx2.Client(trust_env=False) as client,
    ):

        def make() -> tuple[Side, Side]:
            root, cluster = next(roots), MemoryCluster()

            def forget_etcd(revision: int) -> None:
                url = f"{etcd.endpoints[0]}/v3/kv/compaction"
                client.post(url, json={"revision": revision}).raise_for_status()

            def forget_memory(revision: int) -> None:
                async def main() -> None:  # inside the loop, which has the clock
                    cluster.compact(revision)

                portal.call(main)

            return Side(MemoryStore(cluster), root, portal, forget_memory), Side(real, root, portal, forget_etcd)

        bound = type("Bound", (Both,), {"make": staticmethod(make)})
        run_state_machine_as_test(bound, settings=settings(max_examples=20, stateful_step_count=25))
