"""Blocking work on threads, bounded: a file system or a /proc entry that never answers must not silence the agent.

Each piece of work has a name, and at most one call of a name is out at a time: what hangs, hangs once.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from llmgw.store.follow import ungrouped
from llmgw_agent.saying import Sayings

T = TypeVar("T")

PATIENT_S: Final = 5.0
"""How long work that must be done may take before it is said that it is waited for."""

log = logging.getLogger(__name__)


class Hung(Exception):  # named by what happened, as in llmgw.errors
    """The work gave no answer in time; it may still do so, to nobody."""

    def __init__(self, name: str, bound_s: float) -> None:
        super().__init__(f"{name} gave no answer within {bound_s:g} s")


async def patiently(name: str, work: Callable[[], T]) -> T:
    """What `work` returns or raises, however long it takes: nothing can be done without it. Says so now and then.

    Cancelled, it leaves the work behind.
    """
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_say_waiting, name)
            try:
                result = await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
            finally:
                tasks.cancel_scope.cancel()
    return result


async def _say_waiting(name: str) -> None:
    sayings, begun_s = Sayings(log), anyio.current_time()
    while True:
        await anyio.sleep(PATIENT_S)
        waited_s = round(anyio.current_time() - begun_s)
        sayings.say(name, f"{name} gives no answer; waiting for it", waited_s=waited_s)


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
        turn, begun, given_up = threading.Lock(), False, False

        def call() -> T:
            nonlocal begun
            with turn:
                if given_up:
                    raise Hung(name, 0)  # to nobody
                begun = True
            try:
                return work()
            finally:
                self._out.discard(name)

        try:
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        finally:
            with turn:
                given_up = not begun
                if given_up:  # the bound ended before the thread began: nothing is out
                    self._out.discard(name)
