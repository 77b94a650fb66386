"""What befalls controllers, the store and the way to it: one function each, which strikes, waits and undoes it.

See `llmgw.testing.storm`. `llmgw.testing.storm_kinds` lists all faults.
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
from llmgw.store.port import DeleteOp, PutOp
from llmgw.testing.faults import Fate, Link, Operations, TxnFault, once
from llmgw.testing.storm import Storm
from llmgw.testing.storm_people import scale

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


async def controller_paused(storm: Storm) -> None:
    """Frozen with whatever it was about to write, which it writes when it goes on."""
    leader = await storm.leader()
    with storm.trouble(leader):
        await scale(storm)
        await anyio.sleep(storm.some(0, 1))
        leader.faulty.link = Link.FROZEN
        await anyio.sleep(storm.some(1, 60))
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


async def sessions_deleted(storm: Storm) -> None:
    """All leases of nodes end at once, while all agents run."""
    cluster = storm.fleet.cluster
    if cluster.running:
        for session in list(storm.judge.checker.index.sessions.records()):
            cluster.revoke(session.lease)


async def reports_deleted(storm: Storm) -> None:
    """Somebody deletes what a node has said of itself and of all that runs on it."""
    cluster, name = storm.fleet.cluster, storm.random.choice(storm.fleet.machines).name
    if cluster.running:
        facts = DeleteOp(key=keys.key(Ref(Kind.FACTS, name)))
        cluster.commit([], [facts, DeleteOp(key=keys.shards_of(name), prefix=True)], [])


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


async def watch_delayed(storm: Storm) -> None:
    process = storm.anyone()
    if process is None:
        return
    with storm.trouble(process):
        process.faulty.watch_lag_s = storm.some(0.5, 20)
        await anyio.sleep(storm.some(20, 90))
        process.faulty.watch_lag_s = 0.0
        await anyio.sleep(20)


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
