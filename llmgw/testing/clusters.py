"""Random clusters as index content: machines of every sort, models of every shape, replicas in any phase of life.

A `Scene` is what Hypothesis draws: a tape for each thing in a cluster (`llmgw.testing.machines`) and the events that
follow (`llmgw.testing.happenings`); `scene_of` makes one from a seed.

Invariant: a cluster that was built breaks no invariant by itself. Claims fit what the machines have, whatever is the
matter with them by now, so that every violation found afterwards is the fault of what happened afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from hypothesis import strategies as st

from llmgw.core.catalog import ModelSpec, Profile, Task, launch_hash
from llmgw.core.gang_ports import PORTS
from llmgw.core.ids import replica_id, shard_name
from llmgw.core.invariants import check, require
from llmgw.core.node import Facts
from llmgw.core.record import Generation, Record
from llmgw.core.replica import (
    GONE,
    Assignment,
    Claim,
    Desired,
    EngineSecret,
    Gang,
    GpuClaim,
    Launch,
    Peer,
    Replica,
    ReplicaPhase,
    ReplicaShard,
    Retire,
    ShardPhase,
    ShardReport,
)
from llmgw.core.snapshot import Kind
from llmgw.testing.cluster import Cluster
from llmgw.testing.machines import TAPE_LEN, THEMES, Dice, cpu, node_records, spec_of
from llmgw.testing.seed import Random

NODES: Final = tuple(f"n{i}" for i in range(9))
MODELS: Final = ("a", "b", "org/c", "d", "e")
GONE_MODEL: Final = "gone"
"""A model that replicas run, and that the catalog does not have any more."""

EVENT_LEN: Final = 8
"""Bytes of the tape of an event."""

Records = list[tuple[Kind, str, Record | None]]

LIVE: Final = (ReplicaPhase.READY, ReplicaPhase.STARTING, ReplicaPhase.PLACED)
LEAVING: Final = (ReplicaPhase.DRAINING, ReplicaPhase.STOPPING, ReplicaPhase.FAILED)


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster is built from, a tape for each thing in it, and what happens to it afterwards.

    `theme`: what there is most of, one of `llmgw.testing.machines.THEMES`.
    """

    theme: str = "general"
    machines: tuple[bytes, ...] = ()
    models: tuple[bytes, ...] = ()
    residents: tuple[bytes, ...] = ()
    events: tuple[tuple[str, bytes], ...] = ()


def scenes(names: Sequence[str], *, events_min: int = 0, events_max: int = 30) -> st.SearchStrategy[Scene]:
    """Scenes whose events have these names; a name given twice happens twice as often.

    Hypothesis draws lists barely longer than their least length, so that is what makes clusters worth a look.
    """
    # Plain things with a twist, and things of which everything is drawn: each alone would leave too much out.
    tape = st.binary(max_size=TAPE_LEN) | st.binary(min_size=TAPE_LEN, max_size=TAPE_LEN)
    events = st.lists(st.tuples(st.sampled_from(names), st.binary(max_size=EVENT_LEN)), min_size=events_min,
                      max_size=events_max)  # fmt: skip
    return st.builds(
        Scene,
        theme=st.sampled_from(list(THEMES)),
        machines=st.lists(tape, min_size=3, max_size=len(NODES) - 1).map(tuple),
        models=st.lists(tape, min_size=2, max_size=len(MODELS)).map(tuple),
        residents=st.lists(tape, max_size=6).map(tuple),
        events=events.map(tuple),
    )


def scene_of(random: Random, *, machines: int, models: int, residents: int) -> Scene:
    """A scene without events from a source of chance."""
    return Scene(
        theme=random.choice(list(THEMES)),
        machines=tuple(random.randbytes(TAPE_LEN) for _ in range(machines)),
        models=tuple(random.randbytes(TAPE_LEN) for _ in range(models)),
        residents=tuple(random.randbytes(TAPE_LEN) for _ in range(residents)),
    )


def build(scene: Scene) -> Cluster:
    """The cluster that a scene begins with, before its events.

    Raises:
        InvariantError: it would break an invariant from the start, which is a bug of this module.
    """
    c, theme = Cluster(), THEMES[scene.theme]
    machines = zip(NODES, scene.machines, strict=False)
    c.meddle(*(record for name, tape in machines for record in node_records(c, name, Dice(tape, theme))))
    models = zip(MODELS, scene.models, strict=False)
    specs = [(Kind.MODEL, name, spec_of(name, Dice(tape, theme))) for name, tape in models]
    c.meddle((Kind.GENERATION, "", Generation(number=1)), *specs)
    for tape in scene.residents:
        move_in(c, Dice(tape, theme))
    require(check(c.index))
    return c


# --- residents: replicas that a leader before us has placed ---------------------------------------------------------


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Room for one shard: a node and what it would hold there."""

    node: str
    claim: Claim


def move_in(c: Cluster, dice: Dice) -> None:
    """A replica in any phase joins the tree, whole or with records missing; nothing happens where none has room."""
    name = dice.pick((*c.index.models.names(), GONE_MODEL))
    spec = c.index.models.record(name) or spec_of(GONE_MODEL, Dice(b"\0" + bytes(dice.below(256) for _ in range(8))))
    profile = dice.pick(spec.profiles or (cpu(dice),))
    missing = dice.pick((*[""] * 8, "an order", "all orders", "secret", "replica", "all", "all"))
    seats = _seats(c, profile, dice, crowded=missing == "all" and dice.one_in(2))
    if not seats:
        return
    replica, orders = _resident(c, spec, profile, seats, dice)
    secret = EngineSecret(replica=replica.id, key=orders[0].engine_key)
    records: Records = [(Kind.REPLICA, replica.id, replica)] if missing not in ("replica", "all") else []
    records += [(Kind.SECRET, replica.id, secret)] if missing not in ("secret", "all") else []
    kept = {"an order": orders[1:], "all orders": [], "all": []}.get(missing, orders)
    released = {shard.rank for shard in replica.shards if shard.released}
    kept = [order for order in kept if order.rank not in released]
    c.meddle(*records, *((Kind.ASSIGNMENT, _name(order), order) for order in kept))
    c.meddle(*_reports(c, orders, dice))


def _seats(c: Cluster, profile: Profile, dice: Dice, *, crowded: bool) -> list[Seat]:
    """Seats for all shards of a profile, of one class and, for a gang, of one fabric; `crowded`: whoever sits there."""
    room = [seat for facts in c.index.facts.records() for seat in _room(c, facts, profile, crowded=crowded)]
    groups: dict[tuple[str, str], dict[str, Claim]] = {}
    for fabric, gpu_class, seat in room:
        groups.setdefault((fabric, gpu_class), {})[seat.node] = seat.claim
    fitting = [group for _, group in sorted(groups.items()) if len(group) >= profile.nodes]
    if not fitting:
        return []
    group = dice.pick(fitting)
    names, first = sorted(group), dice.below(len(group))
    return [Seat(node=name, claim=group[name]) for name in [*names[first:], *names[:first]][: profile.nodes]]


def _room(c: Cluster, facts: Facts, profile: Profile, *, crowded: bool) -> Iterator[tuple[str, str, Seat]]:
    """What one node has room for: (fabric, GPU class, seat). Health does not count, it may have been better once."""
    claims = [] if crowded else list(_claims(c, facts.node))
    total, needed = facts.memory_bytes, profile.memory_bytes
    promised = sum(claim.memory_bytes or 0 for claim in claims)
    if total is not None and total >= 0 and needed is not None and promised + needed > total:
        return
    taken = {gpu.uuid for claim in claims for gpu in claim.gpus}
    uuids = [gpu.uuid for gpu in facts.gpus or ()]
    fabrics = {fabric.name: fabric.hcas for fabric in facts.fabrics} if profile.nodes > 1 else {"": ()}
    for gpu_class in sorted({gpu.gpu_class for gpu in facts.gpus or ()}) if profile.gpus_per_node else [""]:
        free = [
            gpu.uuid
            for gpu in facts.gpus or ()
            if gpu.gpu_class == gpu_class and gpu.uuid not in taken and uuids.count(gpu.uuid) == 1
        ]
        if len(free) < profile.gpus_per_node:
            continue
        gpus = tuple(GpuClaim(uuid=uuid) for uuid in free[: profile.gpus_per_node])
        for fabric, hcas in fabrics.items():
            claim = Claim(memory_bytes=needed, gpus=gpus, hcas=hcas)
            yield fabric, gpu_class, Seat(node=facts.node, claim=claim)


def _claims(c: Cluster, node: str) -> Iterator[Claim]:
    """All that anybody holds on a node by any record, so that a seat is really free."""
    for replica in c.index.replicas.records():
        yield from (shard.claim for shard in replica.shards if shard.node == node and not shard.released)
    yield from (order.claim for order in c.index.assignments.records() if order.node == node)
    for report in c.index.reports.records():
        if report.node == node and report.order is not None:
            yield report.order.claim


def _resident(
    c: Cluster, spec: ModelSpec, profile: Profile, seats: list[Seat], dice: Dice
) -> tuple[Replica, list[Assignment]]:
    """A replica in some phase, with the orders it has by then."""
    phase = dice.pick((*LIVE, ReplicaPhase.READY, *LEAVING))
    leaving = phase in LEAVING
    digest = launch_hash(spec, profile) if not dice.one_in(6) else "0123456789abcdef"
    build = dice.pick(({"llama.cpp": "llama.cpp@b1", "vllm": "vllm@v1"}.get(profile.engine), None, "llama.cpp@b0"))
    name, key = replica_id(spec.name, c.ids.suffix()), c.ids.key()
    part = len(seats) > 1 and leaving and dice.one_in(3)
    shards = tuple(
        ReplicaShard(rank=rank, node=seat.node, claim=seat.claim, released=part and rank == len(seats) - 1)
        for rank, seat in enumerate(seats)
    )
    record = Replica(
        id=name,
        model=spec.name,
        profile=profile.name,
        engine=profile.engine,
        launch=digest,
        phase=phase,
        shards=shards,
        created_at=c.now.wall_s - 1000.0 + c.ids.count,
        phase_at=c.now.wall_s - dice.pick((900.0, 3.0)),
        build=build,
        fabric=_fabric(c, seats),
        retire=dice.pick(tuple(Retire)) if leaving else None,
    )
    launch = Launch(
        source=spec.source,
        task=Task.GENERATE,
        profile=profile.name,
        engine=profile.engine,
        build=build,
        context=profile.context,
        slots=profile.slots,
        nodes=profile.nodes,
        gpus_per_node=profile.gpus_per_node,
        tensor_parallel=profile.tensor_parallel,
        pipeline_parallel=profile.pipeline_parallel,
        digest=digest,
    )
    held = phase is ReplicaPhase.PLACED and len(seats) > 1 and dice.one_in(2)
    ordered = not dice.one_in(8)  # or the order to stop got lost
    wanted = Desired.STOPPED if leaving and ordered else Desired.RUNNING
    gang = _gang(c, record)
    record = msgspec.structs.replace(record, ports=None if gang is None else gang.block)
    orders = [
        Assignment(
            node=shard.node,
            replica=name,
            rank=shard.rank,
            model=spec.name,
            desired=Desired.HELD if held and shard.rank == 0 else wanted,
            launch=launch,
            claim=shard.claim,
            engine_key=key,
            gang=gang,
        )
        for shard in shards
    ]
    return record, orders


def _fabric(c: Cluster, seats: list[Seat]) -> str | None:
    """The fabric that the seats of a gang share; the one with their HCAs where there are several."""
    if len(seats) == 1:
        return None
    facts = [(seat, c.index.facts.record(seat.node)) for seat in seats]
    sets = [{each.name for each in known.fabrics if each.hcas == seat.claim.hcas} for seat, known in facts if known]
    return min(set.intersection(*sets))


def _gang(c: Cluster, replica: Replica) -> Gang | None:
    """How the members of a gang find each other; its ports are nobody else's."""
    if replica.fabric is None:
        return None
    peers = tuple(Peer(rank=shard.rank, node=shard.node, address="127.0.0.1") for shard in replica.shards)
    first = 21000 + PORTS * len(c.index.replicas)
    return Gang(fabric=replica.fabric, peers=peers, ports=tuple(range(first, first + PORTS)))


RUNS: Final = (
    ShardPhase.READY, ShardPhase.READY, ShardPhase.STARTING, None, ShardPhase.FAILED, ShardPhase.STOPPED,
)  # fmt: skip
STOPS: Final = (
    ShardPhase.DRAINING, ShardPhase.STOPPED, ShardPhase.STOPPING, ShardPhase.READY, ShardPhase.FAILED, None,
)  # fmt: skip


def _reports(c: Cluster, orders: list[Assignment], dice: Dice) -> Records:
    """What the nodes say of these shards: nothing, something old, something new, or that nobody ordered them."""
    records: Records = []
    for order in orders:
        name = _name(order)
        row = c.index.assignments.get(name)
        phase = dice.pick(STOPS if order.desired is Desired.STOPPED else RUNS)
        if order.desired is Desired.HELD:
            phase = dice.pick((ShardPhase.HELD, None))
        old, forgotten = dice.one_in(6), dice.one_in(3)
        if phase is None:
            continue
        report = ShardReport(
            node=order.node,
            replica=order.replica,
            rank=order.rank,
            model=order.model,
            phase=phase,
            phase_at=c.now.wall_s,
            assigned=row is not None,
            assignment_rev=0 if row is None else row.mod_revision - old,
            order=order if row is None and not forgotten else None,
            incarnation="i1",
            address="127.0.0.1",
            port=20000,
            pid=None if phase in GONE or phase is ShardPhase.HELD else 4711,
        )
        records.append((Kind.SHARD, name, report))
        if phase not in GONE:
            c.saved[name] = order
    return records


def _name(order: Assignment) -> str:
    return shard_name(order.node, order.replica, order.rank)
