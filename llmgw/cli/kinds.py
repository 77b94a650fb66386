"""What can be got and watched: for each kind where its records are, its objects, its table.

An object joins the records of one name by who writes them, each as it is stored: what people want, what the leader
makes of it, what runs. A record that is not there is null, one that can't be read is null and named under `corrupt`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from llmgw.core.explain import Constraint
from llmgw.core.inventory import NodeInventory, node_inventory
from llmgw.core.model_text import asleep, range_text, why_now
from llmgw.core.node import GpuHealth, credible
from llmgw.core.refusal_words import summarise
from llmgw.core.snapshot import Index, Kind, Ref
from llmgw.core.units import GB, format_bytes, format_number
from llmgw.store import codec

UNKNOWN: Final = "-"

Row = tuple[str, ...]


class KindView(msgspec.Struct, frozen=True, kw_only=True):
    """One kind.

    noun: what one of it is called. watched: what `watch` follows. parts: what an object is made of, by field; with one
    part only, the object is that record itself. reads: what must be read beside for the table. row: the
    table's, as of a moment in Unix seconds.
    """

    noun: str
    watched: tuple[Kind, ...]
    parts: Mapping[str, Kind]
    headers: Row
    row: Callable[[Index, str, float], Row]
    reads: tuple[Kind, ...] = ()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Everything to read, once each."""
        return tuple(dict.fromkeys((*self.parts.values(), *self.watched, *self.reads)))

    def names(self, index: Index) -> list[str]:
        """Every name that any part has, sorted."""
        named = set(self.parts.values())
        return sorted({ref.name for ref, _ in index.rows() if ref.kind in named})

    def object(self, index: Index, name: str) -> dict[str, Any]:
        """One object as plain values, secrets redacted."""
        rows = {part: index.row(Ref(kind, name)) for part, kind in self.parts.items()}
        records = {part: None if row is None else codec.to_public(row.record) for part, row in rows.items()}
        corrupt = {part: row.corrupt for part, row in rows.items() if row is not None and row.corrupt is not None}
        if len(records) == 1:
            (record,) = records.values()
            return {**(record or {"name": name}), **({"corrupt": corrupt} if corrupt else {})}
        return {"name": name, **records, **({"corrupt": corrupt} if corrupt else {})}

    def rows(self, index: Index, names: Sequence[str], wall_s: float) -> list[Row]:
        """The table's rows as of `wall_s`, Unix seconds; the last column also says what can't be read."""
        made: list[Row] = []
        for name in names:
            *cells, last = self.row(index, name, wall_s)
            bad = [row.corrupt for kind in self.parts.values() if (row := index.row(Ref(kind, name))) and row.corrupt]
            made.append((*cells, "; ".join(part for part in (last, *(f"can't be read: {why}" for why in bad)) if part)))
        return made


def _node(index: Index, name: str, _: float) -> Row:
    node = node_inventory(index, name)
    state, facts = index.node_states.record(name), node.facts
    word = UNKNOWN if node.liveness is None else node.liveness.value
    spec = index.node_specs.record(name)
    if spec is not None and (spec.drain or spec.cordon):
        word += ", draining" if spec.drain else ", cordoned"
    notes = [f"its facts can't be true: {', '.join(node.flaws)}"] if node.flaws else []
    notes += [*(facts.warnings if facts else ()), *(f"not accounted for: {each}" for each in node.unaccounted)]
    if state is not None and state.reason and (node.liveness is None or node.liveness.value != "ready"):
        notes.insert(0, state.reason)
    return (
        name,
        word,
        UNKNOWN if facts is None else format_number(credible(facts.cpus)),
        _memory(node.claimed_bytes + node.unclaimed_bytes, node.memory_total_bytes, known=not node.unaccounted),
        _gpus(node),
        _engines(index, name),
        str(node.shards),
        "; ".join(notes),
    )


def _memory(used: int, total: int | None, *, known: bool) -> str:
    """`4.5/16 GB`: promised, and what there is; `-` for what is not known."""
    if total is None:
        return UNKNOWN
    return f"{format_number(used / GB) if known else UNKNOWN}/{format_bytes(total)}"


def _gpus(node: NodeInventory) -> str:
    """`8 (1 faulty, 3 claimed)`: how many there are, and what keeps some; a claimed one may be faulty as well."""
    if node.facts is None or node.facts.gpus is None or node.gpus is None:
        return UNKNOWN
    faulty = sum(gpu.health in (GpuHealth.FAULT, GpuHealth.LOST) for gpu in node.facts.gpus)
    kept = Counter(slot.taken for slot in node.gpus)
    counts = (
        (faulty, "faulty"),
        (kept[Constraint.GPU_CLAIMED], "claimed"),
        (kept[Constraint.GPU_IN_USE], "in use"),
        (kept[Constraint.GPU_UNKNOWN], "unknown"),
    )
    said = ", ".join(f"{count} {word}" for count, word in counts if count)
    return f"{len(node.gpus)} ({said})" if said else f"{len(node.gpus)}"


def _engines(index: Index, name: str) -> str:
    facts = index.facts.record(name)
    if facts is None or facts.engines is None or not facts.engines.probed:
        return UNKNOWN
    return ", ".join(build.id for build in facts.engines.builds) or "none"


def _model(index: Index, name: str, wall_s: float) -> Row:
    spec, state = index.models.record(name), index.model_states.record(name)
    why = ""
    if state is not None:
        why = why_now(state, wall_s) or ("" if state.unplaced is None else summarise(state.unplaced)) or asleep(state)
    if spec is None and Ref(Kind.MODEL, name) not in {ref for ref, _ in index.corrupt()}:
        why = "; ".join(part for part in ("not in the catalog any more", why) if part)
    return (
        name,
        UNKNOWN if state is None else f"{state.ready}/{state.wanted}{range_text(spec)}",
        UNKNOWN if spec is None else spec.task.value,
        UNKNOWN if spec is None else spec.source,
        UNKNOWN if spec is None else ", ".join(profile.name for profile in spec.profiles),
        why,
    )


def _replica(index: Index, name: str, _: float) -> Row:
    replica = index.replicas.record(name)
    if replica is None:
        return (name, *[UNKNOWN] * 4, "")
    nodes = ", ".join(shard.node for shard in replica.shards)
    return (name, replica.phase.value, replica.model, replica.profile, nodes, replica.reason)


def _shard(index: Index, name: str, _: float) -> Row:
    order, report = index.assignments.record(name), index.reports.record(name)
    model = order.model if order is not None else report.model if report is not None else UNKNOWN
    reached = UNKNOWN
    if report is not None and report.address is not None and report.port is not None:
        reached = f"{report.address}:{report.port}"
    return (
        name,
        UNKNOWN if order is None else order.desired.value,
        UNKNOWN if report is None else report.phase.value,
        model,
        UNKNOWN if report is None or report.build is None else report.build,
        reached,
        "" if report is None else report.reason,
    )


def _alias(index: Index, name: str, _: float) -> Row:
    alias = index.aliases.record(name)
    return (name, UNKNOWN if alias is None else alias.model)


def _engine(index: Index, name: str, _: float) -> Row:
    spec = index.engines.record(name)
    return (name, UNKNOWN, UNKNOWN) if spec is None else (name, spec.version, spec.source)


KINDS: Final[Mapping[str, KindView]] = {
    "nodes": KindView(
        noun="node",
        watched=(Kind.NODE_SPEC, Kind.NODE_STATE, Kind.SESSION, Kind.FACTS),
        parts={"spec": Kind.NODE_SPEC, "state": Kind.NODE_STATE, "session": Kind.SESSION, "facts": Kind.FACTS},
        reads=(Kind.REPLICA, Kind.ASSIGNMENT, Kind.SHARD),
        headers=("NAME", "STATE", "CPUS", "MEM", "GPUS", "ENGINES", "SHARDS", "NOTES"),
        row=_node,
    ),
    "models": KindView(
        noun="model",
        watched=(Kind.MODEL, Kind.MODEL_STATE),
        parts={"spec": Kind.MODEL, "state": Kind.MODEL_STATE},
        headers=("NAME", "READY", "TASK", "SOURCE", "PROFILES", "WHY"),
        row=_model,
    ),
    "replicas": KindView(
        noun="replica",
        watched=(Kind.REPLICA,),
        parts={"replica": Kind.REPLICA},
        headers=("NAME", "PHASE", "MODEL", "PROFILE", "NODES", "WHY"),
        row=_replica,
    ),
    "shards": KindView(
        noun="shard",
        watched=(Kind.SHARD,),
        parts={"assignment": Kind.ASSIGNMENT, "report": Kind.SHARD},
        headers=("NAME", "ORDER", "PHASE", "MODEL", "BUILD", "ADDRESS", "WHY"),
        row=_shard,
    ),
    "aliases": KindView(
        noun="alias",
        watched=(Kind.ALIAS,),
        parts={"alias": Kind.ALIAS},
        headers=("NAME", "MODEL"),
        row=_alias,
    ),
    "engines": KindView(
        noun="engine",
        watched=(Kind.ENGINE,),
        parts={"engine": Kind.ENGINE},
        headers=("NAME", "VERSION", "SOURCE"),
        row=_engine,
    ),
}
"""The kinds by name; `llmgw get catalog` beside them is a document of its own."""
