"""What the supervisor is told (events, in the past tense) and what it asks for (instructions, in the imperative).

Data only. Every event about an engine names its incarnation, so that news of an engine that is gone changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from llmgw.core.replica import Assignment
from llmgw_agent.host import Found, Look, Probe, Purpose
from llmgw_agent.state import Process, SavedState


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all of them."""


class Order(Message, frozen=True, kw_only=True):
    """One assignment as stored at `rev` (its mod_revision). `assignment` None: there, but it can't be read."""

    rev: int
    assignment: Assignment | None


class Restored(Message, frozen=True, kw_only=True):
    """The agent came up: what it had saved (None: nothing usable) and which of its processes live.

    `lost`: there was a state, but it can't be read.
    """

    saved: SavedState | None
    found: tuple[Found, ...]
    lost: bool = False


class OrdersRead(Message, frozen=True, kw_only=True):
    """All orders of this node, read before its session is held: they label what runs, nothing is done about them."""

    orders: Mapping[str, Order]


class OrdersSeen(Message, frozen=True, kw_only=True):
    """All orders of this node, by shard, at one moment of the store: to be carried out."""

    orders: Mapping[str, Order]


class SessionHeld(Message, frozen=True, kw_only=True):
    """The node's session hangs on `lease` now."""

    lease: int


class MemoryKnown(Message, frozen=True, kw_only=True):
    """How much memory this node has for engines; None: unknown, so nothing waits for room."""

    memory_bytes: int | None


class EngineStarted(Message, frozen=True, kw_only=True):
    """The process is there; it has not answered yet."""

    shard: str
    incarnation: str
    process: Process
    build: str


class StartRefused(Message, frozen=True, kw_only=True):
    """No process was started. `port_taken`: only for want of the port."""

    shard: str
    incarnation: str
    reason: str
    port_taken: bool = False


class TreeLooked(Message, frozen=True, kw_only=True):
    """A look at a shard's processes: all of them (`whole`), or at the main one, which is gone."""

    shard: str
    incarnation: str | None
    whole: bool
    look: Look


class EngineProbed(Message, frozen=True, kw_only=True):
    """An answer of an engine, or its absence."""

    shard: str
    incarnation: str
    purpose: Purpose
    result: Probe


class StateNotSaved(Message, frozen=True, kw_only=True):
    """The state could not be written."""

    reason: str


class ExitRequested(Message, frozen=True, kw_only=True):
    """The agent goes and its engines with it (`on_exit: stop`); no order is forgotten."""


class TimePassed(Message, frozen=True, kw_only=True):
    """Nothing happened but time."""


Event = (
    Restored
    | OrdersRead
    | OrdersSeen
    | SessionHeld
    | MemoryKnown
    | EngineStarted
    | StartRefused
    | TreeLooked
    | EngineProbed
    | StateNotSaved
    | ExitRequested
    | TimePassed
)


class SaveState(Message, frozen=True, kw_only=True):
    """Write this before anything else of the same step is done."""

    state: SavedState


class StartEngine(Message, frozen=True, kw_only=True):
    """Start it; `EngineStarted` or `StartRefused` is due."""

    shard: str
    incarnation: str
    order: Assignment
    port: int


class WatchProcess(Message, frozen=True, kw_only=True):
    """Say when the main process is gone: `TreeLooked`, not whole, is due then and not before."""

    shard: str
    incarnation: str | None
    process: Process | None


class LookAtTree(Message, frozen=True, kw_only=True):
    """Look at all its processes; `TreeLooked` is due."""

    shard: str
    incarnation: str | None
    process: Process | None


class ProbeEngine(Message, frozen=True, kw_only=True):
    """Ask the engine; `EngineProbed` is due."""

    shard: str
    incarnation: str
    order: Assignment
    process: Process
    port: int
    purpose: Purpose


class SignalTree(Message, frozen=True, kw_only=True):
    """SIGTERM, or with `kill` SIGKILL to the whole tree; the next look tells what came of it."""

    shard: str
    process: Process | None
    kill: bool


Instruction = SaveState | StartEngine | WatchProcess | LookAtTree | ProbeEngine | SignalTree
