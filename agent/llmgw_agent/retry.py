"""How long to wait before trying once more: longer each time, and not in step with ten thousand other agents.

When the store comes back, or is overloaded, every agent of the fleet tries again; they must not do so in chorus, nor
every two seconds for as long as it is away.
"""

from __future__ import annotations

from typing import Final

RETRY_S: Final = 2.0
"""First pause after the store failed us, seconds."""

RETRY_MAX_S: Final = 6.0
"""Longest one: well within a session's time, which begins anew when the store is back."""


class Retry:
    """The pauses of one task, times 0.75 to 1.25 by `phase`, the agent's place in every interval from 0 to 1."""

    def __init__(self, phase: float) -> None:
        self._spread = 0.75 + phase / 2
        self._next_s = RETRY_S

    def failed(self) -> float:
        """It failed once more: how long to wait now, seconds."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, RETRY_MAX_S)
        return pause_s * self._spread

    def worked(self) -> None:
        """It worked: the next failure is a first one."""
        self._next_s = RETRY_S
