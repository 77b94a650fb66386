"""Blocks of ports as bit sets, held against the same worked out port by port."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.gang_ports import GANG_PORTS, PORTS, common, lowest, meet, range_of, starts
from llmgw.core.node import Facts
from llmgw.core.replica import SHARDS_PER_NODE_MAX


def facts(gang_ports: tuple[int, int] | None) -> Facts:
    return Facts(node="n1", boot_id="b", gang_ports=gang_ports)


def ports(found: int) -> set[int]:
    return {port for port in range(found.bit_length()) if found >> port & 1}


@given(
    st.tuples(st.integers(-5, 90), st.integers(-5, 90)),
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=4),
)
def test_a_block_begins_where_so_many_ports_in_a_row_are_free(
    bounds: tuple[int, int], taken: list[tuple[int, int]]
) -> None:
    free = {port for port in range(max(0, bounds[0]), bounds[1] + 1) if bounds[0] >= 0}
    free -= {port for first, last in taken for port in range(first, last + 1)}
    expected = {port for port in free if free.issuperset(range(port, port + PORTS))}
    found = starts(facts(bounds), taken)
    assert ports(found) == expected
    assert lowest(found) == min(expected, default=None)


def test_a_node_that_is_too_old_to_say_has_the_default_range() -> None:
    assert range_of(facts(None)) == range_of(None) == GANG_PORTS
    assert lowest(starts(None, [])) == GANG_PORTS[0]
    assert starts(facts(None), []) == starts(facts(GANG_PORTS), [])


def test_the_default_range_has_a_block_for_every_shard_a_node_may_hold() -> None:
    taken = [(GANG_PORTS[0] + PORTS * i, GANG_PORTS[0] + PORTS * (i + 1) - 1) for i in range(SHARDS_PER_NODE_MAX - 1)]
    assert lowest(starts(None, taken)) == GANG_PORTS[0] + PORTS * (SHARDS_PER_NODE_MAX - 1)


@given(st.lists(st.integers(0, 31), min_size=1, max_size=7), st.integers(1, 4))
def test_the_best_members_that_have_a_port_in_common_are_found(sets: list[int], size: int) -> None:
    choices = [each for each in combinations(range(len(sets)), size) if common(sets[i] for i in each)]
    best = min(choices, key=lambda members: members[::-1], default=None)
    assert meet(sets, size) == best


@pytest.mark.parametrize("sets", [[], [1], [1, 2, 4]])
def test_where_no_two_have_one_in_common_there_is_no_gang(sets: list[int]) -> None:
    assert meet(sets, 2) is None
