"""How an engine ended, in words that help."""

from __future__ import annotations

import re
import signal
from typing import Final

_SIGNALS: Final = {
    signal.SIGILL: "this build needs a processor with more features than this one has",
    signal.SIGABRT: "it aborted",
    signal.SIGSEGV: "it crashed",
    signal.SIGBUS: "its memory or the file behind it went away",
}

_LEVEL: Final = re.compile(r"\s*[\d.]+ (?P<level>[DIWE]) ")
"""How llama.cpp's server begins a line of its log: the time it has run, and the line's level."""

_ERROR: Final = re.compile(
    r"error|exception|fatal|fail|abort|assert|panic|cannot|can't|could not|unable|out of memory", re.IGNORECASE
)


def exit_words(code: int | None, *, ours: bool, oom: bool, last_words: str) -> str:
    """In words.

    Args:
        code: as subprocess has it (a signal's number below zero); None when an earlier agent started the engine, whose
            exit status only that one could have had.
        ours: whether this agent sent it a signal.
        oom: whether the kernel counts processes it ended for memory that it had not counted at the engine's start.
        last_words: of its log. Of an end that was wished for they are quoted only where they speak of an error: a
            log's last line always says something.
    """
    wished = ours or code == 0
    said = f": {last_words}" if last_words and (not wished or _speaks_of_error(last_words)) else ""
    if code is None:
        return f"ended, exit status unknown{said}"
    if code >= 0:
        return f"exit {code}{said}"
    number = signal.Signals(-code) if -code in signal.valid_signals() else None
    name = number.name if isinstance(number, signal.Signals) else f"signal {-code}"
    if ours:
        return f"ended by {name}{said}"
    if number is signal.SIGKILL:
        why = "the kernel ended it for want of memory" if oom else "not sent by this agent; out of memory?"
        return f"{name}: {why}"
    why = _SIGNALS.get(number, "") if isinstance(number, signal.Signals) else ""
    return f"{name}{': ' if why else ''}{why}{said}"


def _speaks_of_error(line: str) -> bool:
    level = _LEVEL.match(line)
    return level["level"] == "E" if level is not None else _ERROR.search(line) is not None
