"""Three lease times without any etcd: 500 requests and 20 streams without an error, then everything is back."""

from __future__ import annotations

import signal
from collections import Counter
from functools import partial

import anyio
import yaml

from chaos import cluster
from llmgw.core.node import Liveness

REQUESTS = 500
STREAMS = 20


async def scenario(at: cluster.Cluster) -> None:
    """Pause every etcd member for three session lease times under load; afterwards a fenced write within two."""
    before = await at.index()
    ttl_s = _session_ttl_s(at)
    engines = {report.pid for report in await at.engines()}
    members = [at.pid(name) for name in at.names("etcd-")]
    streams = [cluster.Streamed() for _ in range(STREAMS)]
    statuses: Counter[int] = Counter()
    async with anyio.create_task_group() as group:
        for pid in members:
            at.signal(pid, signal.SIGSTOP)
        gone_at = anyio.current_time()
        cluster.say(f"paused all {len(members)} etcd members for {3 * ttl_s:.0f} s")
        try:
            async with anyio.create_task_group() as load:
                for n, streamed in enumerate(streams):
                    load.start_soon(partial(at.stream, streamed, text=f"Story {n}.", max_tokens=40))
                for worker in range(8):
                    load.start_soon(_requests, at, statuses, REQUESTS // 8 + (worker < REQUESTS % 8))
            await anyio.sleep_until(gone_at + 3 * ttl_s)
        finally:
            for pid in members:
                at.signal(pid, signal.SIGCONT)
        group.cancel_scope.cancel()
    cluster.say("etcd goes on")
    await _recovered(at, set(before.sessions), limit_s=2 * ttl_s)
    async with at.another_model("placed-after", limit_s=2 * ttl_s):
        cluster.say("all nodes are Ready, and the leader placed a model")
    right = statuses[200]
    broken = [streamed.error or "no [DONE]" for streamed in streams if streamed.error or not streamed.done]
    if right != REQUESTS or broken:
        raise cluster.ScenarioFailed(
            f"requests by status: {dict(statuses)}; {len(broken)} streams failed: {broken[:1]}"
        )
    now = {report.pid for report in await at.engines()}
    if now != engines:
        raise cluster.ScenarioFailed(f"engine pids changed from {engines} to {now}")
    await at.judge()
    cluster.say(f"{REQUESTS} requests and {STREAMS} streams without etcd: 0 errors; engine pids unchanged")


async def _requests(at: cluster.Cluster, statuses: Counter[int], count: int) -> None:
    for _ in range(count):
        statuses[(await at.ask(max_tokens=1)).status_code] += 1


async def _recovered(at: cluster.Cluster, wanted: set[str], *, limit_s: float) -> None:
    """All nodes have a session and are Ready, and somebody leads."""

    async def back() -> bool:
        index = await at.index()
        states = {state.name: state.liveness for state in index.node_states.records()}
        ready = all(states.get(node) is Liveness.READY for node in wanted)
        return index.leader is not None and set(index.sessions) == wanted and ready

    await at.until("sessions and leader are back", back, limit_s=limit_s)


def _session_ttl_s(at: cluster.Cluster) -> float:
    """The agents' lease time in this run."""
    config = yaml.safe_load((at.data / "config" / f"{at.names('node-')[0]}.yaml").read_text())
    return float(config.get("session_ttl_s", 30.0))


if __name__ == "__main__":
    cluster.main(scenario)
