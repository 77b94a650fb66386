"""How an engine ended, in words that help."""

from __future__ import annotations

import signal
from typing import Final

_SIGNALS: Final = {
    signal.SIGILL: "this build needs a processor with more features than this one has",
    signal.SIGABRT: "it aborted",
    signal.SIGSEGV: "it crashed",
    signal.SIGBUS: "its memory or the file behind it went away",
}


def exit_words(code: int | None, *, ours: bool, oom: bool, last_words: str) -> str:
    """In words.

    Args:
        code: as subprocess has it (a signal's number below zero); None when an earlier agent started the engine, whose
            exit status only that one could have had.
        ours: whether this agent sent it a signal.
        oom: whether the kernel counts processes it ended for memory that it had not counted at the engine's start.
        last_words: of its log.
    """
    said = f": {last_words}" if last_words else ""
    if code is None:
        return f"ended, exit status unknown{said}"
    if code >= 0:
        return f"exit {code}{said}"
    number = signal.Signals(-code) if -code in signal.valid_signals() else None
    name = number.name if isinstance(number, signal.Signals) else f"signal {-code}"
    if ours:
        return f"ended by {name}"
    if number is signal.SIGKILL:
        why = "the kernel ended it for want of memory" if oom else "not sent by this agent; out of memory?"
        return f"{name}: {why}"
    why = _SIGNALS.get(number, "") if isinstance(number, signal.Signals) else ""
    return f"{name}{': ' if why else ''}{why}{said}"
