"""Sizes and moments: the one place where people's GB meet the program's bytes, and wall time meets monotonic time."""

from __future__ import annotations

from typing import Final

import msgspec

GB: Final = 10**9
"""Bytes in the GB that people write and read. Source: SI; disks and cloud machines are sold by it."""


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """One moment on two clocks, handed to every pure function that needs time.

    `wall_s`: Unix seconds; may step either way, differs between machines. `mono_s`: seconds on this process's
    monotonic clock; means nothing to any other process.
    """

    wall_s: float
    mono_s: float


def stepped_s(before: Now, after: Now) -> float:
    """By how much the wall clock stepped between two moments, as far as the monotonic clock can tell.

    What is due by the wall clock is woken for by the monotonic one, so after a step everything must be looked at.
    """
    return (after.wall_s - before.wall_s) - (after.mono_s - before.mono_s)


def gb_to_bytes(gb: float) -> int:
    """Whole bytes of a size that a person wrote in GB."""
    return round(gb * GB)


def format_bytes(count: int | None) -> str:
    """A size for people, in GB with at most one decimal (MB below 0.1 GB); `-` when unknown."""
    if count is None:
        return "-"
    if abs(count) < GB // 10:
        return f"{count / 10**6:.0f} MB"
    return format_number(count / GB) + " GB"


def format_used(used: int, total: int | None) -> str:
    """How much of a size is used, in its unit: `0 of 8.4 GB`."""
    same_unit = total is not None and total >= GB // 10
    return f"{format_number(used / GB) if same_unit else format_bytes(used)} of {format_bytes(total)}"


def format_number(value: float | None) -> str:
    """A number for people, with at most one decimal; `-` when unknown."""
    return "-" if value is None else f"{value:.1f}".removesuffix(".0")
