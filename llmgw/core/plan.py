"""What reconcile decides: writes, grouped so that each group leaves the tree valid, and when to look again.

Data only. The controller's committer fences the groups and packs them into transactions; it never splits a group.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from llmgw.core.live import LoadView
from llmgw.core.record import Record
from llmgw.core.snapshot import Dirty, Ref


class Put(msgspec.Struct, frozen=True, kw_only=True):
    """Write `record` at `ref`, whether or not something is there."""

    ref: Ref
    record: Record


class Delete(msgspec.Struct, frozen=True, kw_only=True):
    """Remove what is at `ref`; nothing there is fine."""

    ref: Ref


Write = Put | Delete


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Writes that only make sense together, such as a replica, its secret and all its assignments.

    `cause`: one word for the log line's counts, such as `place`, `stop`, `adopt`, `liveness`.
    """

    cause: str
    writes: tuple[Write, ...]


class Wake(enum.Enum):
    """What time alone may give reason to look at again."""

    MODEL = "model"
    NODE = "node"
    FLEET = "fleet"


WakeKey = tuple[Wake, str]
"""A model or node by its name, or the fleet, whose name is empty."""


@dataclass(kw_only=True)
class Plan:
    """The outcome of one pass, in the order it must be committed.

    `wake_mono_s`: for what was looked at, the moment on the leader's monotonic clock at which time
    alone may change the decision; absent when only a change of the tree can. `left`: what the pass, cut at its bound,
    did not get to and must stay dirty.
    """

    groups: list[Group] = field(default_factory=list)
    wake_mono_s: dict[WakeKey, float] = field(default_factory=dict)
    left: Dirty = field(default_factory=Dirty)

    @property
    def more(self) -> bool:
        """Whether the pass was cut, so that another is due at once."""
        return bool(self.left)

    @property
    def empty(self) -> bool:
        """Whether nothing is to be written."""
        return not self.groups

    def counts(self) -> dict[str, int]:
        """How many groups of each cause."""
        out: dict[str, int] = {}
        for group in self.groups:
            out[group.cause] = out.get(group.cause, 0) + 1
        return out


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of the pure decisions. The first four come from the controller's configuration, the others stand.

    session_ttl_s: of the agents' sessions; the grace periods of liveness are multiples of it.
    lost_after_s: how long a node stays Unreachable before it is Lost and its replicas are replaced.
    backoff_base_s, backoff_max_s: a model's wait after failed replicas, base × 2ⁿ up to the maximum.
    stable_s: how long all wanted replicas must be ready before a model's count of failures falls back to zero.
    placements_max: placements tried in one pass, so that Python in the loop never costs the lease.
    looks_max: nodes, models and replicas looked at in one pass, for the same reason: up to 0.1 ms each.
    """

    session_ttl_s: float = 30.0
    lost_after_s: float = 300.0
    backoff_base_s: float = 5.0
    backoff_max_s: float = 300.0
    stable_s: float = 1800.0
    placements_max: int = 100
    looks_max: int = 1000


class Forming(msgspec.Struct, frozen=True, kw_only=True):
    """A gang on its way to ready, as this leader sees it: how far it has come, and since when (its monotonic clock)."""

    step: tuple[object, ...]
    mono_s: float


class View(msgspec.Struct, frozen=True, kw_only=True):
    """This reign's own observations, which a new leader may safely forget: empty at each new term.

    All on the leader's monotonic clock. `absent_since`: node -> when this leader first saw it without a session; kept
    up by `llmgw.core.liveness.observe`, which the loop calls before each pass, as is `forming`: a replica that spans
    nodes and never was ready -> its last visible step.
    `write_failed_mono_s`: the last time one of our own writes failed or was refused, None if never. `load`: what was
    sampled of the models' load; kept up by `llmgw.core.autoscale.observe`.
    """

    absent_since: Mapping[str, float] = {}
    forming: Mapping[str, Forming] = {}
    write_failed_mono_s: float | None = None
    load: LoadView = LoadView()
