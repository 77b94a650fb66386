"""One seed of the simulation: a storm of faults under which nothing promised may break, then calm, and all must settle.

`simulate` runs it and returns what happened; `Broken` tells a failed run with its seed and story. Everything follows
from the seed, so a failed run repeats.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Final

import anyio
import msgspec

from llmgw.core.invariants import check_explained, unconverged
from llmgw.core.replica import Desired
from llmgw.core.routing import Route, route_table
from llmgw.store.memory_cluster import MemoryCluster
from llmgw.testing.judge import Judge
from llmgw.testing.seed import stream
from llmgw.testing.sim_fleet import Fleet, Sizes
from llmgw.testing.storm import Storm
from llmgw.testing.storm_kinds import KINDS, LEADER_KINDS
from llmgw.testing.storm_models import START_S
from llmgw.testing.virtual import run_virtual

STORM_S: Final = 900.0
"""How long faults go on, virtual seconds: three times `lost_after`."""

BACKOFF_MAX_S: Final = 300.0

FACTS_S: Final = 32.0
"""Within this an agent looks at its machine again."""

LARGE: Final = 50
LARGE_EVERY: Final = 40
"""One seed in so many has a fleet of `LARGE` nodes."""

QUIET_S: Final = 15.0
"""A state counts as settled when it stays so for this long."""

GATEWAY_LAG_S: Final = 15.0
"""How old what serves may be before a gateway without faults must route to it."""


STORY_TOLD: Final = 150
"""Lines of a failed run's story that its message ends with."""


class Broken(AssertionError):
    """A seed whose run broke a promise. `seed` repeats it, `story` is all that led to it, line by line."""

    def __init__(self, seed: int, what: str, story: str) -> None:
        self.seed, self.what, self.story = seed, what, story
        end = "\n".join(story.splitlines()[-STORY_TOLD:])
        super().__init__(f"seed {seed}: {what}\n{end}\nrepeat with: make soak-sim FROM={seed} SEEDS=1")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one run saw: `totals` by kind, its length and how long it took to settle, in virtual seconds."""

    seed: int
    totals: Counter[str]
    virtual_s: float
    settled_s: float


def simulate(seed: int, *, sizes: Sizes | None = None) -> Outcome:
    """Run one seed. Raises: Broken."""
    nodes = LARGE if seed % LARGE_EVERY == LARGE_EVERY - 1 else stream(seed, "sizes").randint(3, 8)
    return play(_storm_then_calm, seed=seed, sizes=sizes or Sizes(nodes=nodes, hardware=True))


class Run:
    """One run: the fleet, its judge, its storm; what a scenario gets."""

    def __init__(self, fleet: Fleet, judge: Judge, storm: Storm) -> None:
        self.fleet, self.judge, self.storm = fleet, judge, storm
        self.settled_s = 0.0
        self._seen: tuple[object, dict[str, tuple[Route, ...]]] = (None, {})

    async def until(self, holds: Callable[[], bool], *, within_s: float, what: str) -> None:
        """Await a condition, looked at every virtual half second; a broken promise or the dead-line ends the run."""
        with anyio.move_on_after(within_s):
            while not holds():  # noqa: ASYNC110  # conditions over the whole fleet have no one event
                await anyio.sleep(0.5)
            return
        self.judge.wrong(f"not within {within_s:g} s: {what}")
        await anyio.sleep_forever()

    def unsettled(self) -> list[str]:
        """What is not yet as it should be: in the records, on the machines, at the gateway."""
        index = self.judge.checker.index
        found = unconverged(index)
        ordered = {order.node + "/" + order.replica + f".{order.rank}": order for order in index.assignments.records()}
        wanted = {name for name, order in ordered.items() if order.desired is Desired.RUNNING}
        living = [f"{machine.name}/{engine.shard}" for machine in self.fleet.machines for engine in machine.running()]
        found += [f"{name} runs without an order to" for name in sorted(set(living) - wanted)]
        found += [f"{name} does not run" for name in sorted(wanted - set(living))]
        view = self.fleet.gateway.view
        if view is None or route_table(view.index) != route_table(index):
            found.append("the gateway routes by an old state")
        serving = self._serving()
        for routes in self.judge.routes().values():
            found += [
                f"{route.replica} is routed but does not serve" for route in routes if route.incarnation not in serving
            ]
        return found

    async def settle(self, *, within_s: float) -> None:
        """Until everything is as it should be and stays so. Invariant 9 gives the time."""
        start_s = anyio.current_time()
        with anyio.move_on_after(within_s):
            calm_s = anyio.current_time()
            while anyio.current_time() - calm_s < QUIET_S:  # as in `until`
                await anyio.sleep(1)
                if self.unsettled():
                    calm_s = anyio.current_time()
            self.settled_s = calm_s - start_s
            return
        self.judge.wrong(f"invariant 9: not settled within {within_s:g} s: {'; '.join(self.unsettled())}")
        await anyio.sleep_forever()

    async def watch(self) -> None:
        """What must hold at every second, storm or not."""
        healthy_s, lacking_s = 0.0, dict[str, float]()
        while True:
            await anyio.sleep(1)
            leader = self.fleet.leader
            calm = leader is not None and self.storm.calm(leader)
            healthy_s = healthy_s + 1 if calm else 0.0
            self.judge.check_answered(healthy_s=healthy_s)
            self._check_gateway(lacking_s)

    def _serving(self) -> set[str]:
        """The incarnations of all engines that would answer a request."""
        return {engine.incarnation for machine in self.fleet.machines for engine in machine.running() if engine.serves}

    def _check_gateway(self, lacking_s: dict[str, float]) -> None:
        """Invariant 6 at the gateway: while something serves, and the gateway can know, it has a route."""
        view = self.fleet.gateway.view
        if view is None or not view.ready or not self.storm.gateway_calm:
            lacking_s.clear()
            return
        if self._seen[0] != (view, view.changes):
            self._seen = (view, view.changes), route_table(view.index).routes
        seen = self._seen[1]
        now_s = anyio.current_time()
        serving: set[str] | None = None
        for model, routes in self.judge.routes().items():
            if not seen.get(model) and serving is None:
                serving = self._serving()
            if serving is None or seen.get(model) or not any(route.incarnation in serving for route in routes):
                lacking_s.pop(model, None)
            elif now_s - lacking_s.setdefault(model, now_s) > GATEWAY_LAG_S:
                self.judge.wrong(f"invariant 6: {model} serves, and the gateway has had no route for {GATEWAY_LAG_S} s")


def play(scenario: Callable[[Run], Awaitable[None]], *, seed: int = 0, sizes: Sizes | None = None) -> Outcome:
    """Run `scenario` on a fleet of its own under virtual time, judged throughout. Raises: Broken."""

    async def main() -> Outcome:
        storm, cluster = Storm(stream(seed, "storm")), MemoryCluster()
        judge = Judge(cluster)
        with _heard(judge), _told(seed, judge):
            async with anyio.create_task_group() as tasks:
                temper = lambda order: storm.temper(order)  # noqa: E731, PLW0108  # a story may put another in its place
                fleet = Fleet(tasks, cluster, seed=seed, sizes=sizes or Sizes(), witness=judge, temper=temper)
                storm.begin(fleet, judge)
                judge.attach()
                run = Run(fleet, judge, storm)
                tasks.start_soon(_end_when_broken, judge)
                tasks.start_soon(run.watch)
                await scenario(run)
                tasks.cancel_scope.cancel()
        return Outcome(seed=seed, totals=judge.totals, virtual_s=anyio.current_time(), settled_s=run.settled_s)

    return run_virtual(main, seed=seed)


async def _storm_then_calm(run: Run) -> None:
    fleet, storm, judge = run.fleet, run.storm, run.judge
    fleet.start()
    await storm.populate()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # people read what commands tell them
        await storm.rage(LEADER_KINDS, KINDS, for_s=STORM_S)
    await storm.heal()
    await anyio.sleep(FACTS_S)  # what was lost, faulty or a lie is seen to be well again
    await run.settle(within_s=fleet.sizes.lost_after_s + START_S + BACKOFF_MAX_S + 60)
    wrong = [str(violation) for violation in check_explained(judge.checker.index)]
    before, leader = _orders(run), await storm.leader()
    await leader.kill()
    await run.until(lambda: fleet.leader not in (None, leader), within_s=30, what="another one leads")
    await anyio.sleep(QUIET_S)
    if _orders(run) != before:
        wrong.append(f"invariant 7: a new leader changed what was settled: {before ^ _orders(run)}")
    if wrong:
        judge.wrong("; ".join(wrong))
        await anyio.sleep_forever()


def _orders(run: Run) -> set[tuple[str, str]]:
    """All orders but those of models that follow their load, which may change at any time."""
    index = run.judge.checker.index
    fixed = {spec.name for spec in index.models.records() if spec.scaling.min == spec.scaling.max}
    orders = index.assignments.records()
    return {(f"{o.node}/{o.replica}.{o.rank}", o.desired.value) for o in orders if o.model in fixed}


class _Ended(Exception):
    """A promise was broken; the judge knows which."""


async def _end_when_broken(judge: Judge) -> None:
    await judge.broken.wait()
    raise _Ended


@contextmanager
def _told(seed: int, judge: Judge) -> Iterator[None]:
    """Whatever a run dies of is told with its seed and story."""
    try:
        yield
    except BaseExceptionGroup as error:
        rest = error.split(_Ended)[1]
        if rest is not None:
            judge.violations.append(f"a process died: {rest.exceptions!r}")
        raise Broken(seed, "; ".join(judge.violations), judge.story()) from error


@contextmanager
def _heard(judge: Judge) -> Iterator[None]:
    """The logs of everything go to the judge, and nowhere else: formatting them would cost more than the run."""
    loggers = [logging.getLogger(name) for name in ("llmgw", "llmgw_agent")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(judge)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(judge)
            logger.setLevel(level)
            logger.propagate = propagate
