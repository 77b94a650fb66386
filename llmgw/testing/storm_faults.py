"""The faults of the simulation, one function each: strike, wait, undo. See `llmgw.testing.storm`.

`KINDS` is what a storm draws from; the first fault of every run is one of `LEADER_KINDS`.
"""

# ruff: noqa: D103  # a fault's name says what it does

from __future__ import annotations

from contextlib import suppress
from typing import Final

import anyio

from llmgw.core.record import StoreMeta
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Compacted
from llmgw.store import codec, keys
from llmgw.store.port import PutOp
from llmgw.testing.faults import Fate, Link, Operations, TxnFault, once
from llmgw.testing.storm import Fault, Storm
from llmgw.testing.storm_people import model_removed, model_rolled, model_scaled, node_cordoned, node_drained, scale

HEAD: Final = keys.key(Ref(Kind.HEAD))


def plans(operations: Operations) -> bool:
    """Whether a transaction is one of a leader's commits."""
    return any(isinstance(op, PutOp) and op.key == HEAD for op in operations)


# --- controllers ----------------------------------------------------------------------------------------------------


async def controller_killed(storm: Storm) -> None:
    leader = await storm.leader()
    await leader.kill()
    await anyio.sleep(storm.some(1, 60))
    leader.start()


async def controller_stopped(storm: Storm) -> None:
    leader = await storm.leader()
    await leader.stop()
    await anyio.sleep(storm.some(1, 60))
    leader.start()


async def controller_cut(storm: Storm) -> None:
    leader = await storm.leader()
    with storm.trouble(leader):
        leader.faulty.link = storm.random.choice([Link.REFUSED, Link.SILENT])
        await anyio.sleep(storm.some(10, 60))
        leader.faulty.heal()


async def controllers_gone(storm: Storm) -> None:
    controllers = storm.fleet.controllers
    for controller in controllers:
        await controller.kill()
    await anyio.sleep(storm.some(20, 120))
    for controller in controllers:
        controller.start()


async def mirror_lags_at_take_over(storm: Storm) -> None:
    leader = await storm.leader()
    others = [each for each in storm.fleet.controllers if each.running and each is not leader]
    with storm.trouble(*others):
        for other in others:
            other.faulty.watch_lag_s = storm.some(2, 20)
        await scale(storm)
        await anyio.sleep(storm.some(0.1, 2))
        await leader.kill()
        await anyio.sleep(storm.some(20, 40))
        for other in others:
            if other.running:
                other.faulty.heal()
    leader.start()


async def commit_lands_late(storm: Storm) -> None:
    leader = await storm.leader()
    fault = TxnFault(fate=Fate.LATE, delay_s=storm.some(0.5, 25))
    leader.faulty.judges.append(once(fault, where=plans))
    with storm.trouble(leader):
        await scale(storm)
        await anyio.sleep(30)


# --- the store ------------------------------------------------------------------------------------------------------


async def store_elects(storm: Storm) -> None:
    """A new leader of etcd renews every lease; until it is there calls fail."""
    with storm.trouble(store=True):
        storm.fleet.cluster.stop()
        await anyio.sleep(storm.some(0.5, 3))
        storm.fleet.cluster.start()
        await anyio.sleep(10)


async def store_gone(storm: Storm) -> None:
    with storm.trouble(store=True):
        storm.fleet.cluster.stop()
        await anyio.sleep(storm.some(10, 120))
        storm.fleet.cluster.start()
        await anyio.sleep(15)


async def store_restored(storm: Storm) -> None:
    """From a backup minutes old; half of the time by the book, with a new incarnation before anybody is let in."""
    if not storm.backups:
        return
    cluster, backup = storm.fleet.cluster, storm.random.choice(storm.backups)
    with storm.trouble(store=True):
        cluster.stop()
        await anyio.sleep(storm.some(0, 60))
        cluster.restore(backup)
        cluster.start()
        if storm.random.random() < 0.5:
            meta = StoreMeta(incarnation=f"restored-{storm.random.getrandbits(64):x}")
            cluster.commit([], [PutOp(key=keys.key(Ref(Kind.META)), value=codec.encode_stored(meta))], [])
        storm.backups.clear()
        await anyio.sleep(storm.some(5, 60))
        await storm.apply()
        await anyio.sleep(60)
        storm.doubt_gateway()  # a watch may take two stores for one when the later one is ahead


async def store_wiped(storm: Storm) -> None:
    cluster = storm.fleet.cluster
    with storm.trouble(store=True):
        cluster.stop()
        await anyio.sleep(storm.some(0, 60))
        cluster.restore(None)
        cluster.start()
        storm.backups.clear()
        await anyio.sleep(storm.some(5, 60))
        await storm.apply()
        await anyio.sleep(60)
        storm.doubt_gateway()


async def history_compacted(storm: Storm) -> None:
    """To the newest revision, and every watch was behind."""
    cluster = storm.fleet.cluster
    with storm.trouble(*storm.fleet.processes):
        if cluster.running:
            revision = cluster.revision
            with suppress(Compacted):  # nothing was written since it was done last
                cluster.compact(revision)
            for process in storm.fleet.processes:
                if process.running:
                    process.faulty.break_watches(Compacted(revision))
        await anyio.sleep(10)


# --- the way to the store -------------------------------------------------------------------------------------------


async def writes_uncertain(storm: Storm) -> None:
    """Some of one process's writes time out, applied, not applied or applied late."""
    process = storm.anyone()
    if process is None:
        return
    random = storm.random

    def judge(_: Operations) -> TxnFault | None:
        if random.random() < 0.7:
            return None
        return TxnFault(fate=random.choice(list(Fate)), delay_s=random.uniform(0.5, 20))

    with storm.trouble(process):
        judges = process.faulty.judges
        judges.append(judge)
        await anyio.sleep(storm.some(20, 90))
        judges.clear()
        await anyio.sleep(20)


async def keepalives_fail(storm: Storm) -> None:
    process = storm.anyone()
    if process is None:
        return
    with storm.trouble(process):
        process.faulty.keepalives_fail = True
        await anyio.sleep(storm.some(5, 60))
        process.faulty.keepalives_fail = False


async def events_lost(storm: Storm) -> None:
    """A watch loses events and nobody says so; only the periodic listing finds it."""
    process = storm.anyone()
    if process is None:
        return
    with storm.trouble(process):
        process.faulty.watches_lose = True
        await anyio.sleep(storm.some(1, 60))
        process.faulty.watches_lose = False
        await anyio.sleep(1.3 * storm.fleet.sizes.relist_s)


async def events_repeated(storm: Storm) -> None:
    process = storm.anyone()
    if process is not None:
        process.faulty.watches_repeat = True
        await anyio.sleep(storm.some(5, 60))
        process.faulty.watches_repeat = False


async def agent_cut(storm: Storm) -> None:
    """A node can't reach the store; sometimes until it is Lost."""
    agent = storm.anyone(storm.fleet.agents)
    if agent is None:
        return
    with storm.trouble(agent):
        agent.faulty.link = storm.random.choice([Link.REFUSED, Link.SILENT])
        await anyio.sleep(storm.random.choice([storm.some(5, 25), storm.some(40, 120), storm.some(350, 500)]))
        agent.faulty.heal()


async def gateway_cut(storm: Storm) -> None:
    gateway = storm.fleet.gateway
    with storm.trouble(gateway):
        gateway.faulty.link = Link.SILENT
        await anyio.sleep(storm.some(5, 100))
        gateway.faulty.heal()
        await anyio.sleep(10)


# --- machines and engines -------------------------------------------------------------------------------------------


async def agent_killed(storm: Storm) -> None:
    agent = storm.anyone(storm.fleet.agents)
    if agent is None:
        return
    await agent.kill()
    await anyio.sleep(storm.random.choice([storm.some(0.1, 10), storm.some(30, 90)]))
    restart_agent(storm, agent.name)


async def state_damaged(storm: Storm) -> None:
    """An agent is killed and finds its state file damaged."""
    n = storm.random.randrange(len(storm.fleet.agents))
    await storm.fleet.agents[n].kill()
    storm.fleet.machines[n].disk_damaged = True
    await anyio.sleep(storm.some(0.1, 20))
    restart_agent(storm, storm.fleet.agents[n].name)


async def disk_full(storm: Storm) -> None:
    machine = storm.random.choice(storm.fleet.machines)
    machine.disk_full = True
    await anyio.sleep(storm.some(10, 100))
    machine.disk_full = False


async def machine_rebooted(storm: Storm) -> None:
    n = storm.random.randrange(len(storm.fleet.machines))
    await storm.fleet.power_off(n)
    await anyio.sleep(storm.some(15, 120))
    storm.fleet.power_on(n)


async def machine_gone(storm: Storm) -> None:
    """For longer than it takes to be declared Lost."""
    n = storm.random.randrange(len(storm.fleet.machines))
    await storm.fleet.power_off(n)
    await anyio.sleep(storm.fleet.sizes.lost_after_s + storm.some(50, 200))
    storm.fleet.power_on(n)


async def engine_crashes(storm: Storm) -> None:
    engine = storm.engine()
    if engine is not None:
        storm.judge.tell(f"pid {engine.process.pid} of {engine.shard} crashes", name="storm")
        engine.end(anyio.current_time(), "killed by SIGSEGV")


async def engine_hangs(storm: Storm) -> None:
    engine = storm.engine()
    if engine is not None:
        storm.judge.tell(f"pid {engine.process.pid} of {engine.shard} hangs", name="storm")
        engine.hung = True


async def engines_in_trouble(storm: Storm) -> None:
    with storm.trouble(engines=True):
        engine = storm.engine()
        if engine is not None:
            engine.end(anyio.current_time(), "killed by SIGBUS")
        await anyio.sleep(storm.some(30, 200))


async def clock_steps(storm: Storm) -> None:
    process = storm.random.choice(storm.fleet.processes)
    process.skew_s = storm.random.choice([-600.0, -90.0, -5.0, 5.0, 90.0, 600.0])
    await anyio.sleep(storm.some(30, 200))
    process.skew_s = 0.0


def restart_agent(storm: Storm, name: str) -> None:
    """Unless its machine has no power; then it comes up with that."""
    n = next(n for n, agent in enumerate(storm.fleet.agents) if agent.name == name)
    if storm.fleet.machines[n].on:
        storm.fleet.agents[n].start()


LEADER_KINDS: Final[tuple[Fault, ...]] = (controller_killed, controller_stopped, controller_cut, controllers_gone)

KINDS: Final[tuple[Fault, ...]] = (
    *LEADER_KINDS,
    mirror_lags_at_take_over,
    commit_lands_late,
    store_elects,
    store_gone,
    store_restored,
    store_wiped,
    history_compacted,
    writes_uncertain,
    keepalives_fail,
    events_lost,
    events_repeated,
    agent_cut,
    gateway_cut,
    agent_killed,
    state_damaged,
    disk_full,
    machine_rebooted,
    machine_gone,
    engine_crashes,
    engine_hangs,
    engines_in_trouble,
    clock_steps,
    model_scaled,
    model_rolled,
    model_removed,
    node_cordoned,
    node_drained,
)
"""Every kind; a run over many seeds must have seen them all."""
