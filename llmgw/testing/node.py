"""One node without a machine: orders and configs for tests, and a bench that plays the host to the agent's supervisor.

The bench answers every instruction at once, from a small world of engines that a test scripts, and has the supervisor
check its own state after each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmgw.config import AgentConfig
from llmgw.core.catalog import Task
from llmgw.core.ids import CountedIds, Secret
from llmgw.core.replica import Assignment, Claim, Desired, Launch, ShardReport
from llmgw.core.units import Now
from llmgw_agent import event as ev
from llmgw_agent.host import Found, Loading, Look, Probe, Purpose, Silent, Working
from llmgw_agent.state import Process, SavedState
from llmgw_agent.supervisor import Supervisor

BOOT = "boot-1"
DATA = "64:1000"


def agent_config(**changes: Any) -> AgentConfig:
    """A node `n1` with five engine ports."""
    values: dict[str, Any] = {"name": "n1", "data_dir": "/nowhere", "engine_ports": (20000, 20004)}
    return AgentConfig(**{**values, **changes})


def assignment(replica: str = "m-aaaaa", **changes: Any) -> Assignment:
    """An order to node `n1` to run a model `m` on CPUs; `launch` takes a mapping of changes."""
    launch: dict[str, Any] = {"source": "tiny.gguf", "task": Task.GENERATE, "profile": "cpu", "engine": "llama.cpp"}
    launch |= {"context": 512, "slots": 2}
    launch |= changes.pop("launch", {})
    values: dict[str, Any] = {
        "node": "n1",
        "replica": replica,
        "rank": 0,
        "model": "m",
        "desired": Desired.RUNNING,
        "launch": Launch(**launch),
        "claim": Claim(memory_bytes=changes.pop("memory_bytes", None)),
        "engine_key": Secret("ab" * 32),
        "start_s": 60.0,
        "drain_s": 30.0,
    }
    return Assignment(**{**values, **changes})


def stopped(order: Assignment) -> Assignment:
    """The same, told to stop."""
    return msgspec.structs.replace(order, desired=Desired.STOPPED)


def orders(entries: Iterable[tuple[int, Assignment]]) -> dict[str, ev.Order]:
    """Assignments with their revisions, as the supervisor is told them."""
    return {f"{a.replica}.{a.rank}": ev.Order(rev=rev, assignment=a) for rev, a in entries}


@dataclass(kw_only=True)
class ScriptedEngine:
    """One start of an engine. `left`: processes of its tree that live beside the main one and ignore SIGTERM.

    `stalls_at_s`: until when it visibly gets on, second by second.
    """

    process: Process
    port: int
    started_s: float
    ready_at_s: float
    stalls_at_s: float
    alive: bool = True
    obeys_term: bool = True
    left: int = 0
    busy: int = 0
    answers: bool = True
    exit: str = ""
    result: Probe | None = None

    def end(self, words: str) -> None:
        """The main process ends by itself."""
        self.alive, self.exit = False, words


@dataclass(kw_only=True)
class Script:
    """How engines behave that are started from now on. `refusals`: reasons, one used up a start.

    `gets_on_s`: for how long after its start it visibly gets on.
    """

    load_s: float = 1.0
    gets_on_s: float = 0.0
    obeys_term: bool = True
    left: int = 0
    busy: int = 0
    refusals: deque[tuple[str, bool]] = field(default_factory=deque)


class Bench:
    """A supervisor on a machine that does exactly what the test's script says."""

    def __init__(self, config: AgentConfig | None = None, *, boot: str = BOOT) -> None:
        self.config = config or agent_config()
        self.now_s, self.wall_s = 100.0, 1_000_000.0
        self.boot = boot
        self.script = Script()
        self.engines: dict[str, ScriptedEngine] = {}
        """The newest start of each shard."""
        self.saved: SavedState | None = None
        self.done: list[ev.Instruction] = []
        self.starts: list[tuple[str, int]] = []
        """(shard, port) of every engine that was started."""
        self._watched: list[ev.WatchProcess] = []
        self._ids = CountedIds()
        self._pid = 1000
        self.supervisor = self._fresh()

    def _fresh(self) -> Supervisor:
        return Supervisor(self.config, data=DATA, boot_id=self.boot, ids=self._ids)

    # --- what a test does ---------------------------------------------------------------------------------------

    def tell(self, *events: ev.Event) -> None:
        """Hand over events, do what the supervisor asks, tell it what came of it, until it asks no more."""
        waiting = deque(events)
        while waiting:
            for instruction in self._step(waiting.popleft()):
                answer = self._do(instruction)
                if answer is not None:
                    waiting.append(answer)

    def see(self, *entries: tuple[int, Assignment]) -> None:
        """The store holds exactly these orders."""
        self.tell(ev.OrdersSeen(orders=orders(entries)))

    def run(self, seconds: float) -> None:
        """Let time pass, waking the supervisor whenever it wants to be woken."""
        end_s = self.now_s + seconds
        while True:
            self._tell_gone()
            wake_s = self.supervisor.wake_mono_s()
            if wake_s is None or wake_s > end_s:
                break
            # Never backwards, and never standing still for ever: a wake-up that is due changes something.
            self._advance(max(wake_s - self.now_s, 1e-6))
            self.tell(ev.TimePassed())
        self._advance(end_s - self.now_s)

    def restart(self, *, boot: str | None = None, saved: SavedState | None = None, lost: bool = False) -> None:
        """The agent dies and comes back: with the state it saved (or `saved`), on what still runs."""
        if boot is not None:
            self.boot = boot
            self.engines.clear()
        self._watched.clear()
        state = saved if saved is not None or lost else self.saved
        self.supervisor = self._fresh()
        self.tell(ev.Restored(saved=state, found=self.found(), lost=lost))

    def found(self) -> tuple[Found, ...]:
        """What a look through the processes would find."""
        return tuple(
            Found(
                node=self.config.name,
                shard=shard,
                incarnation=engine.process.mark.rpartition("/")[2],
                process=engine.process if engine.alive else msgspec.structs.replace(engine.process, pid=1, started=1),
                port=engine.port,
            )
            for shard, engine in self.engines.items()
            if engine.alive or engine.left
        )

    def report(self, shard: str = "m-aaaaa.0") -> ShardReport:
        """What the store would hold of a shard."""
        return self.supervisor.reports()[shard]

    def runs(self, shard: str = "m-aaaaa.0") -> bool:
        """Whether the main process of the newest start lives."""
        return self.engines[shard].alive

    @property
    def reports(self) -> Mapping[str, ShardReport]:
        """All of it."""
        return self.supervisor.reports()

    def story(self, shard: str = "m-aaaaa.0") -> list[str]:
        """Its changes as lines: `before -> after: why`."""
        return [f"{e.before.value} -> {e.after.value}: {e.why}" for e in self.supervisor.story(shard)]

    # --- the machine --------------------------------------------------------------------------------------------

    def _advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.wall_s += seconds

    def _tell_gone(self) -> None:
        """Answer what was asked to be told once an engine is gone."""
        for ask in [ask for ask in self._watched if not self._is_alive(ask)]:
            self._watched.remove(ask)
            look = self._look(ask.shard, whole=False)
            self.tell(ev.TreeLooked(shard=ask.shard, incarnation=ask.incarnation, whole=False, look=look))

    def _is_alive(self, ask: ev.WatchProcess) -> bool:
        engine = self.engines.get(ask.shard)
        return engine is not None and engine.process == ask.process and engine.alive

    def _step(self, event: ev.Event) -> list[ev.Instruction]:
        changes, reports = self.supervisor.changes, self.supervisor.reports()
        out = self.supervisor.step(event, Now(wall_s=self.wall_s, mono_s=self.now_s))
        self.supervisor.validate_state()
        assert self.supervisor.changes > changes or self.supervisor.reports() == reports, "nobody would publish it"
        self.done.extend(out)
        return out

    def _do(self, instruction: ev.Instruction) -> ev.Event | None:
        match instruction:
            case ev.SaveState(state=state):
                self.saved = state
                return None
            case ev.StartEngine():
                return self._start(instruction)
            case ev.SignalTree(shard=shard, kill=kill):
                self._signal(shard, kill=kill)
                return None
            case ev.WatchProcess():
                self._watched.append(instruction)
                return None
            case ev.LookAtTree(shard=shard, incarnation=incarnation):
                look = self._look(shard, whole=True)
                return ev.TreeLooked(shard=shard, incarnation=incarnation, whole=True, look=look)
            case ev.ProbeEngine(shard=shard, incarnation=incarnation, purpose=purpose):
                return ev.EngineProbed(
                    shard=shard, incarnation=incarnation, purpose=purpose, result=self._probe(shard, purpose)
                )

    def _start(self, start: ev.StartEngine) -> ev.Event:
        assert not self._runs(start.shard), f"{start.shard} is started although it runs"
        if self.script.refusals:
            reason, port_taken = self.script.refusals.popleft()
            return ev.StartRefused(
                shard=start.shard, incarnation=start.incarnation, reason=reason, port_taken=port_taken
            )
        self._pid += 1
        process = Process(
            pid=self._pid,
            started=int(self.now_s * 100),
            boot_id=self.boot,
            mark=f"{DATA}/{self.config.name}/{start.shard}/{start.incarnation}",
        )
        self.engines[start.shard] = ScriptedEngine(
            process=process,
            port=start.port,
            started_s=self.now_s,
            ready_at_s=self.now_s + self.script.load_s,
            stalls_at_s=self.now_s + self.script.gets_on_s,
            obeys_term=self.script.obeys_term,
            left=self.script.left,
            busy=self.script.busy,
        )
        self.starts.append((start.shard, start.port))
        return ev.EngineStarted(shard=start.shard, incarnation=start.incarnation, process=process, build="llama.cpp@1")

    def _runs(self, shard: str) -> bool:
        engine = self.engines.get(shard)
        return engine is not None and (engine.alive or engine.left > 0)

    def _signal(self, shard: str, *, kill: bool) -> None:
        engine = self.engines.get(shard)
        if engine is None:
            return
        if kill:
            engine.end(engine.exit or "ended by SIGKILL")
            engine.left = 0
        elif engine.obeys_term:
            engine.end(engine.exit or "exit 0")

    def _look(self, shard: str, *, whole: bool) -> Look:
        engine = self.engines.get(shard)
        if engine is None:
            return Look(alive=False, left=0)
        steps = int(min(self.now_s, engine.stalls_at_s) - engine.started_s) if whole else None
        return Look(alive=engine.alive, left=int(engine.alive) + engine.left, exit=engine.exit, progress=steps)

    def _probe(self, shard: str, purpose: Purpose) -> Probe:
        engine = self.engines.get(shard)
        if engine is None or not engine.alive or not engine.answers:
            return Silent(why="nothing listens")
        if engine.result is not None:
            return engine.result
        if self.now_s < engine.ready_at_s:
            return Loading(detail="Loading model")
        if purpose is Purpose.IDLE:
            return Working(busy=engine.busy)
        return Working(context=512, slots=2) if purpose is Purpose.READY else Working()
