"""The judge of a simulated run: sees every revision and every engine at the moment it happens, and remembers the story.

It checks the invariants of `llmgw.core.history` after each revision, what no record can show on the machines
themselves, and what a gateway would route. The first violation ends the run, told with its seed and what led to it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from contextvars import ContextVar
from typing import Final

import anyio

from llmgw.core.history import Checker
from llmgw.core.invariants import unanswered
from llmgw.core.node import Fleet, Guard, Liveness, NodeState
from llmgw.core.record import Leader
from llmgw.core.replica import (
    Assignment,
    Desired,
    ModelState,
    Replica,
    ReplicaPhase,
    Retire,
    Rollout,
    ShardPhase,
    ShardReport,
)
from llmgw.core.routing import Route, route_table
from llmgw.core.snapshot import Change, Kind
from llmgw.store import codec, keys
from llmgw.store.memory import MemoryCluster
from llmgw.store.port import Batch, Event, KeyValue
from llmgw.testing.sim_machine import Engine, Machine

STORY_LEN: Final = 20000
"""Lines of the story that are kept: more than a whole run has, as a rule."""

who: ContextVar[str] = ContextVar("who", default="-")
"""Which process is running, for the story."""


class Judge(logging.Handler):
    """Watches one run: its store (once attached), its machines (as their witness) and its logs."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(logging.INFO)
        self._cluster = cluster
        self._story: deque[tuple[float, str, object]] = deque(maxlen=STORY_LEN)
        self.checker = Checker()
        self.totals: Counter[str] = Counter()
        """What happened in this run, by kind."""
        self.violations: list[str] = []
        self.broken = anyio.Event()
        self._stopped: set[str] = set()
        self._terms: set[int] = set()
        self._unanswered_s: dict[str, float] = {}
        self._fresh = False
        self._routes: dict[str, tuple[Route, ...]] = {}
        self._unanswered: set[str] = set()

    def attach(self) -> None:
        """Judge every revision from now on."""
        self._cluster.attach(self, ["/"])
        self.restored(before=0, revision=self._cluster.revision)

    def tell(self, what: str, *, name: str | None = None) -> None:
        """Add a line to the story."""
        self._story.append((anyio.current_time(), who.get() if name is None else name, what))

    def story(self) -> str:
        """All of it, a line for each thing that happened, for people."""
        lines = []
        for at_s, name, what in self._story:
            match what:
                case logging.LogRecord():
                    text = _said(what)
                case Batch():
                    text = f"revision {what.revision}: {_events(what.events)}"
                case _:
                    text = str(what)
            lines.append(f"{at_s:9.3f} {name:14} {text}")
        return "\n".join(lines)

    def wrong(self, what: str) -> None:
        """A promise was broken: the run ends."""
        self.violations.append(f"at {anyio.current_time():.3f} s: {what}")
        self.tell(f"VIOLATION {what}", name="judge")
        self.broken.set()

    # --- a logging handler ---

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "listing again":
            self.totals[f"listed again: {getattr(record, 'fields', {}).get('cause')}"] += 1
        self._story.append((anyio.current_time(), who.get(), record))

    # --- a watcher of the store ---

    def happened(self, batch: Batch) -> None:
        self._fresh = False
        changes = [change for event in batch.events if (change := codec.change(event)) is not None]
        for change in changes:
            self._note(change)
        for violation in self.checker.advance(changes, revision=batch.revision):
            self.wrong(f"revision {batch.revision}: {violation}")
        self.totals["revisions"] += 1
        self._story.append((anyio.current_time(), who.get(), batch))

    def restored(self, *, before: int, revision: int) -> None:  # noqa: ARG002  # as the protocol says
        self._fresh = False
        items = self._cluster.find(keys.ROOT, prefix=True)
        changes = [change for item in items if (change := _change(item)) is not None]
        for violation in self.checker.reset(changes, revision=revision):
            self.wrong(f"after a restore to {revision}: {violation}")

    def wake(self) -> None:
        pass

    def _note(self, change: Change) -> None:
        """Count what a run must have seen, and remember every order to stop."""
        before = self.checker.index.row(change.ref)
        old = None if before is None else before.record
        match change.record:
            case Assignment(desired=Desired.STOPPED):
                self._stopped.add(change.ref.name)
            case Replica() as replica:
                self._note_replica(replica, old)
            case NodeState() as state:
                self._note_node(state, old if isinstance(old, NodeState) else None)
            case ShardReport() as report:
                self._note_report(report, old if isinstance(old, ShardReport) else None)
            case ModelState() as model:
                self._note_model(model, old if isinstance(old, ModelState) else None)
            case Fleet(guard=Guard(on=True)) if not (isinstance(old, Fleet) and old.guard.on):
                self.totals["guard on"] += 1
            case None if change.ref.kind is Kind.REPLICA:
                self.totals["replica ended"] += 1
            case Leader() if change.create_revision not in self._terms:
                self._terms.add(change.create_revision)
                self.totals["term"] += 1
            case _:
                pass

    def _note_node(self, state: NodeState, old: NodeState | None) -> None:
        if old is None or old.liveness is not state.liveness:
            self.totals[f"node {state.liveness.value}"] += 1
        if state.liveness is Liveness.READY and old is not None and old.liveness is Liveness.LOST:
            self.totals["lost node came back"] += 1

    def _note_report(self, report: ShardReport, old: ShardReport | None) -> None:
        if old is not None and old.phase is not report.phase is ShardPhase.FAILED:
            self.totals["shard failed"] += 1
        if not report.assigned:
            self.totals["shard unassigned"] += 1
        if report.extended and (old is None or not old.extended):
            self.totals["start extended"] += 1

    def _note_replica(self, replica: Replica, old: object) -> None:
        kinds = ["replica"]
        kinds += ["gang"] if len(replica.shards) > 1 else []
        kinds += ["on GPUs"] if any(shard.claim.gpus for shard in replica.shards) else []
        what = ""
        if not isinstance(old, Replica):
            what = "adopted" if replica.reason.startswith("adopted") else "placed"
            if replica.replaces is not None:
                self.totals["replacement placed"] += 1
        elif replica.retire is not None and old.retire is None:
            self.totals[f"retired {replica.retire.value}"] += 1
            what = "failed" if replica.retire is Retire.FAILED else ""
        elif replica.phase is ReplicaPhase.READY and old.phase is not ReplicaPhase.READY:
            what = "ready"
        for kind in kinds if what else ():
            self.totals[f"{kind} {what}"] += 1

    def _note_model(self, model: ModelState, old: ModelState | None) -> None:
        if model.rollout is Rollout.STOPPED and (old is None or old.rollout is not model.rollout):
            self.totals["rollout stopped"] += 1
        if model.unplaced is not None and (old is None or old.unplaced is None):
            for refusal in model.unplaced.nearest:
                self.totals[f"unplaced {refusal.constraint.value}"] += 1
        if model.scale is not None and (old is None or old.scale != model.scale):
            self.totals[f"scaled {model.scale.cause.value}"] += 1

    @property
    def terms(self) -> int:
        """How many leaders there were."""
        return len(self._terms)

    # --- a witness of the machines ---

    def engine_started(self, machine: Machine, engine: Engine) -> None:
        self.totals["engine started"] += 1
        self.tell(f"starts {engine.shard} as pid {engine.process.pid}, loads {engine.temper.loads_s:.1f} s")
        name = f"{machine.name}/{engine.shard}"
        if engine.order.desired is not Desired.RUNNING:
            self.wrong(f"{name} was started although its order says {engine.order.desired.value}")

    def engine_signalled(self, machine: Machine, engine: Engine, *, kill: bool) -> None:
        """Invariant 5 and 6 on the machine: an engine is only ever ended by an order, or because it failed itself."""
        name = f"{machine.name}/{engine.shard}"
        self.totals["engine killed" if kill else "engine ended"] += 1
        self.tell(f"{'kills' if kill else 'ends'} {engine.shard}, pid {engine.process.pid}")
        late_s = anyio.current_time() - engine.started_s - engine.order.start_s
        at_fault = engine.hung or engine.temper.wrong or (not engine.whole and late_s >= 0)
        if name not in self._stopped and not at_fault:
            self.wrong(f"the agent ended {name} (pid {engine.process.pid}), which nobody ordered and which was well")

    # --- by the clock ---

    def check_answered(self, *, healthy_s: float) -> None:
        """Invariant 5: whoever runs unassigned has word within 30 s of a healthy leader. Call it every second.

        `healthy_s`: for how long there has been a leader and no trouble with the store.
        """
        self._look()
        now_s = anyio.current_time()
        self._unanswered_s = {name: self._unanswered_s.get(name, now_s) for name in self._unanswered}
        for name, since_s in self._unanswered_s.items():
            if min(healthy_s, now_s - since_s) > 30:
                self.wrong(f"{name} runs unassigned and nobody has answered it for {now_s - since_s:.0f} s")

    def routes(self) -> dict[str, tuple[Route, ...]]:
        """What a gateway that sees everything at once would route now."""
        self._look()
        return self._routes

    def _look(self) -> None:
        """Work out again what is asked for every second, if anything has changed."""
        if not self._fresh:
            self._routes = route_table(self.checker.index).routes
            self._unanswered = set(unanswered(self.checker.index))
            self._fresh = True

    def retirements(self) -> dict[Retire, int]:
        """Replicas retired so far, by reason."""
        return {why: self.totals[f"retired {why.value}"] for why in Retire}


def _change(item: KeyValue) -> Change | None:
    return codec.change(item)


def _events(events: tuple[Event, ...]) -> str:
    """A revision in few words; values only where they are short and telling."""
    parts = []
    for event in events:
        place = event.key.removeprefix(keys.ROOT)
        if event.value is None:
            parts.append(f"-{place}")
            continue
        change = codec.change(event)
        record = None if change is None else change.record
        match record:
            case Replica():
                words = f"={record.phase.value}" + (f"({record.retire.value})" if record.retire else "")
            case Assignment():
                words = f"={record.desired.value}"
            case ShardReport():
                words = f"={record.phase.value}" + ("" if record.assigned else ", unassigned")
            case NodeState():
                words = f"={record.liveness.value}"
            case _:
                words = ""
        parts.append(place + words)
    return " ".join(parts)


def _said(record: logging.LogRecord) -> str:
    fields = getattr(record, "fields", {})
    return f"{record.levelname.lower()} {record.getMessage()} " + " ".join(f"{k}={v}" for k, v in fields.items())
