"""A reader of `follow` for tests: folds what it is told, as every user of it must, and can be waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from llmgw.store.follow import Following, follow
from llmgw.store.port import Reset, Store

WAIT_S = 30.0
"""Dead-line for whatever must come, seconds; real etcd on a busy machine."""


class Reader:
    """What is known below some prefixes, and how it came to be known."""

    def __init__(self, following: Following) -> None:
        self.following = following
        self.known: dict[str, bytes] = {}
        self.causes: list[str] = []
        """Of each `Reset`, in order."""
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Fold until cancelled."""
        async for word in self.following:
            if isinstance(word, Reset):
                self.causes.append(word.cause)
                self.known = {item.key: item.value for item in word.items}
            else:
                for event in word.events:
                    if event.value is None:
                        self.known.pop(event.key, None)
                    else:
                        self.known[event.key] = event.value
            self._changed.set()
            self._changed = anyio.Event()

    async def until(self, condition: Callable[[dict[str, bytes]], bool]) -> None:
        """Return once what is known fulfils `condition`. Raises TimeoutError."""
        with anyio.fail_after(WAIT_S):
            while not condition(self.known):
                await self._changed.wait()

    async def sees(self, key: str, value: bytes) -> None:
        """Return once `key` is known to have `value`. Raises TimeoutError."""
        await self.until(lambda known: known.get(key) == value)


@asynccontextmanager
async def reading(store: Store, prefixes: Sequence[str]) -> AsyncIterator[Reader]:
    """Follow `prefixes` while the context lasts; entered once the first listing is folded in."""
    async with follow(store, prefixes, jitter=lambda: 0.0) as following, anyio.create_task_group() as tasks:
        reader = Reader(following)
        tasks.start_soon(reader.run)
        await reader.until(lambda _: bool(reader.causes))
        yield reader
        tasks.cancel_scope.cancel()
