"""The last known routes on disk, so that a gateway can start while the store is away.

The file holds the engines' keys: mode 0600, replaced as a whole. Its modification time is when the routes were last
known to be true. A file that can't be read is set aside with a word in the log; it is never taken for "no routes".
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from llmgw.core.record import Record
from llmgw.core.routing import RouteTable
from llmgw.store import codec

log = logging.getLogger(__name__)


class Snapshot(Record, frozen=True, kw_only=True):
    """What is saved. `incarnation`: the store that the routes come from."""

    incarnation: str
    table: RouteTable


class SnapshotFile:
    """One gateway's file. Its methods wait for the disk: call them in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> tuple[Snapshot, float] | None:
        """The saved snapshot and when it was last true (Unix seconds); None when there is none that can be read."""
        try:
            text = self.path.read_bytes()
            true_at = self.path.stat().st_mtime
            return codec.decode_file(Snapshot, text), true_at
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            aside = self.path.with_name(self.path.name + ".bad")
            log.warning(
                "snapshot can't be read", extra={"fields": {"file": self.path, "why": str(error), "kept_as": aside}}
            )
            with contextlib.suppress(OSError):
                self.path.replace(aside)
            return None

    def save(self, snapshot: Snapshot) -> None:
        """Replace the file. Raises OSError; the old one is then still there."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        fresh.unlink(missing_ok=True)
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(codec.encode_stored(snapshot))
                out.flush()
                os.fsync(out.fileno())
            fresh.replace(self.path)
        finally:
            fresh.unlink(missing_ok=True)

    def confirm(self) -> None:
        """The routes on disk are true at this moment. Raises OSError."""
        os.utime(self.path)
