"""What the agent keeps on disk, so that it knows its engines again after its own death and after a reboot.

Read whole or not at all. A file that can't be read is never "nothing runs here": it is kept aside, the copy before it
is used for the orders, and the engines are found again by their marks.
"""

from __future__ import annotations

from typing import Final

import msgspec

from llmgw.core.ids import Secret
from llmgw.core.record import Record
from llmgw.core.replica import Assignment

STATE_FORMAT: Final = 1
"""Version of the file. A newer one is refused as unreadable, never guessed at."""


class Process(Record, frozen=True, kw_only=True):
    """One process, told apart from whatever has its number later.

    `started`: clock ticks since boot (field 22 of /proc/PID/stat). `boot_id`: the kernel's. `mark`: LLMGW_SHARD in its
    environment.
    """

    pid: int
    started: int
    boot_id: str
    mark: str


class SavedShard(Record, frozen=True, kw_only=True):
    """One shard as the supervisor left it. `stage` is the value of a `Stage`; times are Unix seconds.

    `order` None: found running without any order. `port` belongs to the shard until it is gone.
    """

    name: str
    stage: str
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
    phase_at: float = 0.0


class SavedState(Record, frozen=True, kw_only=True):
    """The file. `data`, `boot_id`: device:inode of the lock file, and the boot, it was written under.

    `lease`: of the session held last, 0 for none. `resting`: port -> when its shard was gone, Unix seconds.
    `memory_bytes`: what the node had for engines, None when unknown; good until it is looked at again.
    """

    format: int = STATE_FORMAT
    node: str
    data: str
    boot_id: str
    lease: int = 0
    shards: tuple[SavedShard, ...] = ()
    resting: dict[int, float] = {}
    memory_bytes: int | None = None


def _decode(kind: type, value: object) -> object:
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise msgspec.ValidationError(f"expected {kind.__name__}")


_DECODER: Final = msgspec.json.Decoder(SavedState, dec_hook=_decode)


def decode_state(raw: bytes) -> SavedState:
    """The state in `raw`. Raises ValueError saying what is wrong with it."""
    try:
        state = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    if state.format > STATE_FORMAT:
        raise ValueError(f"is of format {state.format}, this agent reads up to {STATE_FORMAT}")
    return state
