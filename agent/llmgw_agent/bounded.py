"""Blocking work on threads, bounded: a file system or a /proc entry that never answers must not silence the agent.

Each piece of work has a name, and at most one call of a name is out at a time: what hangs, hangs once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


class Hung(Exception):  # named by what happened, as in llmgw.errors
    """The work gave no answer in time; it may still do so, to nobody."""

    def __init__(self, name: str, bound_s: float) -> None:
        super().__init__(f"{name} gave no answer within {bound_s:g} s")


class Bounded:
    """Runs blocking functions on threads of its own."""

    def __init__(self) -> None:
        self._out: set[str] = set()
        self._turns: dict[str, anyio.Lock] = {}
        # Bounded by the names: there is at most one thread for each.
        self._limiter = anyio.CapacityLimiter(math.inf)

    async def run(self, name: str, work: Callable[[], T], *, bound_s: float) -> T:
        """What `work` returns; after an earlier call of that name, which counts towards the bound.

        Raises: Hung, at once while one that hung before is still out; what `work` raises.
        """
        turn = self._turns.setdefault(name, anyio.Lock())
        try:
            with anyio.move_on_after(bound_s):
                async with turn:
                    if name not in self._out:
                        return await self._call(name, work)
            raise Hung(name, bound_s)
        finally:
            if not turn.locked() and not turn.statistics().tasks_waiting:
                self._turns.pop(name, None)

    async def _call(self, name: str, work: Callable[[], T]) -> T:
        self._out.add(name)

        def call() -> T:
            try:
                return work()
            finally:
                self._out.discard(name)

        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
