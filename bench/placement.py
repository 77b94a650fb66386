"""What the pure core costs: placing a whole fleet, a pass with nothing to do, and one change to a finished plan.

    bench/placement.py [--nodes N]… [--rounds 3]

One process and one core for each size, no store and no network: `reconcile()` as the controller calls it, its plans
folded back into the `Index` as the mirror would decode them, the agents' answers folded in likewise. Encoding, decoding
and the check of every placement (`llmgw.core.invariants`) lie outside the timed parts. Times are CPU time of the
process, so that whoever else uses the machine disturbs little; memory is the process's peak.

placed/s: replicas by the time of all passes from a fleet that nobody has judged yet to the last placement; longest:
the longest of these passes. settling: the longest while engines get ready, 100 between two passes. idle: a pass with
nothing to do. full: everything looked at and nothing to do, in slices. Then one change to a finished plan: a node's
facts, its session (its agent was restarted), its session's end, and a model that wants one replica more.

Last line, of the largest fleet: placements_per_s=… idle_pass_ms=… one_change_ms=… rss_mb=…
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from fleet import STORE, models, nodes

from llmgw.core.ids import CountedIds
from llmgw.core.invariants import check, claimed_bytes, require
from llmgw.core.liveness import observe
from llmgw.core.plan import Plan, Settings, View, WakeKey
from llmgw.core.reconcile import due, reconcile
from llmgw.core.record import Generation, Record, StoreMeta
from llmgw.core.replica import ReplicaPhase, ShardPhase, ShardReport
from llmgw.core.snapshot import Change, Dirty, Index, Kind, Ref
from llmgw.core.units import Now
from llmgw.store import codec
from llmgw.testing.apply import changes_of

SIZES = (100, 1_000, 10_000)
ROUNDS_NODES_MAX = 1_000
"""Up to this size the cold placement is repeated and the median counts; above, one takes long enough."""
IDLE_PASSES = 200
CHANGES = 50
ANSWERS = 100
"""Shard reports that come between two passes while everything starts."""


class Measured(msgspec.Struct, kw_only=True):
    """One fleet's figures."""

    nodes: int
    models: int
    placements: int
    per_s: float
    longest_ms: float
    settle_ms: float
    idle_ms: float
    full_ms: float
    slices: int
    slice_ms: float
    facts_ms: tuple[float, float]
    session_ms: tuple[float, float]
    unreachable_ms: tuple[float, float]
    model_ms: tuple[float, float]
    rss_mb: float


class Leader:
    """A leader's loop without its store: what it remembers between passes, and how long they take."""

    def __init__(self) -> None:
        self.index = Index()
        self.now = Now(wall_s=1_000_000.0, mono_s=100.0)
        self.view = View()
        self.ids = CountedIds()
        self.settings = Settings()
        self.left = Dirty()
        self.wakes: dict[WakeKey, float] = {}
        self.took_s: list[float] = []

    def fold(self, changes: Iterable[tuple[Ref, Record | None]]) -> float:
        """Other people's records, one revision; the seconds it took to fold them in."""
        revision = self.index.revision + 1
        made: list[Change] = []
        for ref, record in changes:
            row = self.index.row(ref)
            created = revision if row is None else row.create_revision
            made.append(Change(ref=ref, mod_revision=revision, create_revision=created, record=again(ref, record)))
        start = time.process_time()
        self.index.apply(made, revision=revision)
        return time.process_time() - start

    def step(self) -> Plan:
        """A pass over what is dirty, committed; its time, the fold of its own plan included, is noted."""
        self.now = Now(wall_s=self.now.wall_s + 0.1, mono_s=self.now.mono_s + 0.1)
        start = time.process_time()
        dirty, self.left = self.left, Dirty()
        dirty.add(self.index.take_dirty())
        dirty.add(due(self.wakes, now=self.now))
        self.view = observe(self.view, self.index, now=self.now)
        plan = reconcile(self.index, dirty, now=self.now, view=self.view, ids=self.ids, settings=self.settings)
        took_s = time.process_time() - start
        self.left = plan.left
        self.wakes |= plan.wake_mono_s
        for group in plan.groups:
            revision = self.index.revision + 1
            changes = [
                msgspec.structs.replace(each, record=again(each.ref, each.record))
                for each in changes_of(self.index, group, revision=revision)
            ]
            start = time.process_time()
            self.index.apply(changes, revision=revision)
            took_s += time.process_time() - start
            require(check(self.index, around=[each.ref for each in changes]))
        self.took_s.append(took_s)
        return plan

    def settle(self) -> list[float]:
        """Passes until there is nothing more; how long each took."""
        mark = len(self.took_s)
        while self.left or self.index.dirty or mark == len(self.took_s):
            self.step()
        return self.took_s[mark:]


def again(ref: Ref, record: Record | None) -> Record | None:
    """A record as the mirror would have it: decoded from what the store keeps, sharing nothing."""
    return None if record is None else codec.decode(ref, codec.encode_stored(record))


def cold(count: int) -> tuple[Leader, int, list[float]]:
    """A fleet that has just come up under a new leader, everything placed; and the time of each pass."""
    catalog = models(count)
    leader = Leader()
    leader.fold([(Ref(Kind.META), StoreMeta(incarnation=STORE)), (Ref(Kind.GENERATION), Generation(number=1))])
    leader.fold(nodes(count, catalog))
    leader.fold((Ref(Kind.MODEL, spec.name), spec) for spec in catalog)
    took_s = leader.settle()
    verify(leader.index, wanted=count)
    return leader, len(catalog), took_s


def verify(index: Index, *, wanted: int) -> None:
    """Every replica is placed, and the whole tree keeps its promises, memory included."""
    require(check(index))
    assert len(index.replicas) == wanted, f"{len(index.replicas)} of {wanted} replicas were placed"
    for name in index.replicas_on:
        facts = index.facts.record(name)
        assert facts is not None
        assert claimed_bytes(index, name) <= (facts.memory_bytes or 0), name


def answer(leader: Leader) -> list[float]:
    """Every engine gets ready, some at a time; how long the passes took."""
    took_s: list[float] = []
    names = leader.index.assignments.names()
    for first in range(0, len(names), ANSWERS):
        leader.fold(report(leader.index, name) for name in names[first : first + ANSWERS])
        took_s += leader.settle()
    assert all(replica.phase is ReplicaPhase.READY for replica in leader.index.replicas.records())
    return took_s


def report(index: Index, name: str) -> tuple[Ref, Record]:
    """What its node says of a shard that runs as ordered."""
    row = index.assignments[name]
    order = row.record
    assert order is not None
    return Ref(Kind.SHARD, name), ShardReport(
        node=order.node,
        replica=order.replica,
        rank=order.rank,
        model=order.model,
        phase=ShardPhase.READY,
        phase_at=1_000_000.0,
        assignment_rev=row.mod_revision,
        incarnation="7d1f0c52a3b94e68",
        address="10.0.0.1",
        port=20000,
        pid=4711,
        build=order.launch.build,
    )


def idle(leader: Leader) -> float:
    """A pass with nothing to do, the median of many, ms."""
    took_s = []
    for _ in range(IDLE_PASSES):
        plan = leader.step()
        assert plan.empty
        took_s.append(leader.took_s[-1])
    return 1e3 * statistics.median(took_s)


def full(leader: Leader) -> list[float]:
    """Everything looked at, nothing to do: the time of each slice, s."""
    leader.index.dirty.everything = True
    mark = len(leader.took_s)
    while leader.left or leader.index.dirty:
        assert leader.step().empty
    return leader.took_s[mark:]


def changes(leader: Leader, each: Iterable[list[tuple[Ref, Record | None]]]) -> tuple[float, float]:
    """From one change to a finished plan: median and worst, ms. Between two of them everything settles."""
    took_s = []
    for records in each:
        mark, folded_s = len(leader.took_s), leader.fold(records)
        while leader.step().more:
            pass
        took_s.append(folded_s + sum(leader.took_s[mark:]))
        leader.settle()
    return 1e3 * statistics.median(took_s), 1e3 * max(took_s)


def some(names: list[str], count: int = CHANGES) -> list[str]:
    """So many of them, from all over."""
    return [names[number * len(names) // count] for number in range(min(count, len(names)))]


def measure(count: int, rounds: int) -> Measured:
    """One fleet, from nothing to all its figures."""
    times = [sum(cold(count)[2]) for _ in range(rounds - 1 if count <= ROUNDS_NODES_MAX else 0)]
    leader, catalog, took_s = cold(count)
    times.append(sum(took_s))
    settled_s = answer(leader)
    index = leader.index
    busy = sorted(index.replicas_on)
    idle_ms, slices = idle(leader), full(leader)
    facts_ms = changes(leader, ([other_facts(index, name)] for name in some(busy)))
    session_ms = changes(leader, ([other_session(index, name)] for name in some(busy)))
    away = [(Ref(Kind.SESSION, name), index.sessions.record(name)) for name in some(busy)]
    unreachable_ms = changes(leader, ([(ref, None)] for ref, _ in away))
    changes(leader, ([each] for each in away))
    model_ms = changes(leader, ([other_model(index, name)] for name in some(index.models.names())))
    require(check(index))
    return Measured(
        nodes=count,
        models=catalog,
        placements=count,
        per_s=count / statistics.median(times),
        longest_ms=1e3 * max(took_s),
        settle_ms=1e3 * max(settled_s),
        idle_ms=idle_ms,
        full_ms=1e3 * sum(slices),
        slices=len(slices),
        slice_ms=1e3 * max(slices),
        facts_ms=facts_ms,
        session_ms=session_ms,
        unreachable_ms=unreachable_ms,
        model_ms=model_ms,
        rss_mb=peak_mb(),
    )


def other_facts(index: Index, name: str) -> tuple[Ref, Record]:
    """The node has a little less memory, and a warning."""
    facts = index.facts.record(name)
    assert facts is not None
    less = (facts.memory_bytes or 0) - 2**20
    return Ref(Kind.FACTS, name), msgspec.structs.replace(facts, memory_bytes=less, warnings=("swap is in use",))


def other_session(index: Index, name: str) -> tuple[Ref, Record]:
    """Its agent was restarted and has a new lease."""
    session = index.sessions.record(name)
    assert session is not None
    return Ref(Kind.SESSION, name), msgspec.structs.replace(session, lease=session.lease + 1_000_000, pid=815)


def other_model(index: Index, name: str) -> tuple[Ref, Record]:
    """One replica more is wanted."""
    spec = index.models.record(name)
    assert spec is not None
    more = spec.scaling.min + 1
    scaling = msgspec.structs.replace(spec.scaling, min=more, max=more)
    return Ref(Kind.MODEL, name), msgspec.structs.replace(spec, scaling=scaling)


def processor() -> str:
    """What this machine computes with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def peak_mb() -> float:
    """The most memory this process has had, MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("this system does not say how much memory a process has had")


def apart(count: int, options: argparse.Namespace) -> Measured:
    """`measure` in a process of its own, so that no fleet's memory is counted with another's."""
    command = [sys.executable, __file__, "--nodes", str(count), "--rounds", str(options.rounds), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"bench: the fleet of {count} nodes failed")
    return msgspec.json.decode(done.stdout, type=Measured)


def table(found: list[Measured]) -> None:
    """A line for each size; times in ms, `median/worst` where there are two."""
    print(
        f"{'nodes':>6} {'models':>6} {'placed/s':>8} {'longest':>8} {'settling':>8} {'idle':>7} "
        f"{'full (slices, longest)':>24} {'facts':>13} {'session':>13} {'unreachable':>13} {'model':>13} {'RSS':>7}"
    )
    for each in found:
        pairs = (each.facts_ms, each.session_ms, each.unreachable_ms, each.model_ms)
        changed = " ".join(f"{f'{median:.1f}/{worst:.1f}':>13}" for median, worst in pairs)
        print(
            f"{each.nodes:6} {each.models:6} {each.per_s:8.0f} {each.longest_ms:8.1f} {each.settle_ms:8.1f} "
            f"{each.idle_ms:7.2f} {f'{each.full_ms:.0f} ({each.slices}, {each.slice_ms:.1f})':>24} {changed} "
            f"{each.rss_mb:4.0f} MB"
        )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, action="append", help=f"fleet sizes (default {SIZES})")
    parser.add_argument("--rounds", type=int, default=3, help="cold placements of the small fleets; the median counts")
    parser.add_argument("--json", action="store_true", help="measure one size in this process")
    options = parser.parse_args()
    sizes = options.nodes or SIZES
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(measure(sizes[0], options.rounds)))
        return
    found = [apart(count, options) for count in sizes]
    print(
        f"{processor()}, {os.cpu_count()} CPUs, one of them used; Python {platform.python_version()}; "
        f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}; times in ms of CPU, median/worst"
    )
    table(found)
    last = found[-1]
    print(
        f"placements_per_s={last.per_s:.0f} idle_pass_ms={last.idle_ms:.2f} "
        f"one_change_ms={max(last.facts_ms[0], last.session_ms[0]):.2f} rss_mb={last.rss_mb:.0f}"
    )


if __name__ == "__main__":
    main()
