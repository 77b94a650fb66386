"""The agent's supervisor: events in, instructions out. No clock, no process, no store: `step` is all there is.

It keeps these, and `validate_state` checks them after any sequence of events: nothing stops but by an explicit order or
its own failure (the absence of an order stops nothing); a stop is final; a shard is stopped or failed only when no
process of it is left; a port has one shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llmgw.config import AgentConfig
from llmgw.core.ids import Ids
from llmgw.core.replica import Desired, ShardReport
from llmgw.core.units import Now
from llmgw_agent import event as ev
from llmgw_agent.host import Loading, Look, Purpose, Silent, Working, Wrong
from llmgw_agent.machine import LOOK_GOING_S, Machine, progress_every_s
from llmgw_agent.restore import restore
from llmgw_agent.shard import ALIVE, GONE, Shard, Stage, wants_stop
from llmgw_agent.state import SavedState

PROBE_LOADING_S: Final = 0.25
PROBE_LOADING_LONG_S: Final = 1.0
PROBE_LOADING_SHARE: Final = 1 / 8
"""How often a loading engine is asked, seconds: at first, at last, and between them this share of the time it has been
loading, so that it is found ready little later than it is."""

PROBE_LIVE_S: Final = 5.0
PROBE_IDLE_S: Final = 0.5

SILENT_S: Final = 180.0
"""An engine whose process lives but that answers nothing for this long is restarted. Far beyond what keeps the HTTP
threads of a busy llama-server from answering (0.9 to 6 s measured); gateways route around it much earlier."""

SAVE_AGAIN_S: Final = 5.0
KILL_AGAIN_S: Final = 1.0

_LOOKED_AT: Final = frozenset({Stage.LOADING, Stage.TERMINATING, Stage.KILLING})
"""Where the whole tree is looked at: whether it gets on, and whether it is gone."""

_WATCHED: Final = ALIVE - {Stage.TERMINATING, Stage.KILLING}
"""Where the end of the main process is news."""

_PURPOSE: Final[Mapping[Stage, Purpose]] = {
    Stage.LOADING: Purpose.READY,
    Stage.READY: Purpose.LIVE,
    Stage.DRAINING: Purpose.IDLE,
}
"""What a shard in a stage is asked; in the others, nothing."""


class Supervisor(Machine):
    """All shards of one node.

    `data` and `boot_id` are the host's; state saved under another `data` is a copy and must not be handed in.
    """

    def __init__(self, config: AgentConfig, *, data: str, boot_id: str, ids: Ids) -> None:
        super().__init__(config, ids=ids)
        self._data, self._boot_id = data, boot_id
        self._exiting = False
        self._save_mono_s: float | None = None
        self.lease = 0
        """Of the session held last, 0 for none."""
        self.changes = 0
        """How often what is saved or reported may have become another; it only grows."""

    @property
    def quiet(self) -> bool:
        """Whether no process of ours is left, or about to be."""
        return not any(shard.stage in ALIVE or shard.stage is Stage.LAUNCHING for shard in self.shards.values())

    def reports(self) -> dict[str, ShardReport]:
        """What is to stand below `node/shards/<node>/`, by shard; a shard not in it has no record."""
        node, address = self._config.name, self._config.address
        return {name: shard.report(node=node, address=address) for name, shard in sorted(self.shards.items())}

    def saved(self) -> SavedState:
        """What is to stand on disk."""
        return SavedState(
            node=self._config.name,
            data=self._data,
            boot_id=self._boot_id,
            lease=self.lease,
            shards=tuple(shard.save() for _, shard in sorted(self.shards.items())),
            resting=self._ports.saved(),
            memory_bytes=self._memory_bytes,
        )

    def wake_mono_s(self) -> float | None:
        """When `TimePassed` is due; None: not before something else happens."""
        moments = [] if self._save_mono_s is None else [self._save_mono_s]
        for shard in self.shards.values():
            if shard.due_mono_s is not None and not (self._exiting and shard.stage is Stage.WAITING):
                moments.append(shard.due_mono_s)
            if shard.stage in _LOOKED_AT and not shard.looking:
                moments.append(shard.look_mono_s)
            if shard.stage in _PURPOSE and not shard.probing:
                moments.append(shard.probe_mono_s)
        return min(moments, default=None)

    def step(self, event: ev.Event, now: Now) -> list[ev.Instruction]:
        """Take in what happened; say what to do about it, in order."""
        self._out, self._now = [], now
        self._cause = type(event).__name__
        self._take(event)
        for _, shard in sorted(self.shards.items()):
            self._advance(shard)
            self._ask(shard)
        if self._save_mono_s is not None and now.mono_s >= self._save_mono_s:
            self._dirty, self._save_mono_s = True, None
        if self._dirty:
            self._dirty = False
            self.changes += 1
            self._out.insert(0, ev.SaveState(state=self.saved()))
        return self._out

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.Restored():
                self._restored(event)
            case ev.OrdersRead(orders=orders):
                self._label(orders)
            case ev.OrdersSeen(orders=orders):
                self._label(orders)
                self._carry_out(orders)
            case ev.SessionHeld(lease=lease):
                self._dirty = self._dirty or lease != self.lease
                self.lease = lease
            case ev.MemoryKnown(memory_bytes=memory_bytes):
                self._dirty = self._dirty or memory_bytes != self._memory_bytes
                self._memory_bytes = memory_bytes
            case ev.StateNotSaved():
                self._save_mono_s = self._now.mono_s + SAVE_AGAIN_S
            case ev.ExitRequested():
                self._exit()
            case ev.EngineStarted() | ev.StartRefused() | ev.TreeLooked() | ev.EngineProbed():
                self._hear(event)
            case ev.TimePassed():
                pass

    # --- orders -------------------------------------------------------------------------------------------------

    def _restored(self, event: ev.Restored) -> None:
        if event.lost:
            self._ports.rest_all(self._now)
        if event.saved is not None:
            self.lease = event.saved.lease
            self._memory_bytes = event.saved.memory_bytes
            self._ports.restore(event.saved.resting, self._now)
        for shard in restore(event, boot_id=self._boot_id, now=self._now, config=self._config):
            self.shards[shard.name] = shard
        self._dirty = True

    def _label(self, orders: Mapping[str, ev.Order]) -> None:
        """Know which shards are ordered, and by what. A key that can't be read is still there."""
        self._confirmed = True
        for name, shard in sorted(self.shards.items()):
            order = orders.get(name)
            before = (shard.assigned, shard.order_rev, shard.order)
            if order is None:
                shard.assigned, shard.order_rev = False, 0
            else:
                shard.assigned = True
                if order.assignment is not None:
                    shard.order, shard.order_rev = order.assignment, order.rev
            self._dirty = self._dirty or before != (shard.assigned, shard.order_rev, shard.order)
            if shard.stage is Stage.LOADING:
                self._budget(shard)  # it may have been given another
            # Nothing of it runs, or ever ran: without an order there is nothing left to report.
            idle = shard.stage is Stage.HELD or (shard.stage is Stage.WAITING and shard.port is None)
            if not shard.assigned and (idle or shard.stage in GONE):
                del self.shards[name]

    def _carry_out(self, orders: Mapping[str, ev.Order]) -> None:
        for name, order in sorted(orders.items()):
            assignment = order.assignment
            if assignment is None:
                continue
            shard = self.shards.get(name)
            if shard is None:
                shard = Shard(
                    name=name, stage=Stage.HELD, phase_at=self._now.wall_s, order=assignment, order_rev=order.rev
                )
                shard.reason = "never ran on this node" if wants_stop(assignment) else ""
                self.shards[name], self._dirty = shard, True
            if wants_stop(assignment):
                self._stop(shard)
            elif assignment.desired is Desired.RUNNING and not shard.stop:
                self._run(shard)

    def _run(self, shard: Shard) -> None:
        if shard.stage is Stage.HELD:
            self._go(shard, Stage.WAITING, "ordered to run")
        elif shard.stage is Stage.FOUND and shard.port is not None:
            shard.reason = ""
            self._load(shard, "found running, and now its order is known")
        elif shard.stage is Stage.FOUND:
            after = Stage.FAILED if shard.gang else Stage.WAITING
            self._end(shard, after, "found running on a port nobody knows")

    def _stop(self, shard: Shard) -> None:
        if shard.stop:
            return
        shard.stop, self._dirty = True, True
        match shard.stage:
            case Stage.HELD | Stage.WAITING:
                self._over(shard, Stage.STOPPED, "ordered to stop")
            case Stage.READY:
                self._go(shard, Stage.LEAVING, "ordered to stop", due_s=self._config.gateway_wait_s)
            case Stage.LOADING | Stage.FOUND:
                self._terminate(shard, Stage.STOPPED, "ordered to stop")
            case Stage.TERMINATING | Stage.KILLING if shard.after is Stage.WAITING:
                shard.after, shard.phase_at = Stage.STOPPED, self._now.wall_s
            case _:
                pass  # LAUNCHING: when its process is known; the others are on their way, or over

    def _exit(self) -> None:
        self._exiting = True
        why = "the agent exits and takes its engines along"
        for _, shard in sorted(self.shards.items()):
            if shard.stage in (Stage.LOADING, Stage.READY, Stage.FOUND):
                shard.reason = why if shard.gang else shard.reason
                self._terminate(shard, Stage.FAILED if shard.gang else Stage.WAITING, why)
            elif shard.stage in (Stage.LEAVING, Stage.DRAINING):
                self._terminate(shard, Stage.STOPPED, why)

    # --- news of engines ----------------------------------------------------------------------------------------

    def _hear(self, event: ev.EngineStarted | ev.StartRefused | ev.TreeLooked | ev.EngineProbed) -> None:
        """News of an incarnation that is no longer the shard's changes nothing."""
        shard = self.shards.get(event.shard)
        if shard is None or shard.incarnation != event.incarnation:
            return
        match event:
            case ev.EngineStarted() if shard.stage is Stage.LAUNCHING:
                self._started(shard, event)
            case ev.StartRefused() if shard.stage is Stage.LAUNCHING:
                self._refused(shard, event)
            case ev.TreeLooked() if shard.looking if event.whole else shard.watching:
                self._looked(shard, event)
            case ev.EngineProbed() if shard.probing:
                self._probed(shard, event)
            case _:
                pass

    def _started(self, shard: Shard, event: ev.EngineStarted) -> None:
        shard.process, shard.build = event.process, event.build
        if shard.stop or self._exiting:
            after = Stage.FAILED if shard.gang else Stage.WAITING
            self._terminate(shard, Stage.STOPPED if shard.stop else after, "told to stop while starting")
            return
        self._load(shard, "its process is there")

    def _refused(self, shard: Shard, event: ev.StartRefused) -> None:
        shard.forget_engine()
        shard.reason = event.reason
        if shard.stop:
            self._over(shard, Stage.STOPPED, "ordered to stop")
        elif not event.port_taken:
            self._over(shard, Stage.FAILED, event.reason)
        elif shard.attempts == 0 and shard.port is not None:  # no gateway ever saw it there: another port will do
            self._ports.avoid(shard.port, self._now)
            shard.port = None
            self._go(shard, Stage.WAITING, event.reason)
        elif self._count(shard, event.reason):
            self._go(shard, Stage.WAITING, event.reason, due_s=self.backoff_s(shard))
        else:
            self._over(shard, Stage.FAILED, event.reason)

    def _looked(self, shard: Shard, event: ev.TreeLooked) -> None:
        if event.whole:
            shard.looking = False
        else:
            shard.watching = False
        going = shard.stage in (Stage.TERMINATING, Stage.KILLING)
        shard.look_mono_s = self._now.mono_s + (LOOK_GOING_S if going else progress_every_s(shard))
        look = event.look
        if going and not event.whole:
            shard.look_mono_s = self._now.mono_s
        elif going and look.left == 0:
            self._tree_gone(shard, look)
        elif not going and shard.stage in ALIVE and not look.alive:
            why = look.exit or "its process is gone"
            if shard.stop:
                self._end(shard, Stage.STOPPED, f"ended before it was told to: {why}")
            else:
                self._crash(shard, why)
        elif shard.stage is Stage.LOADING and look.progress is not None:
            if shard.progress is not None and look.progress > shard.progress:
                self._got_on(shard)
            shard.progress = look.progress

    def _tree_gone(self, shard: Shard, look: Look) -> None:
        why = look.exit or "no process of it is left"
        after = shard.after or Stage.STOPPED
        if after is Stage.WAITING and shard.order is not None:
            shard.forget_engine()
            self._go(shard, Stage.WAITING, why, due_s=self.backoff_s(shard))
        else:
            self._over(shard, Stage.FAILED if after is Stage.WAITING else after, why)

    def _probed(self, shard: Shard, event: ev.EngineProbed) -> None:
        shard.probing = False
        now_s = self._now.mono_s
        shard.probe_mono_s = now_s + self._probe_every_s(shard)
        match shard.stage, event.purpose, event.result:
            case Stage.LOADING, Purpose.READY, Working() as done:
                shard.context, shard.slots, shard.reason = done.context, done.slots, ""
                self._go(shard, Stage.READY, "did real work", due_s=self._config.stable_s if shard.attempts else None)
                shard.probe_mono_s = now_s + PROBE_LIVE_S
            case Stage.LOADING, _, Loading(detail=said):
                if shard.words not in ("", said):  # the same words again show nothing
                    self._got_on(shard)
                shard.detail = shard.words = said
            case Stage.LOADING, _, Silent(why=said):
                shard.detail = said
            case Stage.LOADING | Stage.READY, _, Wrong(reason=reason):
                self._end(shard, Stage.FAILED, reason)
            case Stage.READY, _, Silent(why=why):
                shard.silent_mono_s = now_s if shard.silent_mono_s is None else shard.silent_mono_s
                if now_s - shard.silent_mono_s >= SILENT_S:
                    self._crash(shard, f"answered nothing for {SILENT_S:g} s: {why}")
            case Stage.READY, _, Working() | Loading():
                shard.silent_mono_s = None
            case Stage.DRAINING, Purpose.IDLE, Working(busy=0):
                self._terminate(shard, Stage.STOPPED, "idle")
            case _:
                pass

    def _probe_every_s(self, shard: Shard) -> float:
        if shard.stage is Stage.READY:
            return PROBE_LIVE_S
        if shard.stage is Stage.DRAINING:
            return PROBE_IDLE_S
        loading_s = self._now.mono_s - shard.stage_mono_s
        return min(PROBE_LOADING_LONG_S, max(PROBE_LOADING_S, PROBE_LOADING_SHARE * loading_s))

    # --- time ---------------------------------------------------------------------------------------------------

    def _advance(self, shard: Shard) -> None:
        """What time alone brings."""
        now_s = self._now.mono_s
        due = shard.due_mono_s is not None and now_s >= shard.due_mono_s
        match shard.stage:
            case Stage.WAITING if not self._exiting and (due or shard.due_mono_s is None):
                self._launch(shard)
            case Stage.LOADING if due:
                self._end(shard, Stage.FAILED, self._too_slow(shard))
            case Stage.READY if due:
                shard.attempts, shard.due_mono_s, self._dirty = 0, None, True
            case Stage.LEAVING if due:
                drain_s = 0.0 if shard.order is None else shard.order.drain_s
                self._go(shard, Stage.DRAINING, "gateways had time to see it", due_s=drain_s)
                shard.probe_mono_s = now_s
            case Stage.DRAINING if due:
                self._terminate(shard, Stage.STOPPED, "still busy at the end of its drain")
            case Stage.TERMINATING if due:
                self._go(shard, Stage.KILLING, "did not end by SIGTERM")
                shard.kill_mono_s = now_s
            case _:
                pass

    def _ask(self, shard: Shard) -> None:
        """The signals, looks and probes that are due."""
        now_s = self._now.mono_s
        if shard.stage is Stage.KILLING and now_s >= shard.kill_mono_s:
            shard.kill_mono_s = now_s + KILL_AGAIN_S
            self._out.append(ev.SignalTree(shard=shard.name, process=shard.process, kill=True))
        name, incarnation, process = shard.name, shard.incarnation, shard.process
        if shard.stage in _WATCHED and not shard.watching:
            shard.watching = True
            self._out.append(ev.WatchProcess(shard=name, incarnation=incarnation, process=process))
        if shard.stage in _LOOKED_AT and not shard.looking and now_s >= shard.look_mono_s:
            shard.looking = True
            self._out.append(ev.LookAtTree(shard=name, incarnation=incarnation, process=process))
        purpose = _PURPOSE.get(shard.stage)
        if purpose is None or shard.probing or now_s < shard.probe_mono_s:
            return
        if shard.process is None or shard.order is None or shard.port is None or shard.incarnation is None:
            return
        shard.probing = True
        self._out.append(
            ev.ProbeEngine(
                shard=shard.name,
                incarnation=shard.incarnation,
                order=shard.order,
                process=shard.process,
                port=shard.port,
                purpose=purpose,
            )
        )
