"""Engines' output: straight into files, never through a pipe that somebody would have to read.

One directory a shard: `current.log` of this attempt, `previous.log` of the one before, which is where a crash that
mattered can be read after the retry. Mode 0600: prompts and keys of a careless engine could be in it. They are bounded:
a log that grows too long is cut to its end, and of shards that are gone only the newest are kept.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

CURRENT: Final = "current.log"
PREVIOUS: Final = "previous.log"
TAIL_BYTES: Final = 8192
WORDS_MAX: Final = 300

LOG_BYTES_MAX: Final = 64 * 2**20
LOG_BYTES_KEPT: Final = 4 * 2**20
"""A log above the first is cut to its last bytes, as many as the second."""

GONE_MAX: Final = 50
"""Directories of shards that are gone, kept for their logs."""

_KEY: Final = re.compile(r"\b[0-9a-f]{64}\b")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]+")

log = logging.getLogger(__name__)


def open_new(directory: Path) -> int:
    """A new, empty current log, the last one kept as previous; returns its descriptor, for appending."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    current = directory / CURRENT
    if current.exists():
        current.replace(directory / PREVIOUS)
    return os.open(current, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC, 0o600)


def trim(directory: Path) -> None:
    """Cut the current log if it is too long. The engine goes on appending; what it writes that moment may be lost."""
    path = directory / CURRENT
    try:
        if path.stat().st_size <= LOG_BYTES_MAX:
            return
        with path.open("r+b") as file:
            file.seek(-LOG_BYTES_KEPT, os.SEEK_END)
            end = file.read(LOG_BYTES_KEPT)
            file.truncate(0)
        with path.open("ab") as file:
            file.write(b"(cut)\n" + end)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("can't cut a log", extra={"fields": {"path": path, "why": str(error)}})


def prune(root: Path, *, keep: Collection[str]) -> None:
    """Remove the logs of shards that are gone, all but the newest `GONE_MAX`; those in `keep` are not gone."""
    gone = [path for path in root.iterdir() if path.name not in keep] if root.exists() else []
    for path in sorted(gone, key=lambda path: path.stat().st_mtime)[: max(0, len(gone) - GONE_MAX)]:
        shutil.rmtree(path, ignore_errors=True)


def read_on(directory: Path, since: int) -> tuple[int, bool]:
    """Where the current log ends now, and whether the engine wrote anything of its own behind `since`, a former end.

    Lines about `/health` answer our own probes and tell nothing of the engine. What can't be read tells nothing either.
    """
    try:
        with (directory / CURRENT).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            start = since if since <= end else 0  # it was cut, or is another one
            file.seek(max(start, end - TAIL_BYTES))
            lines = re.split(rb"[\r\n]", file.read(end - start))
    except OSError:
        return since, False
    return end, any(line.strip() and b"/health" not in line for line in lines)


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
