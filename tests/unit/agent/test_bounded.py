"""Blocking work on threads: bounded, in turn, and what hangs hangs once."""

import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from llmgw.errors import Refused
from llmgw.testing.agent_process import until
from llmgw.testing.node import agent_config
from llmgw_agent import bounded as bounded_module
from llmgw_agent import linux, proc, statefile
from llmgw_agent.bounded import Bounded, Hung
from llmgw_agent.host import Loaded

pytestmark = pytest.mark.anyio


async def test_calls_of_one_name_take_turns() -> None:
    bounded, out, most = Bounded(), 0, 0

    def work() -> None:
        nonlocal out, most
        out += 1
        most = max(most, out)
        threading.Event().wait(0.01)
        out -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(lambda: bounded.run("x", work, bound_s=30))
    assert most == 1


async def test_what_hangs_is_unknown_and_is_not_asked_again() -> None:
    bounded, never, calls = Bounded(), threading.Event(), []

    def work() -> None:
        calls.append(1)
        never.wait()

    with anyio.fail_after(30):
        while not calls:
            with pytest.raises(Hung):
                await bounded.run("x", work, bound_s=0.01)
    for _ in range(2):
        with pytest.raises(Hung):
            await bounded.run("x", work, bound_s=0.01)
    assert len(calls) == 1
    assert await bounded.run("y", lambda: 7, bound_s=30) == 7
    never.set()
    with anyio.fail_after(30):
        while True:
            try:
                assert await bounded.run("x", lambda: 8, bound_s=1) == 8
            except Hung:  # its thread is on its way out
                await anyio.lowlevel.checkpoint()
            else:
                break


async def test_what_never_began_is_not_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = Bounded()

    async def no_thread_is_free(*_: object, **__: object) -> None:
        await anyio.sleep_forever()

    with monkeypatch.context() as patch:
        patch.setattr(anyio.to_thread, "run_sync", no_thread_is_free)
        with pytest.raises(Hung):
            await bounded.run("x", lambda: 7, bound_s=0.01)
    assert await bounded.run("x", lambda: 7, bound_s=30) == 7


async def test_an_error_of_the_work_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        await Bounded().run("x", lambda: 1 / 0, bound_s=30)


@pytest.mark.parametrize("what", ["lock", "load", "find"])
async def test_what_hangs_at_the_start_is_waited_for_and_said(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = threading.Event()

    def hanging(real: Callable[..., object]) -> Callable[..., object]:
        def work(*args: object) -> object:
            assert answer.wait(30)
            return real(*args)

        return work

    owner, name = {"lock": (linux, "_lock"), "load": (statefile, "load"), "find": (proc, "scan")}[what]
    monkeypatch.setattr(owner, name, hanging(getattr(owner, name)))
    monkeypatch.setattr(bounded_module, "PATIENT_S", 0.01)
    seen: list[Loaded] = []

    async def come_up() -> None:
        async with linux.open_host(agent_config(data_dir=str(tmp_path / "data"))) as host:
            seen.append(await host.load())
            assert await host.find() == ()

    waited_for = "/proc" if what == "find" else f"the data directory {tmp_path / 'data'}"
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come_up)
            said = f"{waited_for} gives no answer; waiting for it"
            await until(lambda: said in caplog.messages, "it is said")
            answer.set()
    assert seen == [Loaded(state=None)]


async def test_a_taken_data_directory_is_refused_by_its_holders_number(tmp_path: Path) -> None:
    config = agent_config(data_dir=str(tmp_path))
    async with linux.open_host(config) as first:
        with pytest.raises(Refused, match=rf"in use by another agent \(pid {first.pid}\)"):
            async with linux.open_host(config):
                pass
