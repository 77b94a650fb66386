"""SIGKILL of one engine: the agent restarts it in place, the other one answers meanwhile, nobody sees an error."""

from __future__ import annotations

import signal

import anyio

from chaos import cluster


async def scenario(at: cluster.Cluster) -> None:
    """Kill an engine under a steady trickle of requests; each is answered, and the same replica is ready again."""
    engines = await at.engines()
    victim = engines[0]
    if victim.pid is None:
        raise cluster.ScenarioFailed("a ready engine has no pid")
    statuses: list[int] = []
    over = anyio.Event()

    async def trickle() -> None:
        while not over.is_set():
            statuses.append((await at.ask(max_tokens=2)).status_code)

    async with anyio.create_task_group() as group:
        group.start_soon(trickle)
        await at.until("requests flow", lambda: _count(statuses, 5), limit_s=30)
        at.signal(victim.pid, signal.SIGKILL)
        cluster.say(f"killed the engine of {victim.replica} (pid {victim.pid})")

        async def again() -> int | None:
            for report in await at.engines():
                if report.replica == victim.replica and report.pid != victim.pid:
                    return report.pid
            return None

        pid = await at.until(f"{victim.replica} is ready again in place", again, limit_s=60)
        over.set()
    wrong = [status for status in statuses if status != 200]
    if wrong:
        raise cluster.ScenarioFailed(f"{len(wrong)} of {len(statuses)} requests failed: {wrong}")
    await at.judge()
    cluster.say(f"{victim.replica} is ready again (pid {pid}); {len(statuses)} requests meanwhile, all answered")


async def _count(statuses: list[int], wanted: int) -> bool:
    return len(statuses) >= wanted


if __name__ == "__main__":
    cluster.main(scenario)
