"""What the cluster page shows, as plain data: one row a node and a model, texts ready to be escaped and printed.

Read from one mirror and one status in one go, so a page never mixes two moments. Unknown shows as `-`, never as 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from llmgw.core.gpu import flaws
from llmgw.core.inventory import node_inventory
from llmgw.core.model_text import asleep, range_text, why_now
from llmgw.core.node import Liveness, NodeState, credible
from llmgw.core.refusal_words import render_at
from llmgw.core.replica import Replica
from llmgw.core.snapshot import Index
from llmgw.core.units import Now, format_number, format_used
from llmgw.obs.status import ControllerStatus

STALE_S = 15.0
"""A mirror without a word for so long is called old. The store's progress notify comes every 2 s."""

PROBLEMS_MAX = 20
"""Corrupt records named on the page; the count is always whole."""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `memory`: how much of it is claimed; `memory_share`: the same, 0 to 1, None when that is unknown."""

    name: str
    liveness: str
    since: str
    reason: str
    address: str
    cpus: str
    memory: str
    memory_share: float | None
    shards: int
    notes: tuple[str, ...]


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, in the row of its model."""

    id: str
    phase: str
    nodes: str
    reason: str


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `why`: lines that say what keeps it from what is wanted."""

    name: str
    source: str
    ready: str
    wanted: str
    short: bool
    replicas: tuple[ReplicaRow, ...]
    why: tuple[str, ...]


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster page. `alerts` come first and say what a person should know before reading on.

    `known` false: nothing was read from the store yet, so that no row means nothing.
    """

    id: str
    role: str
    leader: str
    term: str
    age: str
    known: bool
    revision: str
    incarnation: str
    version: str
    alerts: tuple[str, ...]
    nodes: tuple[NodeRow, ...]
    models: tuple[ModelRow, ...]
    aliases: tuple[tuple[str, str], ...]


def page(status: ControllerStatus, now: Now) -> Page:
    """The page as of `now`."""
    mirror = status.mirror
    index = Index() if mirror is None else mirror.index
    known = mirror is not None and mirror.ready
    leader = None if index.leader is None else index.leader.record
    meta = None if index.meta is None else index.meta.record
    age_s = None if mirror is None else mirror.age_s
    return Page(
        id=status.leader.id,
        role="standby" if status.term is None else "leader",
        leader="-" if leader is None else f"{leader.id} ({leader.address})",
        term="-" if index.leader is None else str(index.leader.create_revision),
        age=_age(age_s),
        known=known,
        revision=str(index.revision) if known else "-",
        incarnation="-" if meta is None else meta.incarnation,
        version=status.leader.version,
        alerts=tuple(_alerts(status, index, age_s, now)),
        nodes=tuple(_node(index, name, now) for name in index.nodes()),
        models=tuple(
            _model(index, name, now) for name in sorted({*index.models, *index.model_states, *index.replicas_of})
        ),
        aliases=tuple((alias.name, alias.model) for alias in index.aliases.records()),
    )


def _alerts(status: ControllerStatus, index: Index, age_s: float | None, now: Now) -> Iterator[str]:
    if status.mirror is None or not status.mirror.ready or age_s is None:
        yield "Nothing was read from etcd yet: what follows is empty because it is unknown."
    elif age_s > STALE_S:
        yield f"etcd has said nothing for {_age(age_s)}: what follows is at least that old."
    if (why := status.unhealthy(now.mono_s)) is not None:
        yield f"This controller {why}."
    if index.revision and index.leader is None:
        yield "No controller leads: what runs goes on running, and nothing new is decided."
    fleet = None if index.fleet is None else index.fleet.record
    if fleet is not None and fleet.guard.on:
        yield f"The guard is on: no node is declared lost. {fleet.guard.reason}"
    corrupt = index.corrupt()
    for ref, reason in corrupt[:PROBLEMS_MAX]:
        yield f"Corrupt record {ref.kind.value}{ref.name}: {reason}"
    if len(corrupt) > PROBLEMS_MAX:
        yield f"{len(corrupt) - PROBLEMS_MAX} more corrupt records."


def _node(index: Index, name: str, now: Now) -> NodeRow:
    state, facts, session = index.node_states.record(name), index.facts.record(name), index.sessions.record(name)
    spec = index.node_specs.record(name)
    total, claimed = None if facts is None else credible(facts.memory_bytes), node_inventory(index, name).claimed_bytes
    notes = [word for word, on in (("cordoned", spec and spec.cordon), ("draining", spec and spec.drain)) if on]
    if facts is not None and (wrong := flaws(facts)):
        notes.append(f"its facts can't be true: {', '.join(wrong)}")
    return NodeRow(
        name=name,
        liveness="-" if state is None else state.liveness.value,
        since=_since(state, now),
        reason="" if state is None or state.liveness is Liveness.READY else state.reason,
        address="-" if session is None else session.address,
        cpus=format_number(None if facts is None else credible(facts.cpus)),
        memory=format_used(claimed, total),
        memory_share=min(1.0, claimed / total) if total else None,
        shards=len(index.reports_on.get(name, ())),
        notes=(*notes, *(() if facts is None else facts.warnings)),
    )


def _model(index: Index, name: str, now: Now) -> ModelRow:
    spec, state = index.models.record(name), index.model_states.record(name)
    replicas = [index.replicas.record(one) for one in sorted(index.replicas_of.get(name, ()))]
    why = []
    if spec is None:
        why.append("not in the catalog any more")
    if state is not None and state.reason:
        why.append(why_now(state, now.wall_s))
    if sleeps := asleep(state):
        why.append(sleeps)
    if state is not None and state.unplaced is not None:
        why += [render_at(refusal) for refusal in state.unplaced.nearest]
    return ModelRow(
        name=name,
        source="-" if spec is None else spec.source,
        ready="-" if state is None else str(state.ready),
        wanted="-" if state is None else f"{state.wanted}{range_text(spec)}",
        short=state is None or state.ready < state.wanted,
        replicas=tuple(_replica(one) for one in replicas if one is not None),
        why=tuple(why),
    )


def _replica(replica: Replica) -> ReplicaRow:
    nodes = ", ".join(shard.node for shard in replica.shards)
    return ReplicaRow(id=replica.id, phase=replica.phase.value, nodes=nodes, reason=replica.reason)


def _since(state: NodeState | None, now: Now) -> str:
    return "-" if state is None else _age(now.wall_s - state.since_at)


def _age(seconds: float | None) -> str:
    """A duration for people, in its largest unit; a clock that stepped back shows as 0 s."""
    if seconds is None:
        return "-"
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
