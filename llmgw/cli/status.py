"""`llmgw status`: who leads, what is ready, what is wrong, in a dozen lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from llmgw.cli.connection import Connection, read_index, store_options
from llmgw.cli.kinds import KINDS, UNKNOWN
from llmgw.cli.output import emit_as, say
from llmgw.cli.refusal_text import some
from llmgw.core.fleet import is_restoring, unreported
from llmgw.core.model_text import asleep
from llmgw.core.snapshot import Index, Kind
from llmgw.obs.clock import system_wall
from llmgw.store import codec

if TYPE_CHECKING:
    from llmgw.store.etcd import EtcdStore

_READ = (
    Kind.META,
    Kind.LEADER,
    Kind.FLEET,
    Kind.GENERATION,
    Kind.MODEL,
    Kind.MODEL_STATE,
    Kind.ALIAS,
    Kind.ENGINE,
    Kind.NODE_SPEC,
    Kind.NODE_STATE,
    Kind.SESSION,
    Kind.FACTS,
    Kind.REPLICA,
    Kind.RECOVER,
)


@click.command(name="status", short_help="Print how the cluster is.")
@click.option(
    "-o", "--output", "form", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True
)
@store_options
def status(*, connection: Connection, form: str) -> None:
    """Print how the cluster is: leader, guard, nodes, models, and records that can't be read."""
    connection.run(lambda store: _status(store, connection.config().endpoints, form=form))


async def _status(store: EtcdStore, endpoints: tuple[str, ...], *, form: str) -> None:
    index = await read_index(store, _READ)
    if form == "table":
        for label, text in _lines(index, endpoints, system_wall()):
            say(f"{label:<10}{text}")
    else:
        emit_as(form, _object(index, endpoints))


def _object(index: Index, endpoints: tuple[str, ...]) -> dict[str, Any]:
    fleet = None if index.fleet is None else index.fleet.record
    meta = None if index.meta is None else index.meta.record
    return {
        "endpoints": list(endpoints),
        "revision": index.revision,
        "incarnation": None if meta is None else meta.incarnation,
        "waiting_for": _waiting_for(index),
        "leader": None if index.leader is None else codec.to_public(index.leader.record),
        "term": None if index.leader is None else index.leader.create_revision,
        "guard": None if fleet is None else codec.to_public(fleet.guard),
        "nodes": {name: _liveness(index, name) for name in index.nodes()},
        "models": {name: codec.to_public(index.model_states.record(name)) for name in _models(index)},
        "replicas": dict(Counter(replica.phase.value for replica in index.replicas.records())),
        "corrupt": {f"{ref.kind.value}{ref.name}": why for ref, why in index.corrupt()},
    }


def _lines(index: Index, endpoints: tuple[str, ...], wall_s: float) -> Iterator[tuple[str, str]]:
    yield "etcd", f"{', '.join(endpoints)} at revision {index.revision}"
    if index.meta is None:
        yield "store", "new: no controller has been here"
    else:
        yield "store", UNKNOWN if index.meta.record is None else f"incarnation {index.meta.record.incarnation}"
    if (waiting_for := _waiting_for(index)) is not None:
        names = some(waiting_for) or "none any more"
        yield "restored", f"nothing is placed, stopped or pruned before these nodes have reported: {names}"
    leader = None if index.leader is None else index.leader.record
    if index.leader is None or leader is None:
        yield "leader", "none: what runs goes on running, and nothing new is decided"
    else:
        yield "leader", f"{leader.id} ({leader.address}), term {index.leader.create_revision}"
    fleet = None if index.fleet is None else index.fleet.record
    if fleet is None:
        yield "guard", UNKNOWN
    else:
        yield "guard", f"on: {fleet.guard.reason}" if fleet.guard.on else "off"
    nodes = Counter(_liveness(index, name) or "not judged yet" for name in index.nodes())
    yield "nodes", _counts(nodes)
    phases = (None if row.record is None else row.record.phase.value for row in index.replicas.values())
    yield "replicas", _counts(Counter(phase or "unreadable" for phase in phases))
    states = {name: index.model_states.record(name) for name in _models(index)}
    short = [name for name, state in states.items() if state is None or state.ready < state.wanted]
    sleeping = sum(bool(asleep(state)) for state in states.values())
    told = f"{len(states) - len(short)} of {len(states)} as wanted" + (f", {sleeping} asleep" if sleeping else "")
    yield "models", told if states else "none"
    for name in short:
        _, ready, *_, why = KINDS["models"].row(index, name, wall_s)
        unseen = UNKNOWN if name in index.model_states else "no controller has looked at it yet"
        told = unseen if states[name] is None else f"{ready} ready"
        yield "", f"{name}: {told}" + (f", {why}" if why else "")
    for ref, why in index.corrupt():
        yield "corrupt", f"/llmgw/{ref.kind.value}{ref.name}: {why}"


def _waiting_for(index: Index) -> list[str] | None:
    """The nodes that hold everything up after a restore; None while nothing does."""
    meta = None if index.meta is None else index.meta.record
    if meta is None or not is_restoring(index, meta.incarnation):
        return None
    recover = None if index.recover is None else index.recover.record
    ended = recover is not None and recover.incarnation == meta.incarnation
    return [] if ended else unreported(index, meta.incarnation)


def _liveness(index: Index, name: str) -> str | None:
    state = index.node_states.record(name)
    return None if state is None else state.liveness.value


def _models(index: Index) -> list[str]:
    return sorted({*index.models, *index.model_states})


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"
