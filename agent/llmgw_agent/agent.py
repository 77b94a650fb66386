"""The agent itself: supervisor, session and host put together.

Engines are supervised from the first moment, from the saved orders; the store is joined when it answers, and may go
away again. Events go through one queue to one task that steps the supervisor; what it asks for is done by tasks beside
it, whose news come back as events.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from llmgw.config import AgentConfig
from llmgw.core.ids import Ids
from llmgw.core.node import EngineFacts, Facts
from llmgw.core.replica import ShardReport
from llmgw.errors import Refused
from llmgw.obs.clock import WallClock, now
from llmgw.store.port import Store
from llmgw_agent import event as ev
from llmgw_agent.host import Found, Host, StartFailed
from llmgw_agent.session import SessionKeeper
from llmgw_agent.state import SavedState
from llmgw_agent.supervisor import Supervisor

STOP_ALL_S: Final = 45.0
"""How long engines get to end with the agent under `on_exit: stop`, seconds: TERM, the longest grace, KILL."""

FAREWELL_S: Final = 3.0

FIRST_FACTS_S: Final = 10.0
"""How long the session waits for the first facts, so that a restart does not make known things unknown."""

EVENTS_MAX: Final = 64
"""Most events that are taken in before the state is saved and anything is done."""

Posted = tuple[ev.Event, anyio.Event]
"""An event, and what is set when it was taken in."""

log = logging.getLogger(__name__)


async def run_agent(store: Store, host: Host, config: AgentConfig, *, wall: WallClock, ids: Ids) -> None:
    """Run one node's agent until cancelled. With `on_exit: keep` the engines outlive it.

    Uses `anyio.current_time()` and `anyio.sleep` only, so a run under MockClock moves all of it.

    Raises:
        Refused: engines of another node's name still run out of this data directory.
    """
    agent = Agent(host, config, wall=wall, ids=ids)
    await agent.restore()
    keeper = SessionKeeper(store, config, agent, wall=wall, boot_id=host.boot_id, data=host.data, pid=host.pid)
    async with anyio.create_task_group() as outer:
        supervising = anyio.CancelScope(shield=True)
        outer.start_soon(agent.supervise, supervising)
        try:
            async with anyio.create_task_group() as inner:
                with anyio.move_on_after(FIRST_FACTS_S):
                    await agent.look_at_machine()
                inner.start_soon(agent.watch_facts)
                inner.start_soon(keeper.run)
        finally:
            if config.on_exit == "stop" and not agent.failed:
                await _take_all_along(agent, keeper)
            supervising.cancel()


async def _take_all_along(agent: Agent, keeper: SessionKeeper) -> None:
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(STOP_ALL_S):
            await agent.stop_all()
        with anyio.move_on_after(FAREWELL_S):
            await keeper.farewell()


class Agent:
    """The shell around the supervisor; also the session's `Desk`."""

    def __init__(self, host: Host, config: AgentConfig, *, wall: WallClock, ids: Ids) -> None:
        self._host, self._config, self._wall = host, config, wall
        self.supervisor = Supervisor(config, data=host.data, boot_id=host.boot_id, ids=ids)
        self._events: deque[Posted] = deque()
        self._posted = anyio.Event()
        self._facts = Facts(
            node=config.name, boot_id=host.boot_id, labels=config.labels, engines=EngineFacts(probed=False)
        )
        self.failed = False
        """Whether the supervising task came to grief, so that nobody would answer."""
        self._shown = 0
        """How often the supervisor had changed when others were last told of it."""
        self._version = 0
        self._moved = anyio.Event()

    # --- the session's desk -------------------------------------------------------------------------------------

    @property
    def facts(self) -> Facts:
        """What is known of the machine; hardly anything until it was looked at."""
        return self._facts

    @property
    def lease(self) -> int:
        """The lease of the session held last, 0 for none."""
        return self.supervisor.lease

    def reports(self) -> Mapping[str, ShardReport]:
        """What is to stand in the store, by shard."""
        return self.supervisor.reports()

    async def tell(self, event: ev.Event) -> None:
        """Hand an event to the supervisor; returns when it was taken in and what it changed is on disk."""
        done = self._post(event)
        await done.wait()

    async def wait_changed(self, since: int) -> int:
        """Until reports or facts may have changed; versions only grow."""
        while self._version <= since:
            await self._moved.wait()
        return self._version

    # --- coming up ----------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Take up what was saved and what runs, before anything else. Raises: Refused."""
        loaded = await self._host.load()
        for what in loaded.damage:
            log.error("damaged state", extra={"fields": {"what": what}})
        found = await self._host.find()
        saved = self._judge(loaded.state, found)
        event = ev.Restored(saved=saved, found=found, lost=loaded.lost)
        self._post(event)
        if saved is not None or found:
            shards = 0 if saved is None else len(saved.shards)
            log.info("taking up what was", extra={"fields": {"saved": shards, "running": len(found)}})

    def _judge(self, saved: SavedState | None, found: Sequence[Found]) -> SavedState | None:
        """What of the saved state is this agent's."""
        name = self._config.name
        strangers = sorted({item.node for item in found if item.node != name})
        if strangers:
            raise Refused(
                f"engines of node {strangers[0]!r} still run out of this data directory, and this agent is {name!r}: "
                f"start it once more as {strangers[0]!r} and drain it before renaming it"
            )
        if saved is None:
            return None
        if not self._same_place(saved):
            log.error(
                "the data directory is a copy: the saved orders are another agent's and are ignored",
                extra={"fields": {"written_as": saved.data, "here": self._host.data}},
            )
            return None
        if saved.node != name:
            log.warning("renamed; what was saved is forgotten", extra={"fields": {"was": saved.node, "is": name}})
            return None
        return saved

    def _same_place(self, saved: SavedState) -> bool:
        """Whether this is the directory it was saved in. Device numbers may change from one boot to the next."""
        if saved.boot_id == self._host.boot_id:
            return saved.data == self._host.data
        return saved.data.rpartition(":")[2] == self._host.data.rpartition(":")[2]

    # --- supervising --------------------------------------------------------------------------------------------

    async def supervise(self, scope: anyio.CancelScope) -> None:
        """Step the supervisor and do what it asks, until `scope` is cancelled."""
        try:
            with scope:
                async with anyio.create_task_group() as tasks:
                    while True:
                        events = await self._next()
                        await self._perform(self._step(events), tasks)
                        if self.supervisor.changes != self._shown:
                            self._shown = self.supervisor.changes
                            self._change()
                        for _, done in events:
                            done.set()
        finally:
            self.failed = True

    async def stop_all(self) -> None:
        """End every engine; returns when no process is left."""
        await self.tell(ev.ExitRequested())
        version = 0
        while not self.supervisor.quiet:
            version = await self.wait_changed(version)

    async def watch_facts(self) -> None:
        """Look at the machine every `facts_interval_s`."""
        while True:
            await anyio.sleep(self._config.facts_interval_s)
            await self.look_at_machine()

    async def look_at_machine(self) -> None:
        """Look at it now."""
        facts = await self._host.facts()
        if facts != self._facts:
            self._facts = facts
            self._change()
            await self.tell(ev.MemoryKnown(memory_bytes=facts.memory_bytes))

    def _post(self, event: ev.Event) -> anyio.Event:
        done = anyio.Event()
        self._events.append((event, done))
        self._posted.set()
        return done

    def _change(self) -> None:
        self._version += 1
        self._moved.set()
        self._moved = anyio.Event()

    async def _next(self) -> list[Posted]:
        """The events there are, at least one; the passing of time where that is due first."""
        wake_mono_s = self.supervisor.wake_mono_s()
        if self._events:
            await anyio.lowlevel.checkpoint()
        else:
            self._posted = anyio.Event()
            with anyio.CancelScope(deadline=math.inf if wake_mono_s is None else wake_mono_s):
                await self._posted.wait()
        events = [self._events.popleft() for _ in range(min(len(self._events), EVENTS_MAX))]
        return events or [(ev.TimePassed(), anyio.Event())]

    def _step(self, events: Sequence[Posted]) -> list[ev.Instruction]:
        """Take in all of them; what is to be saved is saved once, and first."""
        out: list[ev.Instruction] = []
        save: ev.SaveState | None = None
        for event, _ in events:
            for instruction in self.supervisor.step(event, now(self._wall)):
                if isinstance(instruction, ev.SaveState):
                    save = instruction
                else:
                    out.append(instruction)
        for entry in self.supervisor.take_news():
            fields = {"shard": entry.shard, "was": entry.before.value, "is": entry.after.value, "why": entry.why}
            log.info("shard", extra={"fields": fields})
        return out if save is None else [save, *out]

    async def _perform(self, instructions: Sequence[ev.Instruction], tasks: TaskGroup) -> None:
        unsaved: str | None = None
        for instruction in instructions:
            match instruction:
                case ev.SaveState(state=state):
                    unsaved = await self._save(state)
                case ev.StartEngine() if unsaved is not None:
                    self._refuse(instruction, f"the agent can't save its state: {unsaved}")
                case ev.StartEngine():
                    tasks.start_soon(self._start, instruction)
                case ev.WatchProcess():
                    tasks.start_soon(self._watch, instruction)
                case ev.LookAtTree():
                    tasks.start_soon(self._look, instruction)
                case ev.ProbeEngine():
                    tasks.start_soon(self._probe, instruction)
                case ev.SignalTree(shard=shard, process=process, kill=kill):
                    await self._host.signal(shard, process, kill=kill)

    async def _save(self, state: SavedState) -> str | None:
        """Why the state could not be written; None when it was."""
        try:
            await self._host.save(state)
        except OSError as error:
            log.error("can't save the agent's state", extra={"fields": {"why": str(error)}})  # noqa: TRY400
            self._post(ev.StateNotSaved(reason=str(error)))
            return str(error)
        return None

    def _refuse(self, start: ev.StartEngine, reason: str, *, port_taken: bool = False) -> None:
        self._post(
            ev.StartRefused(shard=start.shard, incarnation=start.incarnation, reason=reason, port_taken=port_taken)
        )

    async def _start(self, start: ev.StartEngine) -> None:
        try:
            launched = await self._host.start(start.order, incarnation=start.incarnation, port=start.port)
        except StartFailed as error:
            self._refuse(start, error.reason, port_taken=error.port_taken)
            return
        fields = {"shard": start.shard, "pid": launched.process.pid, "port": start.port, "build": launched.build}
        log.info("engine started", extra={"fields": fields})
        self._post(
            ev.EngineStarted(
                shard=start.shard, incarnation=start.incarnation, process=launched.process, build=launched.build
            )
        )

    async def _watch(self, ask: ev.WatchProcess) -> None:
        look = await self._host.gone(ask.shard, ask.process)
        self._post(ev.TreeLooked(shard=ask.shard, incarnation=ask.incarnation, whole=False, look=look))

    async def _look(self, ask: ev.LookAtTree) -> None:
        look = await self._host.look(ask.shard, ask.process, whole=True)
        self._post(ev.TreeLooked(shard=ask.shard, incarnation=ask.incarnation, whole=True, look=look))

    async def _probe(self, ask: ev.ProbeEngine) -> None:
        result = await self._host.probe(ask.order, process=ask.process, port=ask.port, purpose=ask.purpose)
        self._post(ev.EngineProbed(shard=ask.shard, incarnation=ask.incarnation, purpose=ask.purpose, result=result))
