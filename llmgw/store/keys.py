"""The key tree: where each record lives, and back. Its first level says who writes.

Invariant: `parse(key(ref)) == ref`, and no two refs share a key, whatever a model is called.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from llmgw.core.ids import escape, name_problem, split_shard_name, unescape
from llmgw.core.snapshot import Kind, Ref

ROOT: Final = "/llmgw/"
"""Decision state: one prefix, so that one watch and one revision hold all of it."""

LIVE: Final = "/llmgw-live/"
"""Noisy records that decide nothing by themselves."""

GATEWAYS: Final = LIVE + "gateway/"
"""What gateways tell of their load, one key each."""

PARSED_MAX: Final = 65536
"""Keys whose meaning is remembered, because every change of a record brings its key again. About 20 MB at most."""

_BY_NAME: Final = frozenset({Kind.MODEL, Kind.ALIAS, Kind.MODEL_STATE})
"""Kinds named by people's free text, which is escaped."""

_BY_SHARD: Final = frozenset({Kind.ASSIGNMENT, Kind.SHARD})


def prefix(kind: Kind) -> str:
    """The prefix of all keys of `kind`, or its one key."""
    return ROOT + kind.value


def key(ref: Ref) -> str:
    """Where `ref` lives. Raises ValueError for a name its kind can't have."""
    if not ref.kind.many:
        return ROOT + ref.kind.value
    if ref.kind in _BY_NAME:
        return ROOT + ref.kind.value + escape(ref.name)
    why = name_problem(ref.name) if ref.kind not in _BY_SHARD else None
    if why is None and ref.kind in _BY_SHARD and split_shard_name(ref.name) is None:
        why = "is not <node>/<replica>.<rank>"
    if why is not None:
        raise ValueError(f"{ref.kind.value}{ref.name!r} {why}")
    return ROOT + ref.kind.value + ref.name


def shards_of(node: str) -> str:
    """The prefix of one node's shard reports. Raises ValueError for what is no node's name."""
    if (why := name_problem(node)) is not None:
        raise ValueError(f"{node!r} {why}")
    return f"{prefix(Kind.SHARD)}{node}/"


@lru_cache(maxsize=PARSED_MAX)
def parse(raw: str) -> Ref | None:
    """What lives at `raw`; None when no record of ours does."""
    if not raw.startswith(ROOT):
        return None
    tail = raw.removeprefix(ROOT)
    for kind in Kind:
        if not kind.many:
            if tail == kind.value:
                return Ref(kind)
            continue
        if not tail.startswith(kind.value):
            continue
        rest = tail.removeprefix(kind.value)
        if kind in _BY_NAME:
            name = unescape(rest)
            return None if name is None else Ref(kind, name)
        if kind in _BY_SHARD:
            return None if split_shard_name(rest) is None else Ref(kind, rest)
        return None if name_problem(rest) else Ref(kind, rest)
    return None


def gateway_key(gateway: str) -> str:
    """Where the gateway of that id tells its load. An id is any text, as it is configured: it is escaped."""
    return GATEWAYS + escape(gateway)


def parse_gateway(raw: str) -> str | None:
    """The id of the gateway that tells its load at `raw`; None when no gateway does."""
    return unescape(raw.removeprefix(GATEWAYS)) if raw.startswith(GATEWAYS) else None
