"""The agent and a real llama.cpp server, found in an installed wheel, on the tiny model."""

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from llmgw.config import EtcdConfig
from llmgw.core.catalog import Task
from llmgw.core.ids import Secret
from llmgw.core.node import Build
from llmgw.core.replica import Assignment, ShardPhase, ShardReport, confirms_stop
from llmgw.core.snapshot import Kind, Ref
from llmgw.testing.agent_process import WAIT_S, AgentProcess, until
from llmgw.testing.etcd import Etcd
from llmgw.testing.node import assignment, stopped
from llmgw.testing.people import people_of
from llmgw_agent.engines.find import survey
from llmgw_agent.facts import look_at_machine

pytestmark = [pytest.mark.e2e, pytest.mark.etcd, pytest.mark.engine, pytest.mark.anyio]

KEY = "7a" * 32
[BUILD] = survey([], look_at_machine().cpu_flags).facts.builds or [Build(engine="llama.cpp", version="none")]
SHARD = "m-aaaaa.0"
REPORT = Ref(Kind.SHARD, f"n1/{SHARD}")
ORDER = Ref(Kind.ASSIGNMENT, f"n1/{SHARD}")


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.fixture
def agent(etcd: Etcd, tmp_path: Path, tiny_model: Path) -> Iterator[AgentProcess]:
    """An agent that found its engine by itself, running."""
    with AgentProcess(
        tmp_path / "n1", endpoints=etcd.endpoints, models=tiny_model.parent, settings={"cpus": 1.0}
    ) as agent:
        agent.start()
        yield agent


def order(**changes: Any) -> Assignment:
    return assignment(engine_key=Secret(KEY), **changes)


def client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(trust_env=False, timeout=WAIT_S, headers={"Authorization": f"Bearer {KEY}"})


def of_process(report: ShardReport, name: str) -> str:
    return Path(f"/proc/{report.pid}/{name}").read_text()


async def test_it_is_ready_when_it_has_done_real_work_and_is_what_was_ordered(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(EtcdConfig(endpoints=etcd.endpoints)) as people, client() as http:
        await people.put(ORDER, order(model="org/tiny", launch={"context": 1000, "slots": 3}))
        report = await people.until_ready(agent, REPORT)
        # llama-server rounds a slot's context up to a multiple of 256.
        assert (report.context, report.slots) == (1024, 3)
        assert (report.build or "").startswith("llama.cpp@")
        base = f"http://{report.address}:{report.port}"
        answer = await http.post(f"{base}/v1/completions", json={"model": "x", "prompt": "Hi", "max_tokens": 3})
        assert answer.json()["model"] == "org/tiny"
        assert (await httpx2.AsyncClient(trust_env=False).get(f"{base}/slots")).status_code == 401
        argv = of_process(report, "cmdline").split("\0")
        pairs = dict(itertools.pairwise(argv))
        assert (pairs["-t"], pairs["-c"], pairs["-np"], pairs["--device"]) == ("1", "3000", "3", "none")
        assert KEY not in of_process(report, "cmdline")
        assert KEY not in agent.engine_log(SHARD)
        assert KEY not in agent.said()


async def test_a_request_that_it_would_never_finish_does_not_keep_it_from_stopping(
    etcd: Etcd, agent: AgentProcess
) -> None:
    async with (
        people_of(EtcdConfig(endpoints=etcd.endpoints)) as people,
        client() as http,
        anyio.create_task_group() as tasks,
    ):
        await people.put(ORDER, order(drain_s=0.5, launch={"context": 4096}))
        report = await people.until_ready(agent, REPORT)
        base = f"http://{report.address}:{report.port}"

        async def ask() -> None:
            body = {"prompt": "Hi", "max_tokens": 100_000, "ignore_eos": True}
            with suppress(httpx2.TransportError):
                while True:  # one after the other, until there is no engine
                    await http.post(f"{base}/v1/completions", json=body)

        async def busy() -> bool:
            return any(slot["is_processing"] for slot in (await http.get(f"{base}/slots")).json())

        tasks.start_soon(ask)
        with anyio.fail_after(WAIT_S):
            while not await busy():  # noqa: ASYNC110  # the engine has no event to wait on
                await anyio.sleep(0.02)
        revision = await people.put(ORDER, stopped(order(drain_s=0.5)))
        await people.until(REPORT, lambda r: confirms_stop(r, order_rev=revision), agent)
        assert agent.engines() == []


async def test_a_killed_engine_is_back_on_its_port(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(EtcdConfig(endpoints=etcd.endpoints)) as people:
        await people.put(ORDER, order())
        first = await people.until_ready(agent, REPORT)
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        second = await people.until(
            REPORT, lambda r: r.phase is ShardPhase.READY and r.incarnation != first.incarnation, agent
        )
        assert second.port == first.port
        assert second.attempts == 1


async def test_more_context_than_the_model_has_fails_with_both_numbers(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(EtcdConfig(endpoints=etcd.endpoints)) as people:
        await people.put(ORDER, order(launch={"context": 100_000, "slots": 1}))
        report = await people.until(REPORT, lambda r: r is not None and r.phase is ShardPhase.FAILED, agent)
        assert report.reason.startswith("a context of 100000 tokens a slot was ordered, the engine gives 4096")
        await until(lambda: agent.engines() == [], "the engine is gone")


async def test_a_wrong_flag_fails_with_the_engines_words(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(EtcdConfig(endpoints=etcd.endpoints)) as people:
        await people.put(ORDER, order(launch={"args": ("--no-such-flag",)}))
        report = await people.until(REPORT, lambda r: r is not None and r.phase is ShardPhase.FAILED, agent)
        assert "--no-such-flag" in report.reason
        assert report.reason.endswith("(attempt 4, the last)")


async def test_readiness_is_work_of_the_models_task(etcd: Etcd, agent: AgentProcess) -> None:
    async with people_of(EtcdConfig(endpoints=etcd.endpoints)) as people, client() as http:
        await people.put(ORDER, order(launch={"task": Task.RERANK}))
        report = await people.until_ready(agent, REPORT)
        body = {"query": "Hi", "documents": ["a", "b"]}
        assert (await http.post(f"http://{report.address}:{report.port}/v1/rerank", json=body)).status_code == 200


async def test_a_model_that_cannot_do_its_task_is_never_ready_whatever_its_health_says(
    etcd: Etcd, agent: AgentProcess
) -> None:
    async with people_of(EtcdConfig(endpoints=etcd.endpoints)) as people:
        # The tiny model does not say how to pool, and nobody else did.
        await people.put(ORDER, order(launch={"task": Task.EMBED}))
        report = await people.until(REPORT, lambda r: r is not None and r.phase is ShardPhase.FAILED, agent)
        assert report.reason.startswith("it can't embed: 400 Pooling type 'none' is not OAI compatible")
