"""Virtual time: it jumps to whoever is next, and nobody is woken who does not wait any more."""

from __future__ import annotations

import anyio
import pytest
import trio

from llmgw.testing.virtual import pause, run_virtual


def test_sleeps_and_pauses_end_in_the_order_of_their_moments() -> None:
    async def main() -> list[tuple[str, float]]:
        ended: list[tuple[str, float]] = []

        async def wait(name: str, seconds: float) -> None:
            await (pause(seconds) if name.startswith("pause") else anyio.sleep(seconds))
            ended.append((name, anyio.current_time()))

        async with anyio.create_task_group() as tasks:
            for name, seconds in (("sleep c", 3), ("pause b", 2), ("sleep a", 1), ("pause d", 4e6), ("pause a", 1)):
                tasks.start_soon(wait, name, seconds)
        return ended

    ended = run_virtual(main)
    assert [at_s for _, at_s in ended] == [1, 1, 2, 3, 4e6]
    assert [name for name, _ in ended[2:]] == ["pause b", "sleep c", "pause d"]


def test_a_cancelled_pause_wakes_nobody_and_moves_no_clock() -> None:
    async def main() -> float:
        with anyio.move_on_after(1) as scope:
            await pause(1000)
        assert scope.cancelled_caught
        await anyio.sleep(1)
        return anyio.current_time()

    assert run_virtual(main) == 2


def test_time_stands_still_while_anybody_can_run() -> None:
    async def main() -> None:
        async def spin() -> None:
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
                assert anyio.current_time() == 0

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 5)
            tasks.start_soon(spin)

    run_virtual(main)


def test_the_same_seed_gives_the_same_order_of_tasks() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def note(number: int) -> None:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
                order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(note, number)
        return order

    assert run_virtual(main, seed=1) == run_virtual(main, seed=1)
    assert run_virtual(main, seed=1) != run_virtual(main, seed=2)


def test_under_another_clock_a_pause_is_a_sleep() -> None:
    async def main() -> float:
        await pause(2)
        return anyio.current_time()

    clock = trio.testing.MockClock(autojump_threshold=0)
    assert trio.run(main, clock=clock) == pytest.approx(2)
