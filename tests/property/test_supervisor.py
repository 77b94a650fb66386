"""Any sequence of events: the supervisor's state stays consistent, and no promise of it is broken on the way."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmgw.core.replica import GONE, Assignment, Desired, confirms_stop
from llmgw.testing.node import Bench, agent_config, assignment, stopped
from llmgw_agent import event as ev
from llmgw_agent.host import Silent, Wrong

NAMES = ("a-aaaaa", "b-bbbbb", "c-ccccc")


class SupervisorMachine(RuleBasedStateMachine):
    """Orders come and go in any order, engines and agent die at any moment, time passes in any amount."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(agent_config(engine_ports=(20000, 20002), port_rest_s=5.0, stable_s=100.0))
        self.bench.tell(ev.Restored(saved=None, found=()), ev.MemoryKnown(memory_bytes=10 * 10**9))
        self.revision = 10
        self.orders: dict[str, tuple[int, Assignment]] = {}
        self.stopped: set[str] = set()
        self.may_end: set[str] = set()
        """Shards whose engine has a reason to be gone: told to stop, failed by itself, or rebooted away."""

    def show(self) -> None:
        self.bench.see(*self.orders.values())

    @rule(name=st.sampled_from(NAMES), desired=st.sampled_from([Desired.RUNNING, Desired.HELD]), gb=st.integers(0, 6))
    def order(self, name: str, desired: Desired, gb: int) -> None:
        self.revision += 1
        self.orders[name] = (self.revision, assignment(name, desired=desired, memory_bytes=gb * 10**9 or None))
        self.show()

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def stop(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.orders)))
        self.revision += 1
        self.orders[name] = (self.revision, stopped(self.orders[name][1]))
        self.stopped.add(name)
        self.may_end.add(name)
        self.show()

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def lose_order(self, data: Any) -> None:
        del self.orders[data.draw(st.sampled_from(sorted(self.orders)))]
        self.show()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 10.0, 70.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.bench.run(seconds)

    @rule(data=st.data(), left=st.integers(0, 2))
    def engine_dies(self, data: Any, left: int) -> None:
        alive = sorted(shard for shard, engine in self.bench.engines.items() if engine.alive)
        if alive:
            shard = data.draw(st.sampled_from(alive))
            self.bench.engines[shard].left = left
            self.bench.engines[shard].end("exit 1")
            self.may_end.add(shard[:-2])

    @rule(data=st.data(), how=st.sampled_from(["busy", "idle", "deaf", "wrong", "silent"]))
    def engine_changes(self, data: Any, how: str) -> None:
        if not self.bench.engines:
            return
        shard = data.draw(st.sampled_from(sorted(self.bench.engines)))
        engine = self.bench.engines[shard]
        match how:
            case "busy" | "idle":
                engine.busy, engine.result = int(how == "busy"), None
            case "deaf":
                engine.obeys_term = False
            case "wrong":
                engine.result = Wrong(reason="wrong")
                self.may_end.add(shard[:-2])
            case _:
                engine.result = Silent(why="silent")
                self.may_end.add(shard[:-2])

    @rule(reason=st.sampled_from([("broken", False), ("port is taken", True)]))
    def next_start_is_refused(self, reason: tuple[str, bool]) -> None:
        self.bench.script.refusals.append(reason)

    @rule(load_s=st.sampled_from([0.0, 1.0, 30.0, 100.0]), deaf=st.booleans(), left=st.integers(0, 2))
    def next_engines(self, load_s: float, deaf: bool, left: int) -> None:
        self.bench.script.load_s, self.bench.script.obeys_term, self.bench.script.left = load_s, not deaf, left
        if load_s >= 60:
            self.may_end.update(NAMES)  # too slow for the start budget

    @rule()
    def agent_restarts(self) -> None:
        self.bench.restart()

    @rule()
    def machine_restarts(self) -> None:
        self.may_end.update(NAMES)
        self.bench.restart(boot=f"boot-{self.revision}-{len(self.bench.starts)}")

    @rule()
    def state_is_lost(self) -> None:
        self.bench.restart(lost=True)

    @invariant()
    def an_engine_ends_for_a_reason_only(self) -> None:
        for shard, engine in self.bench.engines.items():
            assert engine.alive or shard[:-2] in self.may_end, f"{shard} was ended for nothing"

    @invariant()
    def what_is_confirmed_gone_is_gone(self) -> None:
        for shard, report in self.bench.reports.items():
            if report.phase in GONE:
                engine = self.bench.engines.get(shard)
                assert engine is None or (not engine.alive and engine.left == 0), f"{shard} is not gone"

    @invariant()
    def what_runs_is_reported(self) -> None:
        for shard, engine in self.bench.engines.items():
            assert not engine.alive or shard in self.bench.reports

    @invariant()
    def ports_are_nobody_elses(self) -> None:
        ports = [engine.port for engine in self.bench.engines.values() if engine.alive]
        assert len(ports) == len(set(ports))

    def teardown(self) -> None:
        # Convergence: whatever happened, orders to stop are confirmed in the end.
        self.show()
        self.bench.run(400)
        for name, (revision, order) in self.orders.items():
            if order.desired is Desired.STOPPED:
                assert confirms_stop(self.bench.report(f"{name}.0"), order_rev=revision)


SupervisorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSupervisor = SupervisorMachine.TestCase
