"""Engines' output: straight into files, never through a pipe that somebody would have to read.

One directory a shard: `current.log` of this attempt, `previous.log` of the one before, which is where a crash that
mattered can be read after the retry. Mode 0600: prompts and keys of a careless engine could be in it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

CURRENT: Final = "current.log"
PREVIOUS: Final = "previous.log"
TAIL_BYTES: Final = 8192
WORDS_MAX: Final = 300

_KEY: Final = re.compile(r"\b[0-9a-f]{64}\b")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def open_new(directory: Path) -> int:
    """A new, empty current log, the last one kept as previous; returns its descriptor, for appending."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    current = directory / CURRENT
    if current.exists():
        current.replace(directory / PREVIOUS)
    return os.open(current, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC, 0o600)


def last_words(directory: Path) -> str:
    """The last line of the current log that says anything, without keys and control characters; empty if none does."""
    try:
        with (directory / CURRENT).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    text = next((line for line in reversed(lines) if line.strip()), "")
    return _KEY.sub("***", _CONTROL.sub(" ", text)).strip()[:WORDS_MAX]
