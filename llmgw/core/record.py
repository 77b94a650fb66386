"""The base of everything kept in the store: frozen, keyword-only, tolerant of fields it does not know.

Mixed versions run side by side during an upgrade, so a record's new fields have defaults and unknown ones are ignored.
What people write is read by stricter types (`llmgw.core.catalog`, `llmgw.config`).
"""

from __future__ import annotations

from typing import Final

import msgspec

FORMAT: Final = 1
"""Version of the key tree and its records. A controller older than the store's format does not stand for election."""


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One value in the key tree. Not followed by the garbage collector: what is frozen can't be part of a cycle."""


class StoreMeta(Record, frozen=True, kw_only=True):
    """`meta/store`: which incarnation of the store this is. Written once, and again only by a restore."""

    incarnation: str
    format: int = FORMAT


class Leader(Record, frozen=True, kw_only=True):
    """`election/controller`: who leads. The key's create revision is the term."""

    id: str
    address: str
    version: str
    pid: int


class Head(Record, frozen=True, kw_only=True):
    """`plan/head`: the chain of the leader's writes; compared and put by every transaction under `plan/`."""

    commits: int
    term: int


class Generation(Record, frozen=True, kw_only=True):
    """`spec/generation`: compared and put by every batch of an apply."""

    number: int


class Recover(Record, frozen=True, kw_only=True):
    """`spec/recover`: the operator's word that this incarnation of a restored store may be acted on."""

    incarnation: str
