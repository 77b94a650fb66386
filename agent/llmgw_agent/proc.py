"""Processes as /proc shows them: who is who, what belongs to an engine's tree, and signals that hit nobody else.

A pid alone names nobody. A process is ours when its pid and start time are the ones recorded in this boot and its
environment bears the mark, or when it hangs below such a one. Signals go through a pidfd opened before that is checked,
so the number can't change hands in between. A recorded process group is never signalled.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from llmgw_agent.engines.launch import MARK, PORT
from llmgw_agent.state import Process

PROC: Final = Path("/proc")
ENVIRON_BYTES_MAX: Final = 2**20
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `started`: clock ticks since boot; with the pid it names the process within one boot."""

    pid: int
    ppid: int
    session: int
    started: int
    zombie: bool

    @property
    def key(self) -> tuple[int, int]:
        """(pid, started)."""
        return self.pid, self.started


def boot_id() -> str:
    """The kernel's boot id."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def read(pid: int) -> Entry | None:
    """The process of that number now, None if there is none. Source: proc(5), /proc/PID/stat."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything, parentheses and spaces included.
    fields = text[text.rindex(")") + 2 :].split()
    return Entry(
        pid=pid,
        ppid=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]),
        zombie=fields[0] in "ZX",
    )


def scan() -> dict[int, Entry]:
    """All processes by pid."""
    found = (read(int(path.name)) for path in PROC.iterdir() if path.name.isdecimal())
    return {entry.pid: entry for entry in found if entry is not None}


def environ(pid: int) -> dict[str, str]:
    """The variables of ours in a process's environment; empty where it can't be read (another user's, a zombie)."""
    try:
        with (PROC / str(pid) / "environ").open("rb") as file:
            raw = file.read(ENVIRON_BYTES_MAX)
    except OSError:
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in raw.split(b"\0") if item.startswith(b"LLMGW_"))
    return {name: value for name, _, value in pairs}


def mark_of(pid: int) -> str | None:
    """The mark a process bears."""
    return environ(pid).get(MARK)


def port_of(pid: int) -> int | None:
    """The port its engine was started with."""
    text = environ(pid).get(PORT, "")
    return int(text) if text.isdecimal() else None


def memory_bytes(pid: int) -> int:
    """The resident memory of a process, shared pages included; 0 without one. Source: proc(5), /proc/PID/statm."""
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def is_it(process: Process, *, boot: str) -> bool:
    """Whether the recorded process lives: number, start time, boot and mark."""
    if process.boot_id != boot:
        return False
    entry = read(process.pid)
    if entry is None or entry.zombie or entry.started != process.started:
        return False
    return mark_of(process.pid) == process.mark


def tree(
    entries: Mapping[int, Entry], *, mark_prefix: str, main: Process | None, known: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """(pid, started) of every live process of a shard's tree.

    Those that bear its mark, the session of its main process while that lives, those known from before, and whatever
    descends from any of them.
    """
    alive = {entry.key for entry in entries.values() if not entry.zombie}
    members = set(known) & alive
    members |= {key for key in alive if (mark_of(key[0]) or "").startswith(mark_prefix)}
    if main is not None and (main.pid, main.started) in members:
        members |= {entry.key for entry in entries.values() if entry.session == main.pid and entry.key in alive}
    children: dict[int, list[Entry]] = {}
    for entry in entries.values():
        children.setdefault(entry.ppid, []).append(entry)
    queue = [pid for pid, _ in members]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child.key in alive and child.key not in members:
                members.add(child.key)
                queue.append(child.pid)
    return members


def send(pid: int, started: int, number: signal.Signals) -> bool:
    """Signal the process that is exactly this one; False when it is not there any more.

    Raises:
        PermissionError: it is another user's.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        entry = read(pid)
        if entry is None or entry.started != started:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True
