"""The store contract on real etcd, on both async backends; and once more with TLS, auth and the shipped roles."""

from __future__ import annotations

import pytest

from llmgw.config import EtcdConfig
from llmgw.store.etcd import open_etcd
from llmgw.testing.conformance import CHECKS, Check, Rig
from llmgw.testing.etcd import Etcd

pytestmark = [pytest.mark.etcd, pytest.mark.anyio]


async def compact(etcd: Etcd, revision: int) -> None:
    async with etcd.client() as client:
        answer = await client.post(f"{etcd.endpoints[0]}/v3/kv/compaction", json={"revision": revision})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_etcd(etcd: Etcd, check: Check) -> None:
    async def compact_(revision: int) -> None:
        await compact(etcd, revision)

    config = EtcdConfig(endpoints=etcd.endpoints)
    async with open_etcd(config) as store, open_etcd(config) as other:
        await check(Rig(store=store, other=other, root="/t/", compact=compact_))
