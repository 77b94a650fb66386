"""Why: explanations as data, counted while deciding and rendered only when somebody asks.

Invariant: for every replica that is not placed there is, on demand, one `Refusal` per node. Nothing here decides.
"""

from __future__ import annotations

import enum

from llmgw.core.record import Record


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
    NO_NODES = "no_nodes"
    NO_PROFILES = "no_profiles"
    RESTORING = "restoring"


class Refusal(Record, frozen=True, kw_only=True):
    """One candidate that was not taken, with the numbers it was judged by.

    `node` is empty when the refusal speaks of the profile as a whole. Sizes are bytes; None means unknown or not
    applicable. `holders`: what claims the thing that lacked, as (name, bytes). `detail`: the node's own words.
    """

    constraint: Constraint
    profile: str
    node: str = ""
    needed: int | None = None
    total: int | None = None
    free: int | None = None
    holders: tuple[tuple[str, int], ...] = ()
    detail: str = ""


class Score(Record, frozen=True, kw_only=True):
    """Why a candidate ranked where it did. Compared field by field in this order, smaller first."""

    failed_lately: bool
    weights_missing: bool
    node_empty: bool
    replicas_of_model: int
    free_bytes: int | None
    node: str


class Receipt(Record, frozen=True, kw_only=True):
    """What a placement was decided from; stays with the replica after success. At most 16 KiB once encoded.

    `revision`: the newest revision the decision had seen. `refused`: how many nodes each constraint turned down.
    `nearest`: at most five of the refusals that missed by least.
    """

    revision: int
    profile: str
    winner: tuple[Score, ...] = ()
    runner_up: Score | None = None
    refused: dict[str, int] = {}
    nearest: tuple[Refusal, ...] = ()


class Unplaced(Record, frozen=True, kw_only=True):
    """Why a wanted replica runs nowhere, bounded as a `Receipt` is."""

    revision: int
    refused: dict[str, int] = {}
    nearest: tuple[Refusal, ...] = ()
