"""SIGKILL of the leading controller while an answer streams: the answer goes on, and another controller leads."""

from __future__ import annotations

import signal

import anyio

from chaos import cluster

PROMPT = "This is a long story about a river, a bridge and a keeper who read letters by the lamp. Once upon a time,"


async def scenario(at: cluster.Cluster) -> None:
    """Kill the leader in the middle of a stream; chunks must come before and after, then [DONE]; the term must rise."""
    term, pid = await at.leader()
    if not term:
        raise cluster.ScenarioFailed("nobody leads")
    streamed, killed_at, count = cluster.Streamed(), 0.0, 0

    def on_text(_: str) -> None:
        nonlocal killed_at, count
        count += 1
        if count == 10:
            at.signal(pid, signal.SIGKILL)
            killed_at = anyio.current_time()
            cluster.say(f"killed the leader (pid {pid}, term {term}) after {count} chunks of the answer")
        elif count % 100 == 0:
            cluster.say(f"{count} chunks")

    await at.stream(streamed, text=PROMPT, max_tokens=300, on_text=on_text)
    if streamed.error is not None:
        raise cluster.ScenarioFailed(f"the stream broke: {streamed.error}")
    before, after = streamed.around(killed_at)
    if not streamed.done or not killed_at or before < 10 or after < 1:
        raise cluster.ScenarioFailed(f"{before} chunks before, {after} after the kill, [DONE] {streamed.done}")
    cluster.say(f"the answer went on: {before} chunks before, {after} after, [DONE]")
    now = await at.another_leader(term)
    cluster.say(f"term {now} leads (was {term})")
    await at.judge()


if __name__ == "__main__":
    cluster.main(scenario)
