"""The agent and the store, in virtual time: who may speak for a node, what is written, and which orders count."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import msgspec
import pytest

from llmgw.config import AgentConfig
from llmgw.core.node import Facts, Session
from llmgw.core.record import Record, StoreMeta
from llmgw.core.replica import Assignment, ShardPhase, ShardReport, confirms_stop
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Refused
from llmgw.store import codec, keys
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import DeleteOp, PutOp
from llmgw.testing.fake_host import FakeHost
from llmgw.testing.faults import Fate, FaultyStore, Link, TxnFault, once
from llmgw.testing.node import agent_config, assignment, stopped
from llmgw.testing.seed import SeededIds, stream
from llmgw.testing.sim_machine import Engine, Machine, Temper
from llmgw.testing.virtual import run_virtual
from llmgw_agent.agent import run_agent

GB = 10**9
META = Ref(Kind.META)
SESSION = Ref(Kind.SESSION, "n1")
SHARD = "n1/m-aaaaa.0"
REPORT = Ref(Kind.SHARD, SHARD)


class Nobody:
    """A witness who only remembers what must never happen."""

    def __init__(self) -> None:
        self.wrongs: list[str] = []

    def engine_started(self, machine: Machine, engine: Engine) -> None:
        pass

    def engine_signalled(self, machine: Machine, engine: Engine, *, kill: bool) -> None:
        pass

    def wrong(self, what: str) -> None:
        self.wrongs.append(what)


class Agent:
    """One agent process."""

    def __init__(self, store: FaultyStore, host: FakeHost, scope: anyio.CancelScope) -> None:
        self.store, self.host, self._scope = store, host, scope

    def kill(self) -> None:
        """SIGKILL."""
        self.store.link = Link.REFUSED
        self.host.kill()
        self._scope.cancel()


class World:
    """A store and people to look into it; machines and agents as a test asks for them."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.cluster = MemoryCluster()
        self.store = MemoryStore(self.cluster)
        self.witness = Nobody()
        self._tasks = tasks
        self.starts = 0

    def machine(self, name: str = "n1", *, address: str = "10.0.0.1", load_s: float = 1.0) -> Machine:
        return Machine(
            name=name,
            address=address,
            memory_bytes=64 * GB,
            witness=self.witness,
            temper=lambda _: Temper(loads_s=load_s),
            random=stream(0, name),
        )

    def start(self, machine: Machine, *, link: Link = Link.UP, **config: Any) -> Agent:
        self.starts += 1
        store = FaultyStore(MemoryStore(self.cluster), self._tasks)
        store.link = link
        agent = Agent(store, FakeHost(machine), anyio.CancelScope())
        settings = agent_config(address=machine.address, **config)
        ids = SeededIds(stream(self.starts, "agent"))
        self._tasks.start_soon(self._run, agent, settings, ids)
        return agent

    async def _run(self, agent: Agent, config: AgentConfig, ids: SeededIds) -> None:
        with agent._scope:
            await run_agent(agent.store, agent.host, config, wall=self.wall, ids=ids)

    def wall(self) -> float:
        return 1_800_000_000.0 + anyio.current_time()

    async def put(self, *records: tuple[Ref, Record]) -> int:
        ops = [PutOp(key=keys.key(ref), value=codec.encode_stored(record)) for ref, record in records]
        return (await self.store.txn([], ops)).revision

    async def order(self, order: Assignment) -> int:
        name = f"{order.node}/{order.replica}.{order.rank}"
        return await self.put((Ref(Kind.ASSIGNMENT, name), order))

    async def delete(self, *refs: Ref) -> None:
        await self.store.txn([], [DeleteOp(key=keys.key(ref)) for ref in refs])

    async def record(self, ref: Ref) -> Record | None:
        item = await self.store.get(keys.key(ref))
        return None if item is None else codec.decode(ref, item.value)

    async def report(self, ref: Ref = REPORT) -> ShardReport:
        record = await self.record(ref)
        assert isinstance(record, ShardReport)
        return record

    async def session(self) -> Session:
        record = await self.record(SESSION)
        assert isinstance(record, Session)
        return record

    async def until(self, condition: Callable[[], Awaitable[bool]], *, within_s: float = 60.0) -> None:
        with anyio.fail_after(within_s):
            while not await condition():  # noqa: ASYNC110  # the store has no event for a test to wait on
                await anyio.sleep(0.1)

    async def until_ready(self, ref: Ref = REPORT, *, within_s: float = 60.0) -> ShardReport:
        async def ready() -> bool:
            record = await self.record(ref)
            return isinstance(record, ShardReport) and record.phase is ShardPhase.READY

        await self.until(ready, within_s=within_s)
        return await self.report(ref)

    async def until_session(self, *, within_s: float = 60.0) -> Session:
        async def there() -> bool:
            return await self.record(SESSION) is not None

        await self.until(there, within_s=within_s)
        return await self.session()


def virtual(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    """A test in virtual time, in a world with a store that a controller has set up."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            world = World(tasks)
            await world.put((META, StoreMeta(incarnation="store-1")))
            await test(world)
            assert world.witness.wrongs == []
            tasks.cancel_scope.cancel()

    def run() -> None:
        run_virtual(main)

    run.__name__ = test.__name__
    return run


@virtual
async def test_session_facts_and_full_report_come_in_one_transaction(world: World) -> None:
    machine = world.machine()
    await world.order(assignment())
    agent = world.start(machine)
    await world.until_ready()
    agent.kill()
    await world.until(_gone(world, SESSION))
    agent = world.start(machine)
    await world.until_session()
    items = [await world.store.get(keys.key(ref)) for ref in (SESSION, Ref(Kind.FACTS, "n1"), REPORT)]
    assert len({item.mod_revision for item in items if item is not None}) == 1
    session = await world.session()
    assert (session.address, session.store, session.data) == ("10.0.0.1", "store-1", agent.host.data)
    assert session.ttl_s == 30
    facts = await world.record(Ref(Kind.FACTS, "n1"))
    assert isinstance(facts, Facts)
    assert facts.memory_bytes == 64 * GB
    assert (await world.report()).phase is ShardPhase.READY


def _gone(world: World, ref: Ref) -> Callable[[], Awaitable[bool]]:
    async def gone() -> bool:
        return await world.record(ref) is None

    return gone


@virtual
async def test_orders_are_carried_out_and_confirmed(world: World) -> None:
    world.start(world.machine())
    revision = await world.order(assignment())
    report = await world.until_ready()
    assert (report.assignment_rev, report.address, report.port) == (revision, "10.0.0.1", 20000)
    revision = await world.order(stopped(assignment()))

    async def confirmed() -> bool:
        return confirms_stop(await world.report(), order_rev=revision)

    await world.until(confirmed)
    await world.delete(Ref(Kind.ASSIGNMENT, SHARD))
    await world.until(_gone(world, REPORT))


@virtual
async def test_a_lost_order_makes_it_unassigned_and_its_return_adopted(world: World) -> None:
    machine = world.machine()
    world.start(machine)
    await world.order(assignment())
    await world.until_ready()
    await world.delete(Ref(Kind.ASSIGNMENT, SHARD))

    async def unassigned() -> bool:
        report = await world.report()
        return not report.assigned and report.order == assignment()

    await world.until(unassigned)
    [engine] = machine.running()
    revision = await world.order(assignment())

    async def assigned() -> bool:
        report = await world.report()
        return report.assigned and report.assignment_rev == revision and report.order is None

    await world.until(assigned)
    assert machine.running() == [engine]


@virtual
async def test_what_somebody_deleted_or_overwrote_is_published_again(world: World) -> None:
    world.start(world.machine())
    await world.order(assignment())
    report, facts = await world.until_ready(), Ref(Kind.FACTS, "n1")
    await world.delete(facts)
    await world.store.txn([], [PutOp(key=keys.key(REPORT), value=b"{bad")])

    async def again() -> bool:
        item = await world.store.get(keys.key(REPORT))
        return await world.record(facts) is not None and item is not None and item.value != b"{bad"

    await world.until(again)
    assert await world.report() == report


@virtual
async def test_c07_a_second_agent_of_the_name_is_refused_and_disturbs_nothing(world: World) -> None:
    first, second = world.machine(), world.machine("copy", address="10.0.0.2")
    await world.order(assignment())
    agent = world.start(first)
    report = await world.until_ready()
    session = await world.session()
    # A copied data directory: the same saved state, another machine.
    second.disk = first.disk
    with said() as lines:
        world.start(second)
        await anyio.sleep(200)
    assert any("held by the agent at 10.0.0.1" in line for line in lines)
    assert second.running() == []
    assert await world.session() == session
    assert await world.report() == report
    assert len(first.running()) == 1
    # Once the first is really gone, the name may be taken.
    agent.kill()

    async def taken() -> bool:
        record = await world.record(SESSION)
        return isinstance(record, Session) and record.address == "10.0.0.2"

    await world.until(taken, within_s=120)


@virtual
async def test_c07_a_copy_on_the_same_machine_does_not_take_over_what_runs(world: World) -> None:
    first = world.machine()
    await world.order(assignment())
    world.start(first)
    await world.until_ready()
    copy = world.machine("copy", address="10.0.0.1")
    copy.disk = msgspec.structs.replace(_state(first), boot_id=copy.boot_id)  # one machine, one boot
    with said() as lines:
        world.start(copy)
        await anyio.sleep(60)
    assert any("the data directory is a copy" in line for line in lines)
    assert copy.running() == []
    assert len(first.running()) == 1


@virtual
async def test_c07_a_cloned_machine_does_not_take_over_the_session(world: World) -> None:
    first, clone = world.machine(), world.machine(address="10.0.0.2")
    agent = world.start(first)
    session = await world.until_session()
    # All of the disk was cloned: the same files at the same places, the saved lease with them; another boot.
    clone.disk, clone.boots = first.disk, 7
    with said() as lines:
        world.start(clone)
        await anyio.sleep(100)
    assert any("held by the agent at 10.0.0.1" in line for line in lines)
    assert await world.session() == session
    assert agent.host.data == f"259:{clone.name}"


def _state(machine: Machine) -> Any:
    assert machine.disk is not None
    return machine.disk


@virtual
async def test_b11_an_agent_that_comes_back_resumes_its_session_and_its_engines(world: World) -> None:
    machine = world.machine()
    await world.order(assignment())
    agent = world.start(machine)
    before = await world.until_ready()
    first = await world.store.get(keys.key(SESSION))
    agent.kill()
    await anyio.sleep(5)
    world.start(machine)

    async def resumed() -> bool:
        item = await world.store.get(keys.key(SESSION))
        return first is not None and item is not None and item.mod_revision > first.mod_revision

    await world.until(resumed, within_s=10)
    second = await world.store.get(keys.key(SESSION))
    assert first is not None
    assert second is not None
    # Never gone in between: nobody saw the node leave.
    assert (second.create_revision, second.lease) == (first.create_revision, first.lease)
    assert await world.report() == before
    assert len(machine.engines) == 1


@virtual
async def test_after_a_reboot_the_old_session_is_waited_out(world: World) -> None:
    machine = world.machine()
    agent = world.start(machine)
    old = await world.until_session()
    agent.kill()
    machine.power_off()
    machine.power_on()
    world.start(machine)
    await anyio.sleep(10)
    assert await world.session() == old

    async def fresh() -> bool:
        record = await world.record(SESSION)
        return isinstance(record, Session) and record.boot_id == machine.boot_id

    await world.until(fresh)


@virtual
async def test_a11_a_revoked_lease_is_replaced_and_no_engine_touched(world: World) -> None:
    machine = world.machine()
    await world.order(assignment())
    world.start(machine)
    before = await world.until_ready()
    session = await world.session()
    await world.store.revoke(session.lease)

    async def again() -> bool:
        record = await world.record(SESSION)
        return isinstance(record, Session) and record.lease != session.lease

    await world.until(again, within_s=10)
    assert await world.report() == before
    assert len(machine.engines) == 1


@virtual
async def test_a01_without_the_store_engines_run_and_a_crashed_one_is_restarted(world: World) -> None:
    machine = world.machine()
    await world.order(assignment())
    agent = world.start(machine)
    before = await world.until_ready()
    agent.store.link = Link.SILENT
    await anyio.sleep(90)
    assert await world.record(SESSION) is None
    [engine] = machine.running()
    engine.end(anyio.current_time(), "SIGSEGV: it crashed")
    await anyio.sleep(30)
    [second] = machine.running()
    assert (second is not engine, second.port) == (True, engine.port)
    agent.store.link = Link.UP
    await world.until_ready(within_s=60)
    await world.until_session()
    report = await world.report()
    assert report.attempts == 1
    assert report.incarnation != before.incarnation


@virtual
async def test_saved_orders_are_started_after_a_reboot_without_the_store(world: World) -> None:
    machine = world.machine()
    await world.order(assignment())
    agent = world.start(machine)
    await world.until_ready()
    agent.kill()
    machine.power_off()
    machine.power_on()
    world.start(machine, link=Link.REFUSED)
    await anyio.sleep(10)
    [engine] = machine.running()
    assert engine.port == 20000


@virtual
async def test_another_incarnation_of_the_store_gets_a_full_report_and_costs_no_engine(world: World) -> None:
    machine = world.machine()
    empty = world.cluster.snapshot()  # as it was set up
    world.start(machine)
    await world.order(assignment())
    await world.until_ready()
    world.cluster.restore(empty)
    await world.put((META, StoreMeta(incarnation="store-2")))

    async def moved() -> bool:
        record = await world.record(SESSION)
        return isinstance(record, Session) and record.store == "store-2"

    await world.until(moved, within_s=30)
    report = await world.report()
    assert (report.phase, report.assigned, report.order) == (ShardPhase.READY, False, assignment())
    assert len(machine.engines) == 1


@virtual
async def test_an_older_state_of_the_same_store_is_ignored(world: World) -> None:
    machine = world.machine()
    world.start(machine)
    await world.order(assignment())
    await world.until_ready()
    older = world.cluster.snapshot()
    await world.order(stopped(assignment()))
    await anyio.sleep(30)
    assert machine.running() == []
    # Restored behind everybody's back, without a new incarnation: it orders what was stopped since.
    await world.order(assignment("m-bbbbb"))
    await anyio.sleep(10)
    world.cluster.restore(older)
    await world.order(stopped(assignment("m-bbbbb")))
    await anyio.sleep(20)
    assert [engine.shard for engine in machine.running()] == ["m-bbbbb.0"]


@virtual
async def test_records_of_what_is_not_here_go_with_the_full_report(world: World) -> None:
    stale = Ref(Kind.SHARD, "n1/gone-aaaaa.0")
    report = ShardReport(node="n1", replica="gone-aaaaa", rank=0, model="m", phase=ShardPhase.READY, phase_at=0.0)
    other = Ref(Kind.SHARD, "n10/gone-aaaaa.0")
    await world.put((stale, report), (other, msgspec.structs.replace(report, node="n10")))
    world.start(world.machine())
    await world.until_session()
    assert await world.record(stale) is None
    assert await world.record(other) is not None


@virtual
async def test_an_order_of_a_node_whose_name_is_not_ours_is_not_carried_out(world: World) -> None:
    first, second = world.machine(), world.machine("copy", address="10.0.0.2")
    world.start(first)
    await world.until_session()
    world.start(second)
    await world.order(assignment())
    await world.until_ready()
    await anyio.sleep(60)
    assert second.engines == []


@virtual
async def test_a_report_that_lands_late_does_not_undo_a_newer_one(world: World) -> None:
    agent = world.start(world.machine())
    await world.until_session()

    def is_report(ops: Any) -> bool:
        return any(isinstance(op, PutOp) and op.key == keys.key(REPORT) for op in ops)

    agent.store.judges.append(once(TxnFault(fate=Fate.LATE, delay_s=8.0), where=is_report))
    await world.order(assignment())
    ready = await world.until_ready()
    for _ in range(100):  # looked at often: what goes back is published again after a while
        await anyio.sleep(0.1)
        assert await world.report() == ready


@pytest.mark.parametrize("fate", list(Fate), ids=[fate.value for fate in Fate])
def test_a_registration_of_unknown_outcome_ends_registered(fate: Fate) -> None:
    @virtual
    async def test(world: World) -> None:
        agent = world.start(world.machine())
        agent.store.judges.append(once(TxnFault(fate=fate)))
        await world.order(assignment())
        await world.until_ready(within_s=90)
        session = await world.session()
        item = await world.store.get(keys.key(SESSION))
        assert item is not None
        assert item.lease == session.lease
        await anyio.sleep(100)
        assert await world.session() == session

    test()


@virtual
async def test_without_an_incarnation_it_waits(world: World) -> None:
    await world.delete(META)
    machine = world.machine()
    await world.order(assignment())
    with said() as lines:
        world.start(machine)
        await anyio.sleep(60)
    assert await world.record(SESSION) is None
    assert machine.engines == []
    assert any("waiting for the store's incarnation" in line for line in lines)
    await world.put((META, StoreMeta(incarnation="store-1")))
    await world.until_ready()


@virtual
async def test_a_corrupt_order_is_said_and_stops_nothing(world: World) -> None:
    machine = world.machine()
    world.start(machine)
    await world.order(assignment())
    await world.until_ready()
    with said() as lines:
        key = keys.key(Ref(Kind.ASSIGNMENT, SHARD))
        await world.store.txn([], [PutOp(key=key, value=b"{not json")])
        await anyio.sleep(30)
    assert any("can't be read" in line for line in lines)
    assert len(machine.running()) == 1
    report = await world.report()
    assert (report.phase, report.assigned) == (ShardPhase.READY, True)


@virtual
async def test_a_full_disk_refuses_starts_and_says_so(world: World) -> None:
    machine = world.machine()
    machine.disk_full = True
    world.start(machine)
    await world.order(assignment())

    async def failed() -> bool:
        record = await world.record(REPORT)
        return isinstance(record, ShardReport) and record.phase is ShardPhase.FAILED

    await world.until(failed)
    assert "No space left on device" in (await world.report()).reason
    assert machine.engines == []


@virtual
async def test_c07_a_renamed_agent_does_not_leave_its_engines_behind(world: World) -> None:
    machine = world.machine()
    agent = world.start(machine)
    await world.order(assignment())
    await world.until_ready()
    agent.kill()
    host, config = FakeHost(machine), agent_config(name="n2")
    with pytest.raises(Refused, match="engines of node 'n1' still run out of this data directory"):
        await run_agent(world.store, host, config, wall=world.wall, ids=SeededIds(stream(9, "agent")))
    # With nothing running it is simply another name.
    [engine] = machine.running()
    engine.end(anyio.current_time(), "")
    world.start(machine, name="n2")

    async def there() -> bool:
        return isinstance(await world.record(Ref(Kind.SESSION, "n2")), Session)

    await world.until(there)
    assert machine.running() == []


@virtual
async def test_on_exit_stop_takes_leave(world: World) -> None:
    machine = world.machine()
    agent = world.start(machine, on_exit="stop")
    await world.order(assignment())
    await world.until_ready()
    agent._scope.cancel()
    await world.until(_gone(world, SESSION), within_s=20)
    assert machine.running() == []
    assert (await world.report()).phase is ShardPhase.STARTING


@virtual
async def test_sixty_shards_are_reported_at_once(world: World) -> None:
    machine = world.machine()
    agent = world.start(machine, engine_ports=(20000, 20999))
    names = [f"m-{a}{b}aaa" for a in "abcdef" for b in "abcdefghij"]
    for name in names:
        await world.order(assignment(name))
    for name in names:
        await world.until_ready(Ref(Kind.SHARD, f"n1/{name}.0"))
    agent.kill()
    await world.until(_gone(world, SESSION))
    world.start(machine, engine_ports=(20000, 20999))
    await world.until_session()
    assert len(machine.engines) == 60


class said:  # noqa: N801  # reads as a word: `with said() as lines`
    """What is logged meanwhile, as text."""

    def __enter__(self) -> list[str]:
        lines: list[str] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(f"{record.getMessage()} {cast('Any', record).__dict__.get('fields', {})}")

        self._handler = Handler()
        logging.getLogger("llmgw_agent").addHandler(self._handler)
        return lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("llmgw_agent").removeHandler(self._handler)
