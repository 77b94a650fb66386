"""The machine as the agent sees it. This docstring is the contract of the real host and of the simulated one.

Everything the agent does outside its own memory and the store goes through a `Host`, so that the same agent runs under
trio's MockClock on a fake one. Calls never raise for what may happen to a machine; they answer with data, or with
`StartFailed`. A process is never signalled unless it is provably ours: pid, start time, boot and mark agree.
"""

from __future__ import annotations

import enum
from typing import Final, Protocol

import msgspec

from llmgw.core.node import Facts
from llmgw.core.replica import Assignment
from llmgw.errors import LlmgwError
from llmgw_agent.state import Process, SavedState


class StartFailed(LlmgwError):
    """An engine could not be started. `port_taken`: only because another process listens on the port."""

    def __init__(self, reason: str, *, port_taken: bool = False) -> None:
        self.reason, self.port_taken = reason, port_taken
        super().__init__(reason)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on disk. `state` None: nothing usable. `damage`: what could not be read, for people.

    `lost` true: there was a state that can't be read, so what it knew (ports at rest, stops) is unknown, not empty.
    """

    state: SavedState | None
    damage: tuple[str, ...] = ()
    lost: bool = False


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One live process that bears this data directory's mark.

    `node`: the name the agent had when it started it. `port`: the one its engine was started with, None if unknown.
    """

    node: str
    shard: str
    incarnation: str
    process: Process
    port: int | None = None


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A started engine: its main process and the id of the build it runs."""

    process: Process
    build: str


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a shard's tree. `alive`: the main process; `left`: live processes in all, it included.

    `left` is exact only when the whole tree was asked for. `exit`: how the main process ended, in words, once it did.
    `progress`: a count that grows when the engine visibly gets on (its log, its memory); None: that was not looked at,
    or can't be told.
    """

    alive: bool
    left: int
    exit: str = ""
    progress: int | None = None


class Purpose(enum.Enum):
    """Why an engine is probed."""

    READY = "ready"
    """Has it done real work of its model's task, and is it what was ordered?"""
    LIVE = "live"
    """Does it still answer?"""
    IDLE = "idle"
    """Is no request in flight?"""


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """Not ready yet, and nothing is wrong with that. `detail`: in the engine's words."""

    detail: str = ""


class Working(msgspec.Struct, frozen=True, kw_only=True):
    """It did what was asked. `context` (tokens a slot) and `slots` as read back, None where not asked.

    `busy`: requests in flight, None when that was not asked or could not be told.
    """

    context: int | None = None
    slots: int | None = None
    busy: int | None = None


class Wrong(msgspec.Struct, frozen=True, kw_only=True):
    """It runs, but is not what was ordered, or can't do its model's task; starting it again would not help."""

    reason: str


class Silent(msgspec.Struct, frozen=True, kw_only=True):
    """No answer within the probe's bound: busy, hung or gone; the process list tells which."""

    why: str = ""


Probe = Loading | Working | Wrong | Silent


LOOK_S: Final = 1.0
"""How often a running engine's main process is looked at, seconds."""


class Host(Protocol):
    """One machine and the one data directory of this agent on it."""

    @property
    def boot_id(self) -> str:
        """The kernel's boot id; another one means that no process of before is left."""
        ...

    @property
    def data(self) -> str:
        """device:inode of the locked lock file in the data directory."""
        ...

    @property
    def pid(self) -> int:
        """The agent's own process id, for people."""
        ...

    async def load(self) -> Loaded:
        """The saved state. Damaged files are kept aside first, under a name that says so."""
        ...

    async def save(self, state: SavedState) -> None:
        """Write it durably and atomically. Raises OSError (a full disk); the old state is then still there."""
        ...

    async def find(self) -> tuple[Found, ...]:
        """The oldest live process of each incarnation of each shard that bears this data directory's mark."""
        ...

    async def start(self, order: Assignment, *, incarnation: str, port: int) -> Launched:
        """Start an engine in its own session, logging to files. Raises StartFailed."""
        ...

    async def look(self, shard: str, process: Process | None, *, whole: bool) -> Look:
        """Whether the main process lives; with `whole`, how many processes of the shard's tree do, in any session."""
        ...

    async def gone(self, shard: str, process: Process | None) -> Look:
        """As `look`, as soon as the main process is gone (seen within `LOOK_S`)."""
        ...

    async def signal(self, shard: str, process: Process | None, *, kill: bool) -> None:
        """SIGTERM to the main process, or with `kill` SIGKILL to the whole tree. Gone is fine."""
        ...

    async def probe(self, order: Assignment, *, process: Process, port: int, purpose: Purpose) -> Probe:
        """Ask the engine on `port`; bounded in time (5 s, with READY's real work 60 s)."""
        ...

    async def facts(self) -> Facts:
        """What the machine is; what can't be told in time is unknown."""
        ...
