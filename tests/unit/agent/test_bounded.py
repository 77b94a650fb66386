"""Blocking work on threads: bounded, in turn, and what hangs hangs once."""

import threading

import anyio
import anyio.lowlevel
import pytest

from llmgw_agent.bounded import Bounded, Hung

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

    for _ in range(3):
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


async def test_an_error_of_the_work_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        await Bounded().run("x", lambda: 1 / 0, bound_s=30)
