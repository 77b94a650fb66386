"""Why: explanations as data, counted while deciding; put in words (`llmgw.core.refusal_words`) when somebody asks.

Invariant: for every replica that is not placed there is, on demand, one `Refusal` per node. Nothing here decides.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from llmgw.core.record import Record

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
