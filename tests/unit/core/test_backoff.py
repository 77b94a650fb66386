"""A model whose replicas fail: it waits longer each time, says how often and why, and is forgiven in the end."""

from __future__ import annotations

import pytest

from llmgw.core.lifecycle import JITTER
from llmgw.core.model_text import why_now
from llmgw.core.plan import Settings
from llmgw.core.replica import ModelState, Replica, ReplicaPhase, ShardPhase
from llmgw.testing.cluster import Cluster, cpu_profile

SETTINGS = Settings()


def serving(model: str = "m") -> Cluster:
    c = Cluster()
    for name in ("n1", "n2"):
        c.node(name)
    c.model(model)
    c.settle()
    return c


def state(c: Cluster, model: str = "m") -> ModelState:
    found = c.index.model_states.record(model)
    assert found is not None
    return found


def fail(c: Cluster, model: str = "m", reason: str = "exit 1") -> float:
    """Its engine ends at once; returns how long the model waits then, seconds."""
    c.report(c.shard(c.one(model)), ShardPhase.FAILED, reason=reason)
    c.settle()
    assert not c.replicas(model)
    retry_at = state(c, model).retry_at
    assert retry_at is not None
    wait_s = retry_at - c.now.wall_s
    c.advance(wait_s - 0.001)
    c.step()
    assert not c.replicas(model), "not before its time"
    c.advance(0.001)
    c.step()
    assert c.one(model).phase is ReplicaPhase.PLACED, "and at its time without anything else happening"
    return wait_s


def test_b13_delays_grow_with_jitter_up_to_a_cap() -> None:
    c = serving()
    waits = [fail(c) for _ in range(12)]
    for attempt, wait_s in enumerate(waits, 1):
        middle = min(SETTINGS.backoff_max_s, SETTINGS.backoff_base_s * 2 ** (attempt - 1))
        assert middle * (1 - JITTER) <= wait_s <= middle * (1 + JITTER), attempt
    assert waits[1] > waits[0]
    assert waits[5] > 10 * waits[0]
    assert len({round(wait_s / min(SETTINGS.backoff_max_s, SETTINGS.backoff_base_s * 2**n), 6)
                for n, wait_s in enumerate(waits)}) == len(waits), "each is spread by itself"  # fmt: skip


def test_b13_models_that_failed_together_do_not_come_back_together() -> None:
    c = serving()
    others = [f"m{i}" for i in range(10)]
    for model in others:
        c.model(model, cpu_profile(0.1))
    c.settle()
    for model in others:
        c.report(c.shard(c.one(model)), ShardPhase.FAILED)
    c.step()
    assert len({state(c, model).retry_at for model in others}) == len(others)


def test_b13_how_often_and_why_it_failed_last_can_be_seen() -> None:
    c = serving()
    for attempt in (1, 2, 3):
        old = c.one("m")
        c.report(c.shard(old), ShardPhase.FAILED, reason=f"exit 139: attempt {attempt}")
        c.settle()
        now = state(c)
        assert now.attempt == attempt
        assert now.failure == now.reason == f"{old.id} on {old.shards[0].node}: exit 139: attempt {attempt}"
        assert now.retry_at is not None
        times = f"failed {attempt} times in a row, " if attempt > 1 else ""
        assert why_now(now, now.retry_at - 3.5) == f"{now.failure}; {times}next try in 4 s"
        c.advance(now.retry_at - c.now.wall_s)
        c.step()


def test_b13_half_an_hour_of_stable_running_is_needed_to_be_forgiven() -> None:
    c = serving()
    first_s = fail(c)
    fail(c)
    c.settle()
    c.advance(1000.0)
    c.step()
    assert fail(c) > 3 * first_s, "not forgiven yet"
    c.settle()
    c.advance(1800.0)
    c.step()
    assert (state(c).attempt, state(c).failure) == (0, "")
    assert fail(c) == pytest.approx(first_s)


def test_b13_the_leader_gives_up_no_load_on_one_node_its_node_bounds_it() -> None:
    c = serving()
    c.model("slow", cpu_profile(start_s=10.0))
    c.step()

    def slow() -> Replica:
        return c.one("slow")

    c.report(c.shard(slow()), ShardPhase.STARTING)
    c.step()
    for _ in range(10):
        c.advance(3600.0)
        c.step()
        assert slow().phase is ReplicaPhase.STARTING
