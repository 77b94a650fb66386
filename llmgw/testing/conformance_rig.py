"""What a check of the store's contract is given, and what all of them use. See `llmgw.testing.conformance`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import anyio

from llmgw.store.port import Batch, Event, PutOp, Store

WAIT_S = 20.0
"""Dead-line for whatever must happen soon."""


@dataclass(kw_only=True)
class Rig:
    """Two clients of one store, and a prefix (ending with `/`) that nobody else uses.

    `compact`: make the store forget history below a revision.
    """

    store: Store
    other: Store
    root: str
    compact: Callable[[int], Awaitable[None]]


Check = Callable[[Rig], Awaitable[None]]


async def put(store: Store, key: str, value: bytes = b"v", *, lease: int = 0) -> int:
    """Write one key; returns the revision."""
    return (await store.txn([], [PutOp(key=key, value=value, lease=lease)])).revision


async def events_until(batches: AsyncIterator[Batch], revision: int) -> list[Event]:
    """Every event up to `revision`, which must be one that reaches this watch."""
    events: list[Event] = []
    with anyio.fail_after(WAIT_S):
        async for batch in batches:
            assert all(event.mod_revision <= batch.revision for event in batch.events)
            events.extend(batch.events)
            if events and events[-1].mod_revision >= revision:
                break
    return events
