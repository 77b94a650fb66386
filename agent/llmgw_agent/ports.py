"""Which port a shard serves on.

Invariant: a port has one shard, from before its engine starts until the engine's tree is gone, and then rests before
another replica gets it, so that a gateway with an old route never reaches another model there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from llmgw.core.units import Now

FOREIGN_REST_S: Final = 60.0
"""How long a port that somebody else listens on is left alone, seconds."""


class Ports:
    """The range from agent.yaml, less what is at rest. Bounds are inclusive; times as in `Now`."""

    def __init__(self, bounds: tuple[int, int], *, rest_s: float) -> None:
        self._first, self._last = bounds
        self._rest_s = rest_s
        self._resting: dict[int, tuple[float, float]] = {}
        """Port -> (released at, Unix seconds; free again, monotonic)."""
        self._all_until_mono_s = 0.0

    def choose(self, used: Collection[int], now: Now) -> int | None:
        """The lowest free port; None when all are used or at rest."""
        self._resting = {port: rest for port, rest in self._resting.items() if rest[1] > now.mono_s}
        if now.mono_s < self._all_until_mono_s:
            return None
        free = (p for p in range(self._first, self._last + 1) if p not in used and p not in self._resting)
        return next(free, None)

    def rest(self, port: int, now: Now) -> None:
        """`port` was released this moment."""
        self._resting[port] = (now.wall_s, now.mono_s + self._rest_s)

    def avoid(self, port: int, now: Now) -> None:
        """Somebody who is not ours has `port`."""
        self._resting[port] = (now.wall_s, now.mono_s + FOREIGN_REST_S)

    def rest_all(self, now: Now) -> None:
        """What was released lately is not known: all of them rest."""
        self._all_until_mono_s = now.mono_s + self._rest_s

    def restore(self, resting: dict[int, float], now: Now) -> None:
        """Take over the release times of an earlier run; a clock that stepped makes a rest longer, never endless."""
        for port, released_at in resting.items():
            left_s = min(max(self._rest_s - (now.wall_s - released_at), 0.0), self._rest_s)
            if left_s > 0:
                self._resting[port] = (released_at, now.mono_s + left_s)

    def saved(self) -> dict[int, float]:
        """Port -> when it was released, Unix seconds."""
        return {port: rest[0] for port, rest in self._resting.items()}

    def explain(self, used: Collection[int], now: Now) -> str:
        """Why `choose` had none."""
        if now.mono_s < self._all_until_mono_s:
            return "no free port: the state was lost, so every port rests first"
        mine = sum(1 for port in used if self._first <= port <= self._last)
        return f"no free port in {self._first}-{self._last}: {mine} in use, {len(self._resting)} at rest"
