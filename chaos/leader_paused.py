"""SIGSTOP of the leading controller until another leads, then SIGCONT: the old one is fenced and claims nothing."""

from __future__ import annotations

import signal

import httpx2

from chaos import cluster


async def scenario(at: cluster.Cluster) -> None:
    """Pause the leader, see another one lead and write, let the old one go on: no write of its term may follow."""
    term, pid = await at.leader()
    at.signal(pid, signal.SIGSTOP)
    cluster.say(f"paused the leader (pid {pid}, term {term})")
    try:
        now = await at.another_leader(term)
        cluster.say(f"term {now} leads")
        if (await at.ask()).status_code != httpx2.codes.OK:
            raise cluster.ScenarioFailed("no answer while the old leader is paused")
        async with at.another_model("placed-meanwhile", limit_s=30):
            cluster.say("the new leader placed a model")
            at.signal(pid, signal.SIGCONT)
            cluster.say("the old leader goes on")
            await _fenced(at, pid, now)
    finally:
        at.signal(pid, signal.SIGCONT)
    await at.judge()


async def _fenced(at: cluster.Cluster, pid: int, now: int) -> None:
    """The old leader stands by, and what was written last is not of its term."""

    async def stands_by() -> bool:
        try:
            health = await at.http.get(f"{await _page(at, pid)}/healthz")
        except httpx2.HTTPError:
            return False
        return health.status_code == 200 and health.json()["role"] == "standby"

    await at.until("the old leader stands by", stands_by, limit_s=30)
    head = (await at.index()).head
    if head is None or head.record is None:
        raise cluster.ScenarioFailed("plan/head is gone")
    if head.record.term < now:
        raise cluster.ScenarioFailed(f"the last write is of term {head.record.term}, though {now} leads")
    cluster.say(f"it stands by; the last write under plan/ is of term {head.record.term}")


async def _page(at: cluster.Cluster, pid: int) -> str:
    """The page address of the controller with `pid`."""
    names = at.names("controller-")
    for name in names:
        if at.pid(name) == pid:
            return str(at.state["pages"][int(name.rpartition("-")[2]) - 1])
    raise cluster.ScenarioFailed(f"no controller has pid {pid}")


if __name__ == "__main__":
    cluster.main(scenario)
