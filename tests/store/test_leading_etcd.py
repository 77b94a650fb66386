"""Leading and committing on a real etcd: what the virtual tests show on the store in memory, once more on the real one.

Durations are short, so that a lease lapses soon; none of them is measured.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import pytest
import trio

from llmgw.config import ControllerConfig, EtcdConfig
from llmgw.controller.commit import Committer
from llmgw.controller.loop import control
from llmgw.core.catalog import ModelSpec, Profile
from llmgw.core.ids import Secret
from llmgw.core.node import Build, EngineFacts, Facts, Session
from llmgw.core.plan import Group, Put
from llmgw.core.record import Head, Leader, Record, StoreMeta
from llmgw.core.replica import EngineSecret, ModelState, Replica
from llmgw.core.snapshot import Kind, Ref
from llmgw.core.units import GB
from llmgw.errors import LostTerm, OutcomeUnknown
from llmgw.obs.clock import SystemIds, system_jitter, system_wall
from llmgw.obs.status import ControllerStatus
from llmgw.store import codec, incarnation, keys
from llmgw.store.election import Term, lead
from llmgw.store.etcd import open_etcd
from llmgw.store.incarnation import HighWater
from llmgw.store.port import Compare, Operation, PutOp, Store, TxnResult
from llmgw.testing.etcd import Etcd
from llmgw.testing.faults import Fate, FaultyStore, TxnFault, once

pytestmark = pytest.mark.etcd

DEADLINE_S = 60

ETCD = EtcdConfig(connect_timeout_s=0.5, read_timeout_s=1.5)
CONFIG = ControllerConfig(ttl_s=6, keepalive_s=1.2, margin_s=2, etcd=ETCD)


def leading(store: Store, name: str) -> AbstractAsyncContextManager[Term]:
    identity = Leader(id=name, address="", version="", pid=1)
    return lead(store, identity, ttl_s=6, keepalive_s=1.2, margin_s=2, call_timeout_s=2)


class Freezer(FaultyStore):
    """The store of a process that can be frozen: what it was about to send is sent when it thaws, whatever happened."""

    def __init__(self, store: Store, tasks: anyio.abc.TaskGroup) -> None:
        super().__init__(store, tasks)
        self.thawed = anyio.Event()
        self.thawed.set()
        self.held: list[Sequence[Operation]] = []
        self.freeze_at: Callable[[Sequence[Operation]], bool] = lambda _: False

    async def txn(
        self, compares: Sequence[Compare], ops: Sequence[Operation], or_else: Sequence[Operation] = ()
    ) -> TxnResult:
        if self.freeze_at(ops):
            self.freeze_at = lambda _: False
            self.thawed = anyio.Event()
            self.held.append(ops)
        await self._thaw()
        with anyio.CancelScope(shield=True):  # a frozen process is not told to stop between two instructions
            result = await super().txn(compares, ops, or_else)
        return result  # noqa: RET504  # to mypy, a cancel scope may swallow what is raised in it

    async def keepalive(self, lease: int) -> int:
        await self._thaw()
        return await super().keepalive(lease)

    async def revoke(self, lease: int) -> None:
        await self._thaw()
        await super().revoke(lease)

    async def _thaw(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.thawed.wait()


class World:
    """An etcd, the controllers on it, and whoever else writes to it."""

    def __init__(self, etcd: Etcd, store: Store) -> None:
        self.config = EtcdConfig(
            endpoints=etcd.endpoints,
            connect_timeout_s=ETCD.connect_timeout_s,
            read_timeout_s=ETCD.read_timeout_s,
        )
        self.store = store

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Freezer]:
        """A store of one's own, which can be frozen."""
        async with open_etcd(self.config) as store, anyio.create_task_group() as tasks:
            yield Freezer(store, tasks)

    async def controller(
        self, name: str, *, task_status: trio.TaskStatus[tuple[Freezer, ControllerStatus, trio.CancelScope]]
    ) -> None:
        identity = Leader(id=name, address=name, version="1", pid=1)
        status = ControllerStatus(leader=identity, renew_within_s=2)
        async with self.client() as store:
            with trio.CancelScope() as scope:
                task_status.started((store, status, scope))
                await control(
                    store,
                    CONFIG,
                    identity=identity,
                    wall=system_wall,
                    ids=SystemIds(),
                    jitter=system_jitter,
                    status=status,
                )

    async def put(self, *records: tuple[Ref, Record]) -> None:
        ops = [PutOp(key=keys.key(ref), value=codec.encode_stored(record)) for ref, record in records]
        await self.store.txn([], ops)

    async def model(self, name: str) -> None:
        profile = Profile(name="cpu", engine="llama.cpp", min_memory_gb=14)
        await self.put((Ref(Kind.MODEL, name), ModelSpec(name=name, source="s", profiles=(profile,))))

    async def node(self, name: str) -> None:
        """An agent with 24 GB registers."""
        lease = await self.store.grant(600)
        meta = (await self.records(Kind.META))[""]
        assert isinstance(meta, StoreMeta)
        engines = EngineFacts(probed=True, builds=(Build(engine="llama.cpp", version="1", named=True),))
        facts = Facts(node=name, boot_id="b", cpus=4, memory_bytes=24 * GB, engines=engines)
        session = Session(
            node=name,
            boot_id="b",
            data="1:1",
            lease=lease.id,
            store=meta.incarnation,
            address="127.0.0.1",
            version="1",
            pid=1,
            started_at=0,
        )
        await self.store.txn(
            [],
            [
                PutOp(key=keys.key(Ref(Kind.SESSION, name)), value=codec.encode_stored(session), lease=lease.id),
                PutOp(key=keys.key(Ref(Kind.FACTS, name)), value=codec.encode_stored(facts)),
            ],
        )

    async def records(self, kind: Kind) -> dict[str, Record]:
        found: dict[str, Record] = {}
        for item in (await self.store.list([keys.prefix(kind)])).items:
            ref = keys.parse(item.key)
            assert ref is not None
            found[ref.name] = codec.decode(ref, item.value)
        return found

    async def leader(self) -> str | None:
        found = (await self.records(Kind.LEADER)).get("")
        return found.id if isinstance(found, Leader) else None

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Until `holds`; it is looked at whenever the tree changes."""
        with anyio.fail_after(DEADLINE_S):
            revision = (await self.store.list([keys.ROOT])).revision
            async with self.store.watch([keys.ROOT], from_revision=revision + 1) as batches:
                while not await holds():
                    await anext(batches)

    async def until_leads(self, name: str) -> None:
        async def leads() -> bool:
            return await self.leader() == name

        await self.until(leads)

    async def until_judged(self) -> None:
        """Until the leader has an opinion of every model."""

        async def judged() -> bool:
            return (await self.records(Kind.MODEL)).keys() == (await self.records(Kind.MODEL_STATE)).keys()

        await self.until(judged)


def on_etcd(etcd: Etcd, scene: Callable[[World, trio.Nursery], Awaitable[None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(3 * DEADLINE_S):
            async with open_etcd(EtcdConfig(endpoints=etcd.endpoints)) as store, trio.open_nursery() as nursery:
                await scene(World(etcd, store), nursery)
                nursery.cancel_scope.cancel()

    trio.run(main)


def places(ops: Sequence[Operation]) -> bool:
    return any(op.key.startswith(keys.prefix(Kind.REPLICA)) for op in ops)


def secret(name: str) -> Group:
    record = EngineSecret(replica=name, key=Secret("k"))
    return Group(cause="note", writes=(Put(ref=Ref(Kind.SECRET, name), record=record),))


# --- leading ---------------------------------------------------------------------------------------------------------


def test_one_leads_and_a_graceful_leave_lets_the_next_in(etcd: Etcd) -> None:
    async def scene(world: World, nursery: trio.Nursery) -> None:
        await incarnation.ensure(world.store, SystemIds())
        terms: list[int] = []
        reigning = 0

        async def candidate(name: str) -> None:
            nonlocal reigning
            async with world.client() as store, leading(store, name) as term:
                reigning += 1
                assert reigning == 1
                held = await world.store.get(keys.key(Ref(Kind.LEADER)))
                assert held is not None
                assert (held.create_revision, held.lease) == (term.number, term.lease)
                terms.append(term.number)
                await anyio.sleep(CONFIG.keepalive_s)
                reigning -= 1

        async with trio.open_nursery() as candidates:
            for name in "abc":
                candidates.start_soon(candidate, name)
        assert terms == sorted(set(terms))
        assert len(terms) == 3
        assert await world.leader() is None

    on_etcd(etcd, scene)


def test_a_leader_cut_off_from_every_member_stops_by_itself(etcd: Etcd) -> None:
    """Frozen members answer nothing: only the leader's own clock can end its term."""

    async def scene(world: World, nursery: trio.Nursery) -> None:
        await incarnation.ensure(world.store, SystemIds())
        async with world.client() as store:
            terms: list[Term] = []

            async def reign() -> None:
                async with leading(store, "a") as term:
                    terms.append(term)
                    etcd.members[0].stop()
                    await anyio.sleep(DEADLINE_S)

            with pytest.raises(LostTerm, match="no keepalive"):
                await reign()
            assert trio.current_time() >= terms[0].until_mono_s
            etcd.members[0].cont()

    on_etcd(etcd, scene)


# --- the fence -------------------------------------------------------------------------------------------------------


async def committer(world: World, store: Store, term: Term) -> Committer:
    meta = await world.store.get(keys.key(Ref(Kind.META)))
    assert meta is not None
    head = await world.store.get(keys.key(Ref(Kind.HEAD)))
    return Committer(store, term=term.number, meta_rev=meta.mod_revision, head=head, high_water=HighWater())


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.ANSWER_LOST, Fate.LATE])
def test_a04_late_txn_never_lands_after_a_newer_one(etcd: Etcd, fate: Fate) -> None:
    async def scene(world: World, nursery: trio.Nursery) -> None:
        await incarnation.ensure(world.store, SystemIds())
        async with world.client() as store, leading(store, "a") as term:
            async with anyio.create_task_group() as tasks:  # ends when the late one has been tried
                faulty = FaultyStore(store, tasks, timeout_s=0.1)
                commits = await committer(world, faulty, term)
                await commits.commit([secret("r0")])
                faulty.judges.append(once(TxnFault(fate=fate, delay_s=0.5)))
                with pytest.raises(OutcomeUnknown):
                    await commits.commit([secret("r1")])
                landed = set(await world.records(Kind.SECRET)) - {"r0"}
                assert landed == ({"r1"} if fate is Fate.ANSWER_LOST else set())
                await commits.commit([secret("r2")])
            assert set(await world.records(Kind.SECRET)) == {"r0", "r2", *landed}
            head = await world.store.get(keys.key(Ref(Kind.HEAD)))
            assert head is not None
            assert head.mod_revision == commits.head_rev

    on_etcd(etcd, scene)


def test_a04_paused_leader_is_fenced(etcd: Etcd) -> None:
    """Frozen while placing, thawed when another has led and placed: nothing of it gets in, and it stands by."""

    async def scene(world: World, nursery: trio.Nursery) -> None:
        frozen, status, _ = await nursery.start(world.controller, "a")
        await world.until_leads("a")
        election = await world.store.get(keys.key(Ref(Kind.LEADER)))
        assert election is not None
        frozen.freeze_at = places
        await world.node("n1")
        _, status_b, _ = await nursery.start(world.controller, "b")
        await world.model("m1")
        await world.until_leads("b")
        await world.until_judged()
        (replica,) = (await world.records(Kind.REPLICA)).values()
        (held,) = frozen.held
        head = await world.store.get(keys.key(Ref(Kind.HEAD)))
        assert head is not None
        frozen.thawed.set()
        with anyio.fail_after(DEADLINE_S):
            while status.term is not None:  # noqa: ASYNC110  # a field of the loop's own
                await anyio.sleep(0.01)
        assert (await world.records(Kind.REPLICA)) == {replica.id: replica} if isinstance(replica, Replica) else False
        assert not {op.key for op in held if places([op])} & {
            item.key for item in (await world.store.list([keys.ROOT])).items
        }
        later = (await world.records(Kind.HEAD))[""]
        assert isinstance(later, Head)
        assert status_b.term is not None
        assert later.term == status_b.term.number > election.create_revision
        assert await world.leader() == "b"

    on_etcd(etcd, scene)


@pytest.mark.parametrize("fate", [None, Fate.LATE, Fate.ANSWER_LOST])
@pytest.mark.parametrize("lag_s", [0.0, 1.5])
def test_c03_two_controllers_during_a_change_of_leader_commit_one_claim(
    etcd: Etcd, fate: Fate | None, lag_s: float
) -> None:
    """Two models of 14 GB for a node of 24, applied at once while the lead changes hands; the heir's watch may lag."""

    async def scene(world: World, nursery: trio.Nursery) -> None:
        a, _, leave = await nursery.start(world.controller, "a")
        await world.until_leads("a")
        b, _, _ = await nursery.start(world.controller, "b")
        await world.node("n1")
        b.watch_lag_s = lag_s
        if fate is not None:
            a.judges.append(once(TxnFault(fate=fate, delay_s=2), where=places))
        await world.model("m1")
        leave.cancel()
        await world.model("m2")
        await world.until_leads("b")
        await world.until_judged()
        replicas = [one for one in (await world.records(Kind.REPLICA)).values() if isinstance(one, Replica)]
        assert [shard.claim.memory_bytes for one in replicas for shard in one.shards] == [14 * GB]
        (other,) = {"m1", "m2"} - {replicas[0].model}
        state = (await world.records(Kind.MODEL_STATE))[other]
        assert isinstance(state, ModelState)
        assert state.unplaced is not None
        (refusal,) = state.unplaced.nearest
        assert (refusal.needed, refusal.holders) == (14 * GB, ((replicas[0].id, 14 * GB),))

    on_etcd(etcd, scene)
