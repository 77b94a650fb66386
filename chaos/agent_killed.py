"""SIGKILL of an agent while an answer streams: its engine keeps its pid, and the agent that comes back adopts it."""

from __future__ import annotations

import signal
from functools import partial

import anyio

from chaos import cluster


async def scenario(at: cluster.Cluster) -> None:
    """Kill the agent of a node that serves; no pid changes, no stream breaks, the node is Ready again."""
    engines = {report.pid: report for report in await at.engines()}
    victim = next(iter(engines.values())).node
    agent = at.pid(victim)
    streams = [cluster.Streamed() for _ in range(2 * len(engines))]
    async with anyio.create_task_group() as group:
        for n, streamed in enumerate(streams):
            group.start_soon(partial(at.stream, streamed, text=f"Story number {n}.", max_tokens=120))
        await at.until("all streams run", lambda: _all_begun(streams), limit_s=60)
        at.signal(agent, signal.SIGKILL)
        cluster.say(f"killed the agent of {victim} (pid {agent})")
    broken = [streamed.error or "no [DONE]" for streamed in streams if streamed.error or not streamed.done]
    if broken:
        raise cluster.ScenarioFailed(f"{len(broken)} of {len(streams)} streams broke: {broken[0]}")
    cluster.say(f"all {len(streams)} streams ended with [DONE]")

    async def adopted() -> bool:
        index = await at.index()
        session = index.sessions.record(victim)
        return session is not None and session.pid != agent

    await at.until(f"{victim} is back", adopted, limit_s=60)

    async def same() -> bool:
        return {report.pid for report in await at.engines()} == set(engines)

    await at.until("the same engines are ready, and no others", same, limit_s=30)
    await at.judge()
    cluster.say(f"{victim} is back; engine pids unchanged: {sorted(pid for pid in engines if pid)}")


async def _all_begun(streams: list[cluster.Streamed]) -> bool:
    return all(streamed.chunks or streamed.error for streamed in streams)


if __name__ == "__main__":
    cluster.main(scenario)
