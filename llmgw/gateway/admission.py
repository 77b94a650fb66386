"""Who waits, and for how long: one bounded queue per model, first come first served.

Invariant: whoever joined leaves exactly once: admitted, expired, or gone with its client. A request is refused with the
name and the value of the limit that it met.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

from llmgw.gateway.wire import Trouble

RETRY_AFTER_FULL_S: Final = 1
"""What a client is told when the queue is full. It moves with every answer, so soon is a good time."""


class Waiter(Protocol):
    """One who waits. Hashed by identity."""

    def expired(self, trouble: Trouble) -> None:
        """The time is up."""
        ...


class Queue:
    """Those who wait for a replica of one model."""

    __slots__ = ("_len_max", "_model", "_wait_s", "waiting")

    def __init__(self, model: str, *, len_max: int, wait_s: float) -> None:
        self._model = model
        self._len_max = len_max
        self._wait_s = wait_s
        self.waiting: OrderedDict[Waiter, float] = OrderedDict()
        """Who, in order, and until when."""

    def join(self, waiter: Waiter, now_s: float) -> Trouble | None:
        """Wait until `now_s` + the limit; a Trouble instead when the queue is full."""
        if len(self.waiting) >= self._len_max:
            return Trouble(
                status=429,
                code="queue_full",
                message=f"all replicas of {self._model!r} are busy and {self._len_max} requests wait (queue_max)",
                retry_after_s=RETRY_AFTER_FULL_S,
            )
        self.waiting[waiter] = now_s + self._wait_s
        return None

    def leave(self, waiter: Waiter) -> None:
        """Wait no longer; unknown is fine."""
        self.waiting.pop(waiter, None)

    def first(self) -> Waiter | None:
        """Who waited longest."""
        return next(iter(self.waiting), None)

    def expire(self, now_s: float) -> None:
        """Send away those whose time is up."""
        while self.waiting:
            waiter, until_s = next(iter(self.waiting.items()))
            if until_s > now_s:
                return
            del self.waiting[waiter]
            waiter.expired(
                Trouble(
                    status=503,
                    code="queue_timeout",
                    message=f"no replica of {self._model!r} came free within {self._wait_s:g} s (queue_wait_s)",
                    retry_after_s=max(1, round(self._wait_s)),
                )
            )
