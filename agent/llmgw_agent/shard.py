"""One shard as the supervisor holds it: its stage, what is known of its engine, and how that is reported.

`MOVES` is the transition table: a stage is only ever left for one of those named there.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llmgw.core.replica import Assignment, Desired, ShardPhase, ShardReport
from llmgw_agent.state import Process, SavedShard


class Stage(enum.Enum):
    """Where a shard is on this node; finer than the phase that is reported."""

    HELD = "held"
    WAITING = "waiting"
    """To be started: at once, after a backoff, or when there is a port and room."""
    LAUNCHING = "launching"
    LOADING = "loading"
    READY = "ready"
    FOUND = "found"
    """Runs, known by its mark only: nobody has said yet what it is."""
    LEAVING = "leaving"
    """Told to stop; gateways get time to see it."""
    DRAINING = "draining"
    TERMINATING = "terminating"
    KILLING = "killing"
    STOPPED = "stopped"
    FAILED = "failed"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is written in Python, and asked often


S = Stage
_END: Final = {S.STOPPED, S.FAILED}
MOVES: Final[Mapping[Stage, frozenset[Stage]]] = {
    S.HELD: frozenset({S.WAITING, S.STOPPED}),
    S.WAITING: frozenset({S.LAUNCHING, S.STOPPED}),
    S.LAUNCHING: frozenset({S.LOADING, S.TERMINATING, S.WAITING, *_END}),
    S.LOADING: frozenset({S.READY, S.TERMINATING, S.KILLING}),
    S.READY: frozenset({S.LEAVING, S.TERMINATING, S.KILLING}),
    S.FOUND: frozenset({S.LOADING, S.TERMINATING, S.KILLING}),
    S.LEAVING: frozenset({S.DRAINING, S.TERMINATING, S.KILLING}),
    S.DRAINING: frozenset({S.TERMINATING, S.KILLING}),
    S.TERMINATING: frozenset({S.KILLING, S.WAITING, *_END}),
    S.KILLING: frozenset({S.WAITING, *_END}),
    S.STOPPED: frozenset(),
    S.FAILED: frozenset(),
}
"""Where each stage may lead."""

GONE: Final = frozenset(_END)
"""The whole process tree is gone and nothing of this replica will run here again."""

ALIVE: Final = frozenset({S.LOADING, S.READY, S.FOUND, S.LEAVING, S.DRAINING, S.TERMINATING, S.KILLING})
"""There are, or may be, processes."""

GOING: Final = frozenset({S.LEAVING, S.DRAINING, S.TERMINATING, S.KILLING})
"""On its way to having none."""

SERVING: Final = frozenset({S.LAUNCHING, S.LOADING, S.READY, S.LEAVING, S.DRAINING})
"""Its port is, or is about to be, where gateways find it."""

_PHASE: Final[Mapping[Stage, ShardPhase]] = {
    S.HELD: ShardPhase.HELD,
    S.WAITING: ShardPhase.STARTING,
    S.LAUNCHING: ShardPhase.STARTING,
    S.LOADING: ShardPhase.STARTING,
    S.READY: ShardPhase.READY,
    S.FOUND: ShardPhase.STARTING,
    S.LEAVING: ShardPhase.DRAINING,
    S.DRAINING: ShardPhase.DRAINING,
    S.TERMINATING: ShardPhase.STOPPING,
    S.KILLING: ShardPhase.STOPPING,
    S.STOPPED: ShardPhase.STOPPED,
    S.FAILED: ShardPhase.FAILED,
}


@dataclass(kw_only=True)
class Shard:
    """One shard. Moments named `_mono_s` are on the agent's monotonic clock and mean nothing after a restart.

    `order_rev`: mod_revision of `order` in the store, 0 while unassigned. `stop`: it was once told to stop, which is
    final. `detail`: what was heard last of a loading engine, `words`: what it said last itself. `after`: what follows
    when the tree is gone. `due_mono_s`: when the stage changes by itself. `progress`: the host's count of visible steps
    of a load, `progress_mono_s`: when it last grew, `extended`: start budgets granted for it beyond the first.
    """

    name: str
    stage: Stage
    phase_at: float
    order: Assignment | None = None
    order_rev: int = 0
    assigned: bool = True
    stop: bool = False
    port: int | None = None
    incarnation: str | None = None
    process: Process | None = None
    build: str | None = None
    context: int | None = None
    slots: int | None = None
    attempts: int = 0
    reason: str = ""
    detail: str = ""
    words: str = ""
    progress: int | None = None
    progress_mono_s: float = 0.0
    extended: int = 0
    after: Stage | None = None
    due_mono_s: float | None = None
    stage_mono_s: float = 0.0
    look_mono_s: float = 0.0
    probe_mono_s: float = 0.0
    kill_mono_s: float = 0.0
    looking: bool = False
    watching: bool = False
    probing: bool = False
    silent_mono_s: float | None = None

    @property
    def phase(self) -> ShardPhase:
        """What is reported. An engine that goes only to be started again is starting."""
        if self.stage in (Stage.TERMINATING, Stage.KILLING) and self.after is Stage.WAITING:
            return ShardPhase.STARTING
        return _PHASE[self.stage]

    @property
    def gang(self) -> bool:
        """Whether it is part of a multi-node replica, which fails as a whole."""
        return in_gang(self.order)

    def forget_engine(self) -> None:
        """Nothing is left of the incarnation that ran."""
        self.process = self.incarnation = None
        self.context = self.slots = None
        self.detail = self.words = ""
        self.progress, self.extended = None, 0
        self.silent_mono_s = None
        self.looking = self.watching = self.probing = False

    def report(self, *, node: str, address: str) -> ShardReport:
        """The shard's record as it is to stand in the store."""
        replica, _, rank = self.name.rpartition(".")
        order = self.order
        serving = self.stage in SERVING and rank == "0"
        return ShardReport(
            node=node,
            replica=replica,
            rank=int(rank),
            model="" if order is None else order.model,
            phase=self.phase,
            phase_at=self.phase_at,
            assigned=self.assigned,
            assignment_rev=self.order_rev,
            order=None if self.assigned else order,
            incarnation=self.incarnation,
            address=address if serving else None,
            port=self.port if serving else None,
            pid=None if self.process is None else self.process.pid,
            build=self.build,
            context=self.context,
            slots=self.slots,
            attempts=self.attempts,
            extended=self.extended if self.stage is Stage.LOADING else 0,
            reason=self.reason,
        )

    def save(self) -> SavedShard:
        """The part that outlives the agent."""
        return SavedShard(
            name=self.name,
            stage=self.stage.value,
            order=self.order,
            order_rev=self.order_rev,
            assigned=self.assigned,
            stop=self.stop,
            port=self.port,
            incarnation=self.incarnation,
            process=self.process,
            build=self.build,
            context=self.context,
            slots=self.slots,
            attempts=self.attempts,
            reason=self.reason,
            phase_at=self.phase_at,
        )


def in_gang(order: Assignment | None) -> bool:
    """Whether an order is one of several for a replica that spans nodes."""
    return order is not None and (order.gang is not None or order.launch.nodes > 1)


def wants_stop(order: Assignment | None) -> bool:
    """Whether an order asks for the end of its shard."""
    return order is not None and order.desired is Desired.STOPPED
