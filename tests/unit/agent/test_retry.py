"""How agents wait for a store that fails them."""

from __future__ import annotations

import pytest

from llmgw_agent.retry import RETRY_MAX_S, RETRY_S, Retry


@pytest.mark.parametrize(("phase", "spread"), [(0.0, 0.75), (0.5, 1.0), (1.0, 1.25)])
def test_pauses_grow_to_a_limit_and_begin_anew_with_a_success(phase: float, spread: float) -> None:
    retry = Retry(phase)
    pauses = [retry.failed() for _ in range(5)]
    assert pauses == [pause * spread for pause in (RETRY_S, 2 * RETRY_S, RETRY_MAX_S, RETRY_MAX_S, RETRY_MAX_S)]
    retry.worked()
    assert retry.failed() == RETRY_S * spread


def test_two_agents_do_not_try_in_chorus() -> None:
    first, second = Retry(0.2), Retry(0.7)
    assert [first.failed() for _ in range(3)] != [second.failed() for _ in range(3)]
