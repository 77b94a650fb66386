"""Virtual time: an async function run to its end with every pause skipped, the same way each time.

Trio's order of tasks repeats exactly once hypothesis is imported (it makes trio's batches deterministic) and trio's own
random source is seeded. Nothing that runs here may wait for a thread or a socket: the clock jumps over them.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Final, TypeVar

import anyio
import hypothesis  # noqa: F401  # for its effect on trio, see above
import trio
import trio._core._run

T = TypeVar("T")

GARBAGE: Final = 50_000
"""Objects between two looks for cyclic garbage; Python's own 700 cost a tenth of a run (measured)."""

_clock: ContextVar[JumpingClock | None] = ContextVar("clock", default=None)


class JumpingClock(trio.abc.Clock):
    """Stands still while anybody can run, and is at the next dead-line when nobody can.

    Trio asks how long to sleep only when no task is runnable, so that is where it jumps: a jump costs one turn of the
    loop. `trio.testing.MockClock`, which notices in a turn of its own that all is idle, takes twice that.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._pauses: list[tuple[float, int, list[trio.lowlevel.Task]]] = []
        """A heap of (until when, which, whose); of nobody any more once it was cancelled."""
        self._count = 0

    def start_clock(self) -> None:
        """Nothing to do."""

    def current_time(self) -> float:
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        pauses = self._pauses
        while pauses and not pauses[0][2]:
            heapq.heappop(pauses)
        if pauses and pauses[0][0] <= deadline:
            self._now_s, _, [task] = heapq.heappop(pauses)
            trio.lowlevel.reschedule(task)
        elif deadline == math.inf:
            return math.inf  # whatever happens next, it is not the time that brings it
        else:
            self._now_s = max(self._now_s, deadline)
        return 0.0

    async def pause(self, seconds: float) -> None:
        """As `trio.sleep`, without a cancel scope of its own that ends by an exception: a third of the cost."""
        self._count += 1
        whose = [trio.lowlevel.current_task()]
        heapq.heappush(self._pauses, (self._now_s + seconds, self._count, whose))

        def abort(_: object) -> trio.lowlevel.Abort:
            whose.clear()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


async def pause(seconds: float) -> None:
    """`anyio.sleep`, for what is simulated itself (networks, machines) and so by far the most frequent sleeper."""
    clock = _clock.get()
    await (anyio.sleep(seconds) if clock is None else clock.pause(seconds))


def run_virtual(main: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
    """Run `main` on trio under a clock that jumps to the next dead-line whenever everybody waits."""
    trio._core._run._r.seed(seed)  # noqa: SLF001  # the one private line that makes a run repeat
    clock = JumpingClock()

    async def under_clock() -> T:
        _clock.set(clock)
        return await main()

    before = gc.get_threshold()
    gc.set_threshold(GARBAGE)
    try:
        return trio.run(under_clock, clock=clock)
    finally:
        gc.set_threshold(*before)
