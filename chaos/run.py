"""Run every chaos scenario, one after another, on one cluster of its own with real engines.

usage: chaos/run.py [SCENARIO ...]      all of them when none is named
"""

from __future__ import annotations

import importlib
import sys

import anyio

from chaos import cluster

SCENARIOS = ("leader_killed", "leader_paused", "agent_killed", "engine_killed", "etcd_gone")


async def run(names: list[str]) -> None:
    """All of `names` on one cluster: what one leaves behind, the next one has to live with."""
    fast, catalog = cluster.REPO / "chaos" / "fast.yaml", cluster.REPO / "chaos" / "catalog.yaml"
    async with cluster.started(
        settings=fast, catalog=catalog, model="slow", model_dir=cluster.tiny_models(), extra=("--etcd-members", "3")
    ) as at:
        for name in names:
            cluster.say(f"== {name}")
            await importlib.import_module(f"chaos.{name}").scenario(at)
            await at.serving()
    cluster.say(f"{len(names)} passed, 0 failed")


def main() -> None:
    """Check the names, run, and exit non-zero on the first scenario that fails."""
    names = sys.argv[1:] or list(SCENARIOS)
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        sys.exit(f"no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    try:
        anyio.run(run, names, backend="trio")
    except BaseExceptionGroup as group:
        failed = group.split(cluster.ScenarioFailed)[0]
        if failed is None:
            raise
        sys.exit(f"failed: {failed.exceptions[0]}")
    except cluster.ScenarioFailed as error:
        sys.exit(f"failed: {error}")


if __name__ == "__main__":
    main()
