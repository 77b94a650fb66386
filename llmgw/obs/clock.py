"""The only place that reads clocks and draws randomness; everything else is handed these.

Monotonic time is `anyio.current_time()`, so that a run under trio's MockClock moves all of it. Wall time is a function,
so that a simulation can step it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import anyio

from llmgw.core.ids import SUFFIX_ALPHABET, SUFFIX_LEN, Secret
from llmgw.core.units import Now

WallClock = Callable[[], float]
"""Unix seconds. May step."""


def system_wall() -> float:
    """This machine's wall clock, Unix seconds."""
    return time.time()


def system_jitter() -> float:
    """From [0, 1), evenly: what spreads retries of many clients over time."""
    return secrets.randbelow(2**53) / 2**53


def now(wall: WallClock) -> Now:
    """This moment on both clocks."""
    return Now(wall_s=wall(), mono_s=anyio.current_time())


class SystemIds:
    """Fresh ids from the operating system's randomness. Implements `llmgw.core.ids.Ids`."""

    def suffix(self) -> str:
        """Five characters for a replica's id."""
        return "".join(secrets.choice(SUFFIX_ALPHABET) for _ in range(SUFFIX_LEN))

    def key(self) -> Secret:
        """An engine's key: 32 random bytes in hex."""
        return Secret(secrets.token_hex(32))

    def token(self) -> str:
        """A fresh opaque id, 32 hex digits."""
        return secrets.token_hex(16)
