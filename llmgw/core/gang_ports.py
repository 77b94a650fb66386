"""Which ports a gang could have on a node, as bit sets: what nodes have in common is one operation away.

Bit `p` of a set stands for port `p`. The leader fixes a gang's ports: a block of `PORTS` in a row, the same on all its
nodes, each of which says which range is to be used (`gang_ports` in agent.yaml).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from itertools import islice
from operator import and_, or_
from typing import Final

from llmgw.core.node import Facts

PORTS: Final = 16
"""How many consecutive ports a gang gets, the same on each of its nodes. Source: SGLang takes the one it is given and
up to six after it (PortArgs in server_args.py); vLLM one for its store, and upwards from VLLM_PORT one for each message
queue between nodes; llama.cpp one for each rpc-server. As many gangs as a node may hold shards (60) fit 1000 ports."""

GANG_PORTS: Final = (21000, 21999)
"""The range of a node whose agent is too old to say: the default of agent.yaml."""

Block = tuple[int, int]
"""First and last port."""


def starts(facts: Facts | None, taken: Iterable[Block]) -> int:
    """The set of ports at which `PORTS` free ones in a row begin on a node."""
    whole = _span(*range_of(facts))
    free = whole
    for first, last in taken:
        free &= ~_span(first, last)
    return _begins_of_range(whole) if free == whole else _begins(free)


def range_of(facts: Facts | None) -> Block:
    """The range that gangs may use on a node."""
    return GANG_PORTS if facts is None or facts.gang_ports is None else facts.gang_ports


def lowest(ports: int) -> int | None:
    """The lowest port of a set; None for the empty one."""
    return (ports & -ports).bit_length() - 1 if ports else None


def common(sets: Iterable[int]) -> int:
    """What several sets have in common."""
    return reduce(and_, sets)


def meet(sets: Sequence[int], size: int) -> tuple[int, ...] | None:
    """The best members of a ranked pool that have a port in common: `size` positions in order; None if no so many have.

    Of all choices the one whose worst member is as good as can be, then the next. As a rule it is the first `size`.
    """
    if len(sets) < size:
        return None
    if common(sets[:size]):
        return tuple(range(size))
    kinds = set(sets)
    choices: set[frozenset[int]] = set()
    ports = reduce(or_, kinds)
    while ports:
        port = ports & -ports
        ports ^= port
        choices.add(frozenset(each for each in kinds if each & port))
    found: list[tuple[int, ...]] = []
    for able in choices:
        members = tuple(islice((i for i, each in enumerate(sets) if each in able), size))
        if len(members) == size:
            found.append(members)
    return min(found, key=lambda members: members[::-1], default=None)


@lru_cache(maxsize=256)
def _begins_of_range(ports: int) -> int:
    """One copy for all the nodes that have the same range and no gang, as most do."""
    return _begins(ports)


@lru_cache(maxsize=1024)
def _span(first: int, last: int) -> int:
    """All ports of a range; a range that is none (a node may say anything) has none."""
    return ((1 << (last - first + 1)) - 1) << first if 0 <= first <= last else 0


def _begins(free: int) -> int:
    row = 1
    while row < PORTS:
        more = min(row, PORTS - row)
        free &= free >> more
        row += more
    return free
