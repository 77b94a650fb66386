"""Run every chaos scenario, one after another, on one cluster of its own with three etcd members and real engines."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from chaos import cluster

SCENARIOS = ("leader_killed", "leader_paused", "agent_killed", "engine_killed", "etcd_gone")


async def run(names: list[str], settings: Path | None) -> None:
    """All of `names` on one cluster: what one leaves behind, the next one has to live with."""
    async with cluster.started(settings=settings, extra=("--etcd-members", "3")) as at:
        for name in names:
            cluster.say(f"== {name}")
            await importlib.import_module(f"chaos.{name}").scenario(at)
            await at.serving()
    cluster.say(f"{len(names)} passed, 0 failed")


def main() -> None:
    """Run, and exit non-zero on the first scenario that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="shorter durations (chaos/fast.yaml), not production's")
    parser.add_argument("scenario", nargs="*", choices=[*SCENARIOS, []], help="which ones; all of them by default")
    options = parser.parse_args()
    cluster.judged(run, options.scenario or list(SCENARIOS), cluster.FAST if options.fast else None)


if __name__ == "__main__":
    main()
