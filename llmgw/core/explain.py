"""Why: explanations as data, counted while deciding and rendered only when somebody asks.

Invariant: for every replica that is not placed there is, on demand, one `Refusal` per node. Nothing here decides.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from llmgw.core.record import Record
from llmgw.core.units import GB, format_bytes

NEAREST_MAX: Final = 5
"""Refusals kept with a receipt: the nearest misses. The whole list is computed again on demand."""

HOLDERS_MAX: Final = 5
"""Holders named in one refusal, the largest first; the others are summed up under an empty name."""

DETAIL_LEN_MAX: Final = 240
"""Longest text of a node's own words in a refusal, in characters."""

RECEIPT_BYTES_MAX: Final = 16 * 1024
"""Largest receipt once encoded; follows from the limits above and that of names, and is asserted by the tests."""


class Constraint(enum.Enum):
    """Which rule turned a node (or a whole profile) down."""

    NOT_READY = "not_ready"
    CORDONED = "cordoned"
    SELECTOR = "selector"
    ENGINE_UNCHECKED = "engine_unchecked"
    ENGINE_MISSING = "engine_missing"
    ENGINE_VERSION = "engine_version"
    MEMORY = "memory"
    MEMORY_TOTAL = "memory_total"
    UNACCOUNTED = "unaccounted"
    SHARDS_MAX = "shards_max"
    RECORD_CORRUPT = "record_corrupt"
    GPU_COUNT = "gpu_count"
    GPU_CLASS = "gpu_class"
    GPU_MEMORY = "gpu_memory"
    GPU_CLAIMED = "gpu_claimed"
    GPU_FAULT = "gpu_fault"
    GPU_IN_USE = "gpu_in_use"
    GPU_UNKNOWN = "gpu_unknown"
    FABRIC = "fabric"
    GANG = "gang"
    GANG_PORTS = "gang_ports"
    FACTS = "facts"
    NO_NODES = "no_nodes"
    NO_PROFILES = "no_profiles"
    RESTORING = "restoring"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> Constraint:
        """Whatever a newer leader wrote, so that versions can be mixed: the words are in the refusal's detail."""
        del value
        return cls.OTHER


GPUS_TAKEN: Final = (
    Constraint.GPU_CLAIMED,
    Constraint.GPU_IN_USE,
    Constraint.GPU_FAULT,
    Constraint.GPU_UNKNOWN,
)
"""What may keep a GPU that would do. In `Refusal.detail` each GPU has its own reason; this is that of most of them."""


class Refusal(Record, frozen=True, kw_only=True):
    """One candidate that was not taken, with the numbers it was judged by.

    `node` is empty when the refusal speaks of the profile as a whole. `needed`, `total`, `free`: in the constraint's
    `unit`; None means unknown or not applicable. `holders`: what claims the thing that lacked, as (name, amount), at
    most `HOLDERS_MAX` and one for the rest, whose name is empty. `gpu_class`: the class of GPUs that the numbers count,
    where it is one. `detail`: the node's own words.
    """

    constraint: Constraint
    profile: str
    node: str = ""
    needed: int | None = None
    total: int | None = None
    free: int | None = None
    holders: tuple[tuple[str, int], ...] = ()
    gpu_class: str | None = None
    detail: str = ""

    @property
    def unit(self) -> str:
        """What the numbers count: `bytes`, `GPUs`, `nodes` or `shards`; empty where there are none."""
        return _UNITS.get(self.constraint, "")


_UNITS: Final = {
    Constraint.MEMORY: "bytes",
    Constraint.MEMORY_TOTAL: "bytes",
    Constraint.SHARDS_MAX: "shards",
    Constraint.GANG: "nodes",
    Constraint.GPU_COUNT: "GPUs",
    Constraint.GPU_MEMORY: "GPUs",
    **dict.fromkeys(GPUS_TAKEN, "GPUs"),
}


class Score(Record, frozen=True, kw_only=True):
    """Why a candidate ranked where it did; smaller is better throughout, True after False, unknown room last.

    One node is compared by `failed_lately`, `weights_missing`, `replicas_of_model`, `node_empty`, `free_gpus`,
    `free_bytes`, `node`. `replicas_of_model` stands before `node_empty`: two copies of one model on one machine die
    together, so keeping machines empty is worth less than spreading them. A member of a gang is compared by
    `failed_lately`, `claimed_gpus`, `claimed_bytes`, `replicas_of_model`, `weights_missing`, `node`.

    `free_gpus`: of the class `gpu_class`, None where the profile takes none. `free_bytes`: None on a node that reports
    no memory. `claimed_gpus`, `claimed_bytes`: how much of the machine is taken; None where it does not count.
    """

    failed_lately: bool
    weights_missing: bool
    replicas_of_model: int
    node_empty: bool
    free_bytes: int | None
    node: str
    gpu_class: str | None = None
    free_gpus: int | None = None
    claimed_gpus: int | None = None
    claimed_bytes: int | None = None


class Receipt(Record, frozen=True, kw_only=True):
    """What a placement was decided from; stays with the replica after success. At most `RECEIPT_BYTES_MAX` encoded.

    `revision`: the newest revision the decision had seen. `winner`: one for each shard, by rank; `runner_up`: the best
    of what was not taken. `refused`: how many nodes each constraint turned down, for the profile of those tried up to
    here where it were most. `nearest`: at most five of the refusals that missed by least.
    """

    revision: int
    profile: str
    winner: tuple[Score, ...] = ()
    runner_up: Score | None = None
    refused: dict[str, int] = {}
    nearest: tuple[Refusal, ...] = ()


class Unplaced(Record, frozen=True, kw_only=True):
    """Why a wanted replica runs nowhere, bounded as a `Receipt` is.

    `refused`: how many nodes each constraint turned down, for the profile where it were most; so a node counts once.
    `nodes`: how many were judged.
    """

    revision: int
    nodes: int = 0
    refused: dict[str, int] = {}
    nearest: tuple[Refusal, ...] = ()


def clip(text: str) -> str:
    """A node's own words on one line, cut to `DETAIL_LEN_MAX`."""
    flat = " ".join(text.split())
    return flat if len(flat) <= DETAIL_LEN_MAX else flat[: DETAIL_LEN_MAX - 1] + "…"


def bounded_holders(holders: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The largest holders, and the sum of the others under an empty name."""
    ranked = sorted(holders, key=lambda holder: (-holder[1], holder[0]))
    rest = sum(size for _, size in ranked[HOLDERS_MAX:])
    return (*ranked[:HOLDERS_MAX], *((("", rest),) if rest else ()))


DISTANCE: Final = {
    constraint: rank
    for rank, constraint in enumerate((
        Constraint.MEMORY,
        Constraint.GPU_CLAIMED,
        Constraint.GANG,
        Constraint.GANG_PORTS,
        Constraint.UNACCOUNTED,
        Constraint.SHARDS_MAX,
        Constraint.GPU_IN_USE,
        Constraint.ENGINE_UNCHECKED,
        Constraint.ENGINE_VERSION,
        Constraint.ENGINE_MISSING,
        Constraint.CORDONED,
        Constraint.NOT_READY,
        Constraint.GPU_UNKNOWN,
        Constraint.GPU_FAULT,
        Constraint.FACTS,
        Constraint.RECORD_CORRUPT,
        Constraint.GPU_MEMORY,
        Constraint.GPU_COUNT,
        Constraint.MEMORY_TOTAL,
        Constraint.FABRIC,
        Constraint.SELECTOR,
        Constraint.GPU_CLASS,
        Constraint.RESTORING,
        Constraint.NO_NODES,
        Constraint.NO_PROFILES,
        Constraint.OTHER,
    ))
}  # fmt: skip
"""How far a refusal is from fitting, nearest first: what passes by itself, what a person can change, what can't be."""


def nearest(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """The `NEAREST_MAX` refusals that missed by least."""
    return tuple(sorted(refusals, key=miss)[:NEAREST_MAX])


Miss = tuple[int, int, str, str]
"""How far a refusal is from fitting, as a sort key: kind, amount that is missing, node, profile."""


def miss(refusal: Refusal) -> Miss:
    """How far a refusal is from fitting."""
    there = refusal.total if refusal.free is None else refusal.free
    missing = (refusal.needed or 0) - (there or 0)
    return (DISTANCE[refusal.constraint], missing, refusal.node, refusal.profile)


def counted(refusals: Iterable[Refusal]) -> dict[str, int]:
    """How many refusals there are of each constraint, by its name, for the profile where it were most."""
    return most(Counter((each.profile, each.constraint) for each in refusals))


def most(counts: Mapping[tuple[str, Constraint], int]) -> dict[str, int]:
    """The same from the counts of each profile and constraint."""
    found: dict[str, int] = {}
    for (_, constraint), count in counts.items():
        found[constraint.value] = max(count, found.get(constraint.value, 0))
    return dict(sorted(found.items()))


def same_but_numbers(old: Unplaced | None, new: Unplaced | None) -> bool:
    """Whether nothing but numbers differs: the same constraints refuse. Only then is the stored one left as it is."""
    return old is not None and new is not None and old.refused.keys() == new.refused.keys()


def render(refusal: Refusal) -> str:
    """A refusal as what can be said of its node: "has 8 GB of memory, needs 24"."""
    match refusal.constraint:
        case Constraint.NOT_READY:
            return f"is {refusal.detail}"
        case Constraint.ENGINE_UNCHECKED:
            return ": ".join(part for part in ("engines not checked yet", refusal.detail) if part)
        case Constraint.MEMORY_TOTAL:
            return f"has {format_bytes(refusal.total)} of memory, needs {_same_unit(refusal.needed, refusal.total)}"
        case Constraint.MEMORY:
            parts = [f"{format_bytes(refusal.total)} in all", *_promises(refusal.holders), refusal.detail]
            return f"needs {format_bytes(refusal.needed)}; {', '.join(part for part in parts if part)}"
        case Constraint.UNACCOUNTED:
            return f"runs {refusal.detail}, and what that holds is not known yet"
        case Constraint.SHARDS_MAX:
            return f"holds {refusal.total} shards, and no node takes more"
        case Constraint.GPU_COUNT:
            of_one_class = " of one class" if (refusal.needed or 0) > 1 else ""
            return f"has {refusal.detail or 'no GPU'}, needs {refusal.needed}{of_one_class}"
        case constraint if constraint in GPUS_TAKEN and refusal.needed is not None and refusal.total is not None:
            numbers = f"needs {_gpus(refusal.needed, refusal.gpu_class)}; {refusal.free or 0} of {refusal.total} free"
            return f"{numbers}: {refusal.detail}" if refusal.detail else numbers
        case _:
            return refusal.detail or _FIXED.get(refusal.constraint, refusal.constraint.value.replace("_", " "))


_FIXED: Final = {
    Constraint.NO_NODES: "there is no node yet",
    Constraint.NO_PROFILES: "the model has no profile",
    Constraint.RESTORING: "the store was restored: waiting until every node has reported",
}
"""Constraints that need no numbers and no node's words."""


def remedy(refusal: Refusal) -> str:
    """What would have to change for this node to be taken: "free 4 GB there, or ask for at most 12 GB"."""
    lacking = max(0, (refusal.needed or 0) - (refusal.free or 0))
    match refusal.constraint:
        case Constraint.MEMORY:
            less = f", or ask for at most {format_bytes(refusal.free)}" if refusal.free else ""
            return f"free {format_bytes(lacking)} there{less}"
        case Constraint.MEMORY_TOTAL:
            return f"ask for at most {format_bytes(refusal.total)}"
        case Constraint.CORDONED:
            return "uncordon it"
        case Constraint.GPU_COUNT:
            return f"ask for at most {refusal.total} a node" if refusal.total else "a GPU, or a profile that needs none"
        case constraint if constraint in GPUS_TAKEN and refusal.needed is not None:
            return f"{lacking} more free {refusal.gpu_class or ('GPU' if lacking == 1 else 'GPUs')} there"
        case Constraint.GANG:
            return f"{lacking} more such {'node' if lacking == 1 else 'nodes'} on the same fabric"
        case _:
            return _REMEDIES.get(refusal.constraint, "")


_REMEDIES: Final = {
    Constraint.NOT_READY: "wait until its agent is back and has reported",
    Constraint.SELECTOR: "give it that label, or ask for another one",
    Constraint.ENGINE_UNCHECKED: "wait until it has checked its engines",
    Constraint.ENGINE_MISSING: "install the engine there, or name it in its agent.yaml",
    Constraint.ENGINE_VERSION: "install that version there, or wish for the one it has",
    Constraint.UNACCOUNTED: "wait until that is adopted, or confirmed gone",
    Constraint.SHARDS_MAX: "end a replica there",
    Constraint.RECORD_CORRUPT: "write or delete that record anew",
    Constraint.GPU_CLASS: "ask for a class that it has, or for none in particular",
    Constraint.GPU_MEMORY: "ask for less memory a GPU, or for fewer GPUs",
    Constraint.GPU_UNKNOWN: "find out why its agent can't read its GPUs",
    Constraint.FABRIC: "name its fabric in its agent.yaml, or use one node",
    Constraint.FACTS: "correct what its agent reports",
    Constraint.GANG_PORTS: "give its nodes more gang_ports, or end a replica that spans nodes there",
    Constraint.NO_NODES: "start an agent",
    Constraint.NO_PROFILES: "give the model a profile",
    Constraint.RESTORING: "wait, or `llmgw recover` if some nodes will not come back",
}
"""What would have to change where no number says it better."""


def render_at(refusal: Refusal) -> str:
    """A refusal as a whole sentence, naming its node and profile: "n1 (cpu): has 8 GB of memory, needs 24"."""
    place = f"{refusal.node} ({refusal.profile})" if refusal.node and refusal.profile else refusal.node
    subject = "" if refusal.constraint is Constraint.NO_NODES else place or refusal.profile
    return f"{subject}: {render(refusal)}" if subject else render(refusal)


def summarise(unplaced: Unplaced) -> str:
    """Why nothing fits, in one line: how many nodes lack what, and the nearest miss."""
    near = render_at(unplaced.nearest[0]) if unplaced.nearest else ""
    if Constraint.NO_NODES.value in unplaced.refused:
        return _FIXED[Constraint.NO_NODES]
    counts = ", ".join(turned_down(name, count) for name, count in unplaced.refused.items())
    if unplaced.nodes <= 1:
        return f"{'does not fit on the only node' if unplaced.nodes else 'fits nowhere'}: {near or counts}"
    return f"fits on none of {unplaced.nodes} nodes: {counts}" + (f" ({near})" if near else "")


_LACKS: Final = {
    Constraint.NOT_READY: ("is not ready", "are not ready"),
    Constraint.CORDONED: ("is cordoned", "are cordoned"),
    Constraint.SELECTOR: ("lacks a label", "lack a label"),
    Constraint.ENGINE_UNCHECKED: ("has not checked its engines yet", "have not checked their engines yet"),
    Constraint.ENGINE_MISSING: ("lacks the engine", "lack the engine"),
    Constraint.ENGINE_VERSION: ("has another version of the engine", "have another version of the engine"),
    Constraint.MEMORY: ("has too little memory left", "have too little memory left"),
    Constraint.MEMORY_TOTAL: ("has too little memory", "have too little memory"),
    Constraint.UNACCOUNTED: ("runs what is not accounted for", "run what is not accounted for"),
    Constraint.SHARDS_MAX: ("is full", "are full"),
    Constraint.RECORD_CORRUPT: ("has a record that can't be read", "have a record that can't be read"),
    Constraint.GPU_CLASS: ("has no GPU of the class", "have no GPU of the class"),
    Constraint.GPU_COUNT: ("has too few GPUs", "have too few GPUs"),
    Constraint.GPU_MEMORY: ("has GPUs with too little memory", "have GPUs with too little memory"),
    Constraint.GPU_CLAIMED: ("has too few unclaimed GPUs", "have too few unclaimed GPUs"),
    Constraint.GPU_FAULT: ("has faulty GPUs", "have faulty GPUs"),
    Constraint.GPU_IN_USE: ("has GPUs in use outside llmgw", "have GPUs in use outside llmgw"),
    Constraint.GPU_UNKNOWN: ("has GPUs in an unknown state", "have GPUs in an unknown state"),
    Constraint.FABRIC: ("is on no fabric", "are on no fabric"),
    Constraint.GANG: ("has too few companions", "have too few companions"),
    Constraint.GANG_PORTS: ("finds no ports free on all its nodes", "find no ports free on all their nodes"),
    Constraint.FACTS: ("reports what can't be true", "report what can't be true"),
}
"""What is said of one node and of several that a constraint turned down; of any other, its name."""


def turned_down(name: str, count: int) -> str:
    """How many nodes a constraint turned down. It may be the name of one that only a newer leader knows."""
    known = next((words for constraint, words in _LACKS.items() if constraint.value == name), None)
    return f"{count} × {name.replace('_', ' ')}" if known is None else f"{count} {known[count != 1]}"


def _same_unit(size: int | None, beside: int | None) -> str:
    """`size` without its unit where that is the unit of `beside`."""
    text = format_bytes(size)
    return text.removesuffix(" GB") if format_bytes(beside).endswith(" GB") and (size or 0) >= GB // 10 else text


def _gpus(count: int | None, gpu_class: str | None) -> str:
    """So many GPUs, of a class where it is known."""
    what = gpu_class or ("GPU" if count in (None, 1) else "GPUs")
    return what if count is None else f"{count} {what}"


def _promises(holders: Iterable[tuple[str, int]]) -> list[str]:
    """Who holds what: the first as "16 GB promised to a", further ones shorter."""
    parts: list[str] = []
    for name, size in holders:
        verb = "" if parts else "promised "
        parts.append(f"{format_bytes(size)} {verb}to {name or 'others'}")
    return parts
