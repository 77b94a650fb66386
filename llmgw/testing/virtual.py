"""Virtual time: an async function run to its end with every pause skipped, the same way each time.

Trio's order of tasks repeats exactly once hypothesis is imported (it makes trio's batches deterministic) and trio's own
random source is seeded. Nothing that runs here may wait for a thread or a socket: the clock jumps over them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import hypothesis  # noqa: F401  # for its effect on trio, see above
import trio
import trio._core._run

T = TypeVar("T")


class JumpingClock(trio.abc.Clock):
    """Stands still while anybody can run, and is at the next dead-line when nobody can.

    Trio asks how long to sleep only when no task is runnable, so that is where it jumps: a jump costs one turn of the
    loop. `trio.testing.MockClock`, which notices in a turn of its own that all is idle, takes twice that.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def start_clock(self) -> None:
        """Nothing to do."""

    def current_time(self) -> float:
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if deadline == math.inf:
            return math.inf  # whatever happens next, it is not the time that brings it
        self._now_s = max(self._now_s, deadline)
        return 0.0


def run_virtual(main: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
    """Run `main` on trio under a clock that jumps to the next dead-line whenever everybody waits."""
    trio._core._run._r.seed(seed)  # noqa: SLF001  # the one private line that makes a run repeat
    return trio.run(main, clock=JumpingClock())
