"""Leaders that come and go, and transactions that land late: whatever order that takes, the plan stays one leader's.

Each step is one a real controller may take at a bad moment. A checker sees every revision of the store, as it does in
the simulation, and asks of each write under plan/ whether it was its leader's to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.controller.commit import ELECTION, HEAD, META, Committer
from llmgw.core.history import Checker
from llmgw.core.invariants import require
from llmgw.core.plan import View
from llmgw.core.reconcile import reconcile
from llmgw.core.record import Leader, Record
from llmgw.core.snapshot import Change, Dirty, Index, Kind, Ref
from llmgw.core.units import Now
from llmgw.errors import Conflict, Outdated
from llmgw.store import codec, keys
from llmgw.store.incarnation import HighWater
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import Batch, Compare, DeleteOp, Operation, PutOp, TxnResult
from llmgw.testing.cluster import Cluster
from llmgw.testing.clusters import Scene, build, scenes
from llmgw.testing.seed import SeededIds, stream
from llmgw.testing.virtual import run_virtual

LEADERS = ("a", "b")


class Witness:
    """Sees every revision of the store. The first broken invariant ends the test."""

    def __init__(self) -> None:
        self.checker = Checker()

    def happened(self, batch: Batch) -> None:
        changes = [change for event in batch.events if (change := codec.change(event)) is not None]
        require(self.checker.advance(changes, revision=batch.revision))

    def restored(self, *, before: int, revision: int) -> None:
        raise AssertionError("nobody restores anything here")

    def wake(self) -> None:
        pass


class Recorder(MemoryStore):
    """A store that remembers the transactions it was asked for, so that one may land once more."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.asked: list[tuple[Sequence[Compare], Sequence[Operation]]] = []

    async def txn(
        self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
    ) -> TxnResult:
        self.asked.append((compares, ops))
        return await super().txn(compares, ops, or_else)

    async def once_more(self, number: int) -> None:
        """One of the transactions lands again, or for the first time."""
        if self.asked:
            await super().txn(*self.asked[number % len(self.asked)])


class Controller:
    """One that leads, led, or believes that it leads: with the tree as it saw it last."""

    def __init__(self, name: str, store: Recorder) -> None:
        self.name, self.store = name, store
        self.index = Index()
        self.committer: Committer | None = None
        self.ids = SeededIds(stream(0, name))

    async def win(self) -> None:
        held = await self.store.get(ELECTION)
        ops: list[Operation] = [] if held is None else [DeleteOp(key=ELECTION)]
        await MemoryStore.txn(self.store, [], ops)
        value = codec.encode_stored(Leader(id=self.name, address="", version="", pid=0))
        won = await MemoryStore.txn(self.store, [], [PutOp(key=ELECTION, value=value)])
        meta = await self.store.get(META)
        assert meta is not None
        self.committer = Committer(
            self.store,
            term=won.revision,
            meta_rev=meta.mod_revision,
            head=await self.store.get(HEAD),
            high_water=HighWater(),
        )
        await self.look()

    async def look(self) -> None:
        listing = await self.store.list([keys.ROOT])
        found = [change for item in listing.items if (change := codec.change(item)) is not None]
        self.index.reset(found, revision=listing.revision)

    async def act(self, now: Now, *, groups: int | None) -> None:
        """A pass on the tree as it was seen last, if that has all it committed; `groups`: it dies after so many."""
        if self.committer is None or self.index.revision < self.committer.head_rev:
            return
        plan = reconcile(self.index, Dirty(everything=True), now=now, view=View(), ids=self.ids)
        with suppress(Conflict, Outdated):  # LostTerm is a conflict; what follows is not to be believed any more
            await self.committer.commit(plan.groups[:groups])


def written(c: Cluster) -> list[tuple[Ref, Record]]:
    return [(ref, row.record) for ref, row in c.index.rows() if row.record is not None]


async def story(c: Cluster, steps: Sequence[tuple[str, int]]) -> None:
    cluster = MemoryCluster()
    store = Recorder(cluster)
    for ref, record in written(c):
        await MemoryStore.txn(store, [], [PutOp(key=keys.key(ref), value=codec.encode_stored(record))])
    witness = Witness()
    listing = await store.list([keys.ROOT])
    found: list[Change] = [change for item in listing.items if (change := codec.change(item)) is not None]
    witness.checker.reset(found, revision=listing.revision)
    cluster.attach(witness, (keys.ROOT,))
    controllers = [Controller(name, store) for name in LEADERS]
    await controllers[0].win()
    for what, number in steps:
        one = controllers[number % len(controllers)]
        match what:
            case "win":
                await one.win()
            case "look":
                await one.look()
            case "act":
                await one.act(c.now, groups=None)
            case "die":
                await one.act(c.now, groups=number)
            case "late":
                await store.once_more(number)
            case "scale":
                await scale(store, c, number)
            case _:
                raise AssertionError(what)


async def scale(store: Recorder, c: Cluster, number: int) -> None:
    """People change their minds."""
    specs = list(c.index.models.records())
    spec = specs[number % len(specs)]
    low = number % 4
    changed = msgspec.structs.replace(
        spec, scaling=msgspec.structs.replace(spec.scaling, min=low, max=max(low, spec.scaling.max))
    )
    put = PutOp(key=keys.key(Ref(Kind.MODEL, spec.name)), value=codec.encode_stored(changed))
    await MemoryStore.txn(store, [], [put])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["act", "look", "act", "look", "win", "late", "late", "scale", "die"]), st.integers(0, 40)
    ),
    min_size=10,
    max_size=40,
)


@given(scenes(["run"], events_max=0), STEPS)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_inv4_whoever_believes_to_lead_writes_only_what_follows_from_the_head(
    scene: Scene, steps: list[tuple[str, int]]
) -> None:
    c = build(scene)
    run_virtual(lambda: story(c, steps))
