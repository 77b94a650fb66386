"""Conditions that last, said now and then: one clear line every few seconds instead of one a try."""

from __future__ import annotations

import logging
from typing import Final

import anyio

SAY_AGAIN_S: Final = 10.0


class Sayings:
    """What was said lately. Each condition has a name of its own."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_s: dict[str, float] = {}

    def say(self, what: str, message: str, **fields: object) -> None:
        """Log `message` unless the condition `what` was spoken of within `SAY_AGAIN_S`."""
        now_s = anyio.current_time()
        if now_s >= self._next_s.get(what, now_s):
            self._next_s[what] = now_s + SAY_AGAIN_S
            self._log.warning(message, extra={"fields": fields})

    def over(self) -> None:
        """All is well: whatever comes next is news."""
        self._next_s.clear()
