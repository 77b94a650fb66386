"""Models that follow their load, on the simulated control plane: asleep, woken, more, fewer, asleep again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import msgspec

from llmgw.core.catalog import Scaling
from llmgw.core.replica import ReplicaPhase, Retire, ScaleCause, ScaleState
from llmgw.testing.faults import Link
from llmgw.testing.load import LoadTeller
from llmgw.testing.sim_fleet import EPOCH_S, Sizes
from llmgw.testing.sim_machine import Temper
from llmgw.testing.simulation import Run, play
from llmgw.testing.storm_models import model

SOON_S = 60.0
IDLE_S = 120.0


async def up(run: Run, low: int, high: int) -> LoadTeller:
    """Everything runs; the model `m` has a range, and a gateway tells its load."""
    run.storm.temper = lambda _: Temper(loads_s=3)  # type: ignore[method-assign]  # engines without tempers
    run.fleet.start()
    spec = model("m", memory_gb=10, replicas=low)
    scaling = Scaling(min=low, max=high, target_load=4, idle_s=IDLE_S)
    run.storm.models["m"] = msgspec.structs.replace(spec, scaling=scaling)
    await run.storm.apply()
    teller = LoadTeller(run.fleet.store, "g", wall=run.fleet.gateway.wall)
    run.fleet.tasks.start_soon(teller.run)
    await run.settle(within_s=SOON_S)
    return teller


def scale(run: Run) -> ScaleState:
    state = run.judge.checker.index.model_states.record("m")
    assert state is not None
    assert state.scale is not None
    return state.scale


def ready(run: Run) -> int:
    return sum(replica.phase is ReplicaPhase.READY for replica in run.judge.checker.index.replicas.records())


def story(scenario: Callable[[Run], Awaitable[None]]) -> None:
    play(scenario, sizes=Sizes(nodes=3))


def test_a_model_wakes_grows_shrinks_and_falls_asleep_across_a_change_of_leader() -> None:
    async def scenario(run: Run) -> None:
        teller = await up(run, 0, 4)
        assert (scale(run).wanted, len(run.judge.checker.index.replicas)) == (0, 0)
        asked_s = anyio.current_time()
        teller.say({"m": (0, 3)})
        await run.until(lambda: ready(run) == 1, within_s=10, what="the first replica is ready")
        assert scale(run).cause is ScaleCause.WAKE
        assert scale(run).since_at - EPOCH_S - asked_s < 1
        teller.say({"m": (4, 10)})
        await run.until(lambda: ready(run) == 4, within_s=60, what="four replicas are ready")
        await run.settle(within_s=SOON_S)
        await (await run.storm.leader()).kill()
        teller.say({"m": (3, 0)})
        began_s = anyio.current_time()
        await run.until(lambda: scale(run).wanted == 1, within_s=400, what="one replica is wanted")
        assert anyio.current_time() - began_s >= 300
        run.fleet.start()
        await run.settle(within_s=2 * SOON_S)
        assert ready(run) == 1
        teller.say({"m": (0, 0)})
        ended_s = anyio.current_time()
        await run.until(lambda: scale(run).wanted == 0, within_s=IDLE_S + 31, what="it sleeps")
        assert anyio.current_time() - ended_s >= IDLE_S
        await run.settle(within_s=SOON_S)
        assert not run.judge.checker.index.replicas
        assert run.judge.retirements()[Retire.SCALE_DOWN] == 4

    story(scenario)


def test_time_in_which_nobody_could_see_the_load_is_no_idle_time() -> None:
    async def scenario(run: Run) -> None:
        teller = await up(run, 0, 4)
        teller.say({"m": (0, 8)})
        await run.until(lambda: ready(run) == 2, within_s=60, what="two replicas are ready")
        for process in run.fleet.controllers:
            process.faulty.link = Link.SILENT
        teller.say({"m": (0, 0)})
        await anyio.sleep(IDLE_S)
        for process in run.fleet.controllers:
            process.faulty.heal()
        await run.settle(within_s=2 * SOON_S)
        assert ready(run) == 2, "nobody has seen it idle for so long"
        await run.until(lambda: scale(run).wanted == 0, within_s=IDLE_S + 31, what="it sleeps")
        assert not run.judge.retirements()[Retire.FAILED]

    story(scenario)
