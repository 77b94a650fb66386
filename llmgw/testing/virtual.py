"""Virtual time: an async function run to its end with every pause skipped, the same way each time.

Trio's order of tasks repeats exactly once hypothesis is imported (it makes trio's batches deterministic) and trio's own
random source is seeded. Nothing that runs here may wait for a thread or a socket: the clock jumps over them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import hypothesis  # noqa: F401  # for its effect on trio, see above
import trio
import trio._core._run
import trio.testing

T = TypeVar("T")


def run_virtual(main: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
    """Run `main` on trio under a clock that jumps to the next dead-line whenever everybody waits."""
    trio._core._run._r.seed(seed)  # noqa: SLF001  # the one private line that makes a run repeat
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
