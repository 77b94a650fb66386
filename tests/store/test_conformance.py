"""The store contract on `MemoryStore`. `llmgw.testing.conformance` holds the checks; etcd runs the same ones."""

from __future__ import annotations

import pytest

from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.testing.conformance import CHECKS, Check, Rig
from llmgw.testing.virtual import run_virtual


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory(check: Check) -> None:
    async def main() -> None:
        cluster = MemoryCluster()

        async def compact(revision: int) -> None:
            cluster.compact(revision)

        await check(Rig(store=MemoryStore(cluster), other=MemoryStore(cluster), root="/t/", compact=compact))

    run_virtual(main)
