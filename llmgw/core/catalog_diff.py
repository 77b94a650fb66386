"""What changes between two records of one name, in the words of the files: `scaling.min 1 → 2`.

Values of environment variables are left out: they may hold what must not be seen in a terminal's history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from llmgw.core.catalog import Profile
from llmgw.core.yaml_tree import path_text

CHANGES_MAX: Final = 8
"""Changes of one record that are told; the others are counted."""

VALUE_LEN_MAX: Final = 40
"""Longest text of one value, in characters."""


def describe_changes(old: msgspec.Struct, new: msgspec.Struct) -> str:
    """What differs between two records of one type, in one bounded line; empty when nothing does."""
    told = list(_changes(old, new, ()))
    more = len(told) - CHANGES_MAX
    return ", ".join((*told[:CHANGES_MAX], *((f"and {more} more",) if more > 0 else ())))


def _changes(old: Any, new: Any, place: tuple[str, ...]) -> Iterator[str]:
    if old == new:
        return
    if isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
        for field in msgspec.structs.fields(old):
            yield from _changes(getattr(old, field.name), getattr(new, field.name), (*place, field.name))
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from _entries(old, new, place)
    elif place == ("profiles",):
        before, after = _by_name(old), _by_name(new)
        yield from _entries(before, after, place)
        if before.keys() == after.keys() and list(before) != list(after):
            yield f"profiles reordered: {_shown(list(after))}"
    else:
        yield _change(old, new, place)


def _by_name(profiles: tuple[Profile, ...]) -> dict[str, Profile]:
    return {profile.name: profile for profile in profiles}


def _entries(old: Mapping[str, Any], new: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        here = (*place, name)
        if name not in new:
            yield f"{path_text(here)} removed"
        elif name not in old:
            yield f"{path_text(here)} added"
        elif place[-1] == "env":
            if old[name] != new[name]:
                yield f"{path_text(here)} changed"
        else:
            yield from _changes(old[name], new[name], here)


def _change(old: Any, new: Any, place: tuple[str, ...]) -> str:
    before, after = _shown(old), _shown(new)
    return f"{path_text(place)} " + (f"{before} → {after}" if before != after else "changed")


def _shown(value: Any) -> str:
    """A value as short text; what is cut off is marked."""
    if value is None:
        return "none"
    if isinstance(value, float):
        text = f"{value:.15g}"
    else:
        plain = msgspec.to_builtins(value)
        text = plain if isinstance(plain, str) and plain.isprintable() else msgspec.json.encode(plain).decode()
    return text if len(text) <= VALUE_LEN_MAX else text[: VALUE_LEN_MAX - 1] + "…"
