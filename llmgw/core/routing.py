"""Which engine may answer for which name: the route table, folded purely from plan and node records.

Routable = the replica's phase is placed, starting or ready in the plan, its rank-0 shard is ready with address, port
and incarnation, and its key is known. No leader is needed for a new engine to become routable, and records may arrive
in any order: a shard without its replica or secret is not routable yet.
"""

from __future__ import annotations

import msgspec

from llmgw.core.catalog import Alias, ModelSpec, Task
from llmgw.core.ids import Secret, shard_name
from llmgw.core.replica import ROUTABLE, Replica, ShardPhase, ShardReport
from llmgw.core.snapshot import Index, Kind, Ref


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One running engine. `incarnation` changes with every start of it, so a stale route can be told."""

    replica: str
    model: str
    engine: str = ""
    incarnation: str
    address: str
    port: int
    key: Secret


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a name in a request stands for: the model itself, then its fallbacks in order, each at most once."""

    models: tuple[str, ...]
    task: Task


class RouteTable(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a gateway needs to route. `names` holds every model and alias of the spec, ready or not."""

    names: dict[str, Target] = {}
    routes: dict[str, tuple[Route, ...]] = {}
    """Model -> its routable engines, by replica id."""


def route(replica: Replica | None, report: ShardReport | None, key: Secret | None) -> Route | None:
    """The route to a replica through its rank-0 shard; None while anything is missing."""
    if replica is None or report is None or key is None:
        return None
    if replica.phase not in ROUTABLE or report.rank != 0 or report.phase is not ShardPhase.READY:
        return None
    if not any(shard.rank == 0 and shard.node == report.node for shard in replica.shards):
        return None
    if report.address is None or report.port is None or report.incarnation is None:
        return None
    return Route(
        replica=replica.id,
        model=replica.model,
        engine=replica.engine,
        incarnation=report.incarnation,
        address=report.address,
        port=report.port,
        key=key,
    )


def target(name: str, models: dict[str, ModelSpec], aliases: dict[str, Alias]) -> Target | None:
    """What `name` stands for; None when the spec knows no such model or alias. Fallbacks that are gone are left out."""
    alias = aliases.get(name)
    model = models.get(name if alias is None else alias.model)
    if model is None:
        return None
    order = [model.name]
    for spare in model.fallbacks:
        meant = aliases[spare].model if spare in aliases else spare
        if meant in models and meant not in order:
            order.append(meant)
    return Target(models=tuple(order), task=model.task)


def names(index: Index) -> dict[str, Target]:
    """Every model and alias of the spec, with what it stands for, by name."""
    models = {spec.name: spec for spec in index.models.records()}
    aliases = {alias.name: alias for alias in index.aliases.records()}
    return {name: meant for name in sorted({*models, *aliases}) if (meant := target(name, models, aliases))}


def routes_of(index: Index, model: str) -> tuple[Route, ...]:
    """The routable engines of one model, by replica id."""
    found = (_route_to(index, replica) for replica in sorted(index.replicas_of.get(model, ())))
    return tuple(each for each in found if each is not None)


def _route_to(index: Index, replica: str) -> Route | None:
    record, secret = index.replicas.record(replica), index.secrets.record(replica)
    head = next((shard for shard in record.shards if shard.rank == 0), None) if record is not None else None
    if head is None or secret is None:
        return None
    return route(record, index.reports.record(shard_name(head.node, replica, 0)), secret.key)


def route_table(index: Index) -> RouteTable:
    """The whole table from an index. An unreadable record keeps its last good value, so it drops no route."""
    routes = {model: found for model in sorted(index.replicas_of) if (found := routes_of(index, model))}
    return RouteTable(names=names(index), routes=routes)


def keep_unreadable(index: Index, table: RouteTable, last: RouteTable) -> RouteTable:
    """`table`, made from `index`, with what `last` knew of names and engines whose records can't be read.

    An index that never saw them readable (a process that started later) has nothing to go on but what was known before.
    """
    if not index.corrupted:
        return table
    names, routes = dict(table.names), dict(table.routes)
    for name, meant in last.names.items():
        refs = (Ref(Kind.MODEL, name), Ref(Kind.ALIAS, name), Ref(Kind.MODEL, meant.models[0]))
        if name not in names and any(ref in index.corrupted for ref in refs):
            names[name] = meant
    for model, known in last.routes.items():
        found = routes.get(model, ())
        there = {each.replica for each in found}
        kept = [each for each in known if each.replica not in there and _unreadable(index, each.replica)]
        if kept:
            routes[model] = tuple(sorted((*found, *kept), key=lambda each: each.replica))
    return RouteTable(names=dict(sorted(names.items())), routes=routes)


def _unreadable(index: Index, replica: str) -> bool:
    refs = [Ref(Kind.REPLICA, replica), Ref(Kind.SECRET, replica)]
    refs += [Ref(Kind.SHARD, name) for name in index.reports_of.get(replica, ())]
    return any(ref in index.corrupted for ref in refs)
