"""A whole cluster of real processes, real etcd and real engines, and what chaos may not do to it.

The tests share one cluster and run in this order: what one leaves behind, the next has to live with.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chaos import agent_killed, cluster, engine_killed, etcd_gone, leader_killed, leader_paused

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.etcd, pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "trio"


@pytest.fixture(scope="module")
async def at() -> AsyncIterator[cluster.Cluster]:
    async with cluster.started(settings=cluster.FAST) as running:
        yield running


async def test_leader_killed_while_an_answer_streams(at: cluster.Cluster) -> None:
    await leader_killed.scenario(at)


async def test_a04_paused_leader_is_fenced(at: cluster.Cluster) -> None:
    await leader_paused.scenario(at)


async def test_b11_restarted_agent_adopts_its_engines(at: cluster.Cluster) -> None:
    await agent_killed.scenario(at)


async def test_killed_engine_is_restarted_in_place(at: cluster.Cluster) -> None:
    await engine_killed.scenario(at)


async def test_a01_serving_goes_on_without_etcd(at: cluster.Cluster) -> None:
    await etcd_gone.scenario(at)
