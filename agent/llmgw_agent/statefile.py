"""The agent's state on disk: written whole or not at all, and never taken for empty when it can't be read.

Two files: `state.json`, and `state.previous.json`, the one before. A write goes to a new file that is flushed, renamed
and flushed again with its directory, so that a power cut or a full disk leaves one of them whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from llmgw.store.codec import encode_stored
from llmgw_agent.host import Loaded
from llmgw_agent.state import SavedState, decode_state

NAME: Final = "state.json"
PREVIOUS: Final = "state.previous.json"
TEMPORARY: Final = "state.json.tmp"
KEPT_MAX: Final = 10
"""Damaged files that are kept; the oldest go."""


def save(directory: Path, state: SavedState) -> None:
    """Write `state`. Raises OSError; what was there before is then still there."""
    temporary, current = directory / TEMPORARY, directory / NAME
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encode_stored(state))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if current.exists():
        previous = directory / PREVIOUS
        previous.unlink(missing_ok=True)
        previous.hardlink_to(current)
    temporary.replace(current)
    _sync(directory)


def load(directory: Path) -> Loaded:
    """Read it back. A file that can't be read is renamed, so that it is neither lost nor met again."""
    (directory / TEMPORARY).unlink(missing_ok=True)
    damage: list[str] = []
    for name in (NAME, PREVIOUS):
        path = directory / name
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            damage.append(f"{path} can't be read: {error.strerror}")
            continue
        try:
            state = decode_state(raw)
        except ValueError as error:
            damage.append(f"{path} is damaged ({error}) and was kept as {_keep_aside(path).name}")
            continue
        return Loaded(state=state, damage=tuple(damage), lost=bool(damage))
    return Loaded(state=None, damage=tuple(damage), lost=bool(damage))


def _keep_aside(path: Path) -> Path:
    kept = sorted(path.parent.glob(f"{path.name}.damaged-*"), key=lambda item: int(item.name.rpartition("-")[2]))
    last = int(kept[-1].name.rpartition("-")[2]) if kept else 0
    for old in kept[: max(0, len(kept) - KEPT_MAX + 1)]:
        old.unlink()
    target = path.with_name(f"{path.name}.damaged-{last + 1}")
    path.rename(target)
    _sync(path.parent)
    return target


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
