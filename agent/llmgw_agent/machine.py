"""How shards move from stage to stage: the moves themselves, their story, and what must hold between them.

`Machine` knows no events; `llmgw_agent.supervisor` decides which move an event brings. Every move goes through `_go`,
which holds it against the transition table.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llmgw.config import AgentConfig
from llmgw.core.ids import Ids
from llmgw.core.units import Now
from llmgw.errors import InvariantError
from llmgw_agent.event import Instruction, SignalTree, StartEngine
from llmgw_agent.ports import Ports
from llmgw_agent.room import room_problem
from llmgw_agent.shard import GOING, GONE, MOVES, Shard, Stage

TERM_S: Final[Mapping[str, float]] = {"llama.cpp": 5.0, "vllm": 30.0, "sglang": 30.0}
"""How long each engine gets between SIGTERM and SIGKILL. llama-server with a request in flight never ends by TERM."""

TERM_OTHER_S: Final = 10.0

ROOM_AGAIN_S: Final = 0.5
"""How often a shard that has no port or no room yet looks again, seconds."""

BUDGETS_MAX: Final = 6
"""How many start budgets a load gets in all while it visibly gets on: an hour by default. Some engines write lines for
ever and never get ready."""

PROGRESS_S: Final = 10.0
"""How often progress is looked for while an engine loads, seconds; at least four times a budget."""

LOOK_GOING_S: Final = 0.2
"""How often a tree that is to go is looked at, seconds."""

STORY_LEN_MAX: Final = 500


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One change of one shard, for `story`: when, caused by which event, from where to where, and why."""

    mono_s: float
    cause: str
    shard: str
    before: Stage
    after: Stage
    why: str


class Machine:
    """The shards of one node and the moves they can make. Not thread-safe; one task steps it."""

    def __init__(self, config: AgentConfig, *, ids: Ids) -> None:
        self._config, self._ids = config, ids
        self.shards: dict[str, Shard] = {}
        self._ports = Ports(config.engine_ports, rest_s=config.port_rest_s)
        self._memory_bytes: int | None = None
        self._confirmed = False
        """Whether the store's orders were read since the agent came up."""
        self._dirty = False
        self._out: list[Instruction] = []
        self._now = Now(wall_s=0.0, mono_s=0.0)
        self._cause = ""
        self._story: deque[Entry] = deque(maxlen=STORY_LEN_MAX)
        self._news: list[Entry] = []

    def story(self, name: str) -> list[Entry]:
        """What happened to one shard, oldest first, as far as remembered."""
        return [entry for entry in self._story if entry.shard == name]

    def take_news(self) -> list[Entry]:
        """What happened since the last call, oldest first."""
        news, self._news = self._news, []
        return news

    def validate_state(self) -> None:
        """Raise InvariantError where the state contradicts itself. For tests and the simulation."""
        ports: dict[int, str] = {}
        for name, shard in self.shards.items():
            problem = _contradiction(shard, attempts_max=self._config.restart_attempts + 1)
            if problem is not None:
                raise InvariantError(5, f"{name}: {problem}")
            if shard.port is not None:
                other = ports.setdefault(shard.port, name)
                if other != name:
                    raise InvariantError(2, f"port {shard.port} belongs to {other} and to {name}")

    def _launch(self, shard: Shard) -> None:
        """Start it, or say what it waits for."""
        order = shard.order
        if order is None:
            raise InvariantError(5, f"{shard.name} waits to be started without an order")
        problem = room_problem(shard, self.shards.values(), memory_bytes=self._memory_bytes, confirmed=self._confirmed)
        used = {other.port for other in self.shards.values() if other.port is not None}
        port = self._ports.choose(used, self._now) if shard.port is None else shard.port
        if problem is None and port is None:
            problem = self._ports.explain(used, self._now)
        if problem is not None or port is None:
            self._dirty = self._dirty or shard.reason != problem
            shard.reason = problem or ""
            shard.due_mono_s = self._now.mono_s + ROOM_AGAIN_S
            return
        if shard.attempts == 0:
            shard.reason = ""
        shard.port, shard.incarnation = port, self._ids.token()
        self._go(shard, Stage.LAUNCHING, f"on port {port}")
        self._out.append(StartEngine(shard=shard.name, incarnation=shard.incarnation, order=order, port=port))

    def _load(self, shard: Shard, why: str) -> None:
        """Its process is there; it has its start budget to do real work."""
        self._go(shard, Stage.LOADING, why)
        shard.probe_mono_s = shard.progress_mono_s = self._now.mono_s
        shard.look_mono_s = self._now.mono_s + progress_every_s(shard)
        self._budget(shard)

    def _budget(self, shard: Shard) -> None:
        """A load ends when it has shown nothing for its start budget, or took as many as any load gets."""
        budget_s = start_s(shard)
        shard.due_mono_s = min(shard.progress_mono_s + budget_s, shard.stage_mono_s + BUDGETS_MAX * budget_s)

    def _got_on(self, shard: Shard) -> None:
        """A load was seen to make progress: its budget counts anew."""
        took_s, budget_s = self._now.mono_s - shard.stage_mono_s, start_s(shard)
        shard.progress_mono_s = self._now.mono_s
        more = min(BUDGETS_MAX - 1, math.ceil(took_s / budget_s)) if budget_s > 0 else 0
        if more > shard.extended:
            shard.extended, self._dirty = more, True
        self._budget(shard)

    def _too_slow(self, shard: Shard) -> str:
        """Why a load is given up."""
        budget_s = start_s(shard)
        said = f": {shard.detail}" if shard.detail else ""
        if not shard.extended:
            return f"not ready within {budget_s:g} s{said}"
        if self._now.mono_s >= shard.stage_mono_s + BUDGETS_MAX * budget_s:
            return f"not ready within {BUDGETS_MAX} times {budget_s:g} s, although it went on loading{said}"
        return f"stopped loading: nothing new for {budget_s:g} s{said}"

    def _crash(self, shard: Shard, why: str) -> None:
        """Its own failure: again in place, up to the attempts it has; a gang fails as a whole."""
        again = self._count(shard, why)
        self._end(shard, Stage.WAITING if again else Stage.FAILED, shard.reason)

    def _count(self, shard: Shard, why: str) -> bool:
        """One more start that failed; whether there is another."""
        shard.attempts += 1
        again = not shard.gang and not shard.stop and shard.attempts <= self._config.restart_attempts
        shard.reason = f"{why} (attempt {shard.attempts})" if again else f"{why} (attempt {shard.attempts}, the last)"
        return again

    def backoff_s(self, shard: Shard) -> float:
        """How long a shard waits before its next start."""
        return self._config.restart_backoff_s * 2.0 ** (shard.attempts - 1) if shard.attempts else 0.0

    def _terminate(self, shard: Shard, after: Stage, why: str) -> None:
        """SIGTERM, and what follows when the tree is gone."""
        engine = "" if shard.order is None else shard.order.launch.engine
        self._go(shard, Stage.TERMINATING, why, due_s=TERM_S.get(engine, TERM_OTHER_S), after=after)
        shard.look_mono_s = self._now.mono_s
        self._out.append(SignalTree(shard=shard.name, process=shard.process, kill=False))

    def _end(self, shard: Shard, after: Stage, why: str) -> None:
        """Kill what is left of it at once; `why` is what people are told."""
        shard.reason = why
        self._go(shard, Stage.KILLING, why, after=after)
        shard.look_mono_s = shard.kill_mono_s = self._now.mono_s

    def _over(self, shard: Shard, stage: Stage, why: str) -> None:
        """Nothing of it is left and nothing follows."""
        if shard.port is not None:
            self._ports.rest(shard.port, self._now)
        shard.port = None
        shard.forget_engine()
        if stage is Stage.FAILED and not shard.reason:
            shard.reason = why
        self._go(shard, stage, why)
        if not shard.assigned:
            del self.shards[shard.name]

    def _go(
        self, shard: Shard, stage: Stage, why: str, *, due_s: float | None = None, after: Stage | None = None
    ) -> None:
        if stage not in MOVES[shard.stage]:
            raise InvariantError(5, f"{shard.name}: {shard.stage.value} can't become {stage.value}")
        entry = Entry(
            mono_s=self._now.mono_s, cause=self._cause, shard=shard.name, before=shard.stage, after=stage, why=why
        )
        self._story.append(entry)
        self._news.append(entry)
        before = shard.phase
        shard.stage, shard.stage_mono_s = stage, self._now.mono_s
        shard.due_mono_s = None if due_s is None else self._now.mono_s + due_s
        shard.after = after or (shard.after if stage in GOING else None)
        if shard.phase is not before:
            shard.phase_at = self._now.wall_s
        self._dirty = True


def start_s(shard: Shard) -> float:
    """The start budget of a shard, seconds."""
    return 0.0 if shard.order is None else shard.order.start_s


def progress_every_s(shard: Shard) -> float:
    """How often progress of its load is looked for, seconds."""
    return min(PROGRESS_S, max(LOOK_GOING_S, start_s(shard) / 4))


def _contradiction(shard: Shard, *, attempts_max: int) -> str | None:
    stage = shard.stage
    quiet = stage in GONE or stage in (Stage.HELD, Stage.WAITING)
    checks = {
        "has a process but none should be": quiet and (shard.process is not None or shard.incarnation is not None),
        "has no incarnation": stage is Stage.LAUNCHING and shard.incarnation is None,
        "has no process or no port": stage in (Stage.LOADING, Stage.READY, Stage.LEAVING, Stage.DRAINING)
        and (shard.process is None or shard.port is None),
        "is over but keeps a port": stage in GONE and shard.port is not None,
        "was told to stop but serves": shard.stop
        and stage in (Stage.HELD, Stage.WAITING, Stage.LOADING, Stage.READY, Stage.FOUND),
        "goes without having been told to": stage in (Stage.LEAVING, Stage.DRAINING) and not shard.stop,
        "knows nothing of what follows": stage in (Stage.TERMINATING, Stage.KILLING) and shard.after is None,
        "waits to run without an order": stage in (Stage.WAITING, Stage.LAUNCHING) and shard.order is None,
        "has failed too often": shard.attempts > attempts_max,
        "is loading without an end": stage is Stage.LOADING and shard.due_mono_s is None,
        "would start although it was told to stop": shard.stop and shard.after is Stage.WAITING,
    }
    return next((what for what, broken in checks.items() if broken), None)
