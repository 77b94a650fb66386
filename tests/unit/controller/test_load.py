"""The sampler on a store in memory, under virtual time: what it hears, when it samples, what it makes of trouble."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec
import pytest

from llmgw.config import ControllerConfig, load_config
from llmgw.controller.load import Sampler
from llmgw.controller.loop import control
from llmgw.core.catalog import ModelSpec, Scaling
from llmgw.core.ids import CountedIds, Ids
from llmgw.core.live import LoadView
from llmgw.core.plan import Plan, Settings, View
from llmgw.core.record import Leader
from llmgw.core.replica import ModelState, ScaleCause, ScaleState
from llmgw.core.snapshot import Dirty, Index, Kind, Ref
from llmgw.core.units import Now
from llmgw.errors import Denied, Invalid
from llmgw.obs.status import ControllerStatus
from llmgw.store import codec, keys
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import Listing, PutOp
from llmgw.testing.cluster import Cluster, model_spec
from llmgw.testing.faults import FaultyStore, Link
from llmgw.testing.load import LoadTeller
from llmgw.testing.virtual import run_virtual

EVERY_S = 15.0


class Strict(FaultyStore):
    """A store whose role lacks what gateways write."""

    denies = False

    async def list(self, prefixes: Sequence[str]) -> Listing:
        if self.denies and any(prefix.startswith(keys.LIVE) for prefix in prefixes):
            raise Denied("permission denied")
        return await super().list(prefixes)


class Scene:
    """A store, a sampler over a bare index, and the gateways that a test starts."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.tasks = tasks
        self.memory = MemoryCluster()
        self.cluster = Cluster()
        self.store = Strict(MemoryStore(self.memory), tasks)
        self.calls: list[tuple[float, set[str]]] = []
        self.view = LoadView()
        self.sampler = Sampler(
            self.store,
            self.cluster.index,
            every_s=EVERY_S,
            relist_s=400.0,
            lost_after_s=300.0,
            wall=anyio.current_time,
            jitter=lambda: 0.5,
            sampled=self._sampled,
        )

    def _sampled(self, load: LoadView, models: set[str]) -> None:
        self.view = load
        self.calls.append((anyio.current_time(), models))

    def model(self, name: str, *, wanted: int, low: int = 0, high: int = 8) -> None:
        spec = msgspec.structs.replace(model_spec(name), scaling=Scaling(min=low, max=high))
        scale = ScaleState(wanted=wanted, since_at=0.0, cause=ScaleCause.LOAD)
        self.cluster.write(Kind.MODEL, name, spec)
        self.cluster.write(
            Kind.MODEL_STATE, name, ModelState(name=name, wanted=wanted, placed=wanted, ready=wanted, scale=scale)
        )

    def gateway(self, name: str) -> tuple[LoadTeller, anyio.CancelScope]:
        teller, scope = LoadTeller(MemoryStore(self.memory), name), anyio.CancelScope()

        async def run() -> None:
            with scope:
                await teller.run()

        self.tasks.start_soon(run)
        return teller, scope

    async def put(self, gateway: str, value: bytes) -> None:
        await MemoryStore(self.memory).txn([], [PutOp(key=keys.gateway_key(gateway), value=value)])


def in_scene(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            scene = Scene(tasks)
            tasks.start_soon(scene.sampler.run)
            with anyio.fail_after(10_000):
                await story(scene)
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_ordinary_news_waits_for_the_next_sample_and_a_request_that_finds_no_replica_does_not() -> None:
    async def story(scene: Scene) -> None:
        scene.model("up", wanted=1)
        scene.model("asleep", wanted=0)
        teller, _ = scene.gateway("g")
        await anyio.sleep(20.0)
        assert [time_s for time_s, _ in scene.calls] == [15.0]
        teller.say({"up": (9, 9)})
        await anyio.sleep(5.0)
        assert len(scene.calls) == 1
        teller.say({"asleep": (0, 1)})
        await anyio.sleep(0.1)
        time_s, models = scene.calls[-1]
        assert (len(scene.calls), models) == (2, {"asleep"})
        assert time_s - 25.0 < 0.01
        assert scene.view.models["asleep"].wanted == 1
        assert scene.view.models["up"].load == 0
        await anyio.sleep(5.0)
        assert scene.calls[-1] == (30.0, {"up", "asleep"})
        assert scene.view.models["up"].wanted == 2

    in_scene(story)


def test_what_waited_before_this_leader_came_is_seen_in_its_first_listing() -> None:
    async def story(scene: Scene) -> None:
        scene.model("asleep", wanted=0)
        scene.store.link = Link.SILENT
        teller, _ = scene.gateway("g")
        teller.say({"asleep": (0, 1)})
        await anyio.sleep(5.0)
        scene.store.heal()
        await anyio.sleep(8.0)
        assert [models for _, models in scene.calls] == [{"asleep"}]

    in_scene(story)


def test_a_gateway_whose_lease_ends_is_missed_for_a_while_and_then_forgotten() -> None:
    async def story(scene: Scene) -> None:
        scene.model("m", wanted=3)
        scene.gateway("stays")
        teller, scope = scene.gateway("goes")
        teller.say({"m": (9, 0)})
        await anyio.sleep(20.0)
        assert (scene.view.missing, scene.view.models["m"].load) == ("", 9)
        scope.cancel()
        await anyio.sleep(15.0)
        assert (scene.view.missing, scene.view.models["m"].load) == ("gateway goes was there a moment ago", 0)
        await anyio.sleep(315.0)
        assert scene.view.missing == ""

    in_scene(story)


def test_a_gateway_that_a_fresh_listing_lacks_has_vanished() -> None:
    async def story(scene: Scene) -> None:
        scene.model("m", wanted=3)
        scene.gateway("stays")
        _, scope = scene.gateway("goes")
        await anyio.sleep(20.0)
        scene.store.link = Link.SILENT
        scope.cancel()
        await anyio.sleep(5.0)
        scene.memory.compact(scene.memory.revision)
        scene.store.heal()
        await anyio.sleep(25.0)
        assert scene.view.missing == "gateway goes was there a moment ago"

    in_scene(story)


def test_a_gateway_that_comes_back_is_missed_no_longer() -> None:
    async def story(scene: Scene) -> None:
        scene.model("m", wanted=3)
        _, scope = scene.gateway("g")
        await anyio.sleep(20.0)
        scope.cancel()
        await anyio.sleep(15.0)
        assert scene.view.missing == "gateway g was there a moment ago"
        scene.gateway("g")
        await anyio.sleep(15.0)
        assert scene.view.missing == ""

    in_scene(story)


@pytest.mark.parametrize("link", [Link.REFUSED, Link.SILENT])
def test_a_watch_that_hears_nothing_makes_the_load_unknown_and_takes_nothing_away(link: Link) -> None:
    async def story(scene: Scene) -> None:
        scene.model("m", wanted=3)
        teller, _ = scene.gateway("g")
        teller.say({"m": (12, 0)})
        await anyio.sleep(20.0)
        teller.say({"m": (0, 0)})
        await anyio.sleep(60.0)
        assert scene.view.missing == ""
        scene.store.link = link
        await anyio.sleep(5000.0)
        assert scene.view.missing == "gateway g has told nothing for more than 60 s"
        assert scene.view.models["m"].wanted == 3
        assert not any(models for _, models in scene.calls)
        scene.store.heal()
        await anyio.sleep(30.0)
        assert scene.view.missing == ""
        await anyio.sleep(300.0)
        assert scene.view.models["m"].wanted == 1

    in_scene(story)


def test_a_record_that_cant_be_read_is_unknown_until_it_can() -> None:
    async def story(scene: Scene) -> None:
        scene.model("m", wanted=3)
        scene.gateway("g")
        await scene.put("bad", b'{"gateway":"bad","models":{"m":{"in_flight":-1}}}')
        await anyio.sleep(1000.0)
        assert scene.view.missing == "what gateway bad tells can't be read"
        assert scene.view.models["m"].wanted == 3
        scene.gateway("bad")
        await anyio.sleep(15.0)
        assert scene.view.missing == ""

    in_scene(story)


def test_what_is_no_gateways_key_is_nobody() -> None:
    async def story(scene: Scene) -> None:
        scene.model("m", wanted=3)
        await MemoryStore(scene.memory).txn([], [PutOp(key=keys.GATEWAYS + "a/b", value=b"?")])
        await anyio.sleep(15.0)
        assert scene.view.missing == "no gateway tells its load"

    in_scene(story)


def test_a_store_that_denies_it_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async def story(scene: Scene) -> None:
        scene.model("m", wanted=3)
        scene.store.denies = True
        scene.gateway("g")
        await anyio.sleep(100.0)
        assert scene.view.missing == "no gateway tells its load"
        assert caplog.text.count("denies us") == 1
        scene.store.denies = False
        await anyio.sleep(30.0)
        assert scene.view.missing == ""

    in_scene(story)


# --- in the loop ----------------------------------------------------------------------------------------------------


class Asked:
    """Decides nothing, and remembers what it was asked and when."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, Dirty, LoadView]] = []

    def __call__(self, index: Index, dirty: Dirty, *, now: Now, view: View, ids: Ids, settings: Settings) -> Plan:
        self.asked.append((now.mono_s, dirty, view.load))
        return Plan()


def test_a_reign_wakes_for_what_a_sample_moves_and_for_nothing_else_and_survives_a_denial() -> None:
    async def main() -> None:
        memory, decide = MemoryCluster(), Asked()
        async with anyio.create_task_group() as tasks:
            store = Strict(MemoryStore(memory), tasks)
            teller = LoadTeller(MemoryStore(memory), "g")
            spec = ModelSpec(name="m", source="s", scaling=Scaling(min=0, max=4))
            scale = ScaleState(wanted=0, since_at=0.0, cause=ScaleCause.START)
            state = ModelState(name="m", wanted=0, placed=0, ready=0, scale=scale)
            put = [(Ref(Kind.MODEL, "m"), spec), (Ref(Kind.MODEL_STATE, "m"), state)]
            await MemoryStore(memory).txn(
                [], [PutOp(key=keys.key(ref), value=codec.encode_stored(record)) for ref, record in put]
            )
            leader = Leader(id="a", address="a:1", version="1", pid=1)
            status = ControllerStatus(leader=leader, renew_within_s=5)

            async def run() -> None:
                await control(
                    store,
                    ControllerConfig(),
                    identity=leader,
                    wall=lambda: 1e9 + anyio.current_time(),
                    ids=CountedIds(),
                    jitter=lambda: 0.5,
                    status=status,
                    decide=decide,
                )

            tasks.start_soon(run)
            tasks.start_soon(teller.run)
            teller.say({"other": (5, 5)})
            await anyio.sleep(300)
            assert len(decide.asked) == 1, "a sample that moves nothing wakes nobody"
            assert status.load is not None
            assert status.load.missing == ""
            asked_s = anyio.current_time()
            teller.say({"m": (0, 1)})
            await anyio.sleep(1)
            time_s, dirty, load = decide.asked[1]
            assert time_s - asked_s < 0.2
            assert dirty.models == {"m"}
            assert load.models["m"].wanted == 1
            term = status.term
            store.denies = True
            store.break_watches(Denied("permission denied"))
            await anyio.sleep(600)
            assert status.term is term
            tasks.cancel_scope.cancel()
        assert status.load is None

    run_virtual(main)


def test_samples_need_some_time_between_them() -> None:
    with pytest.raises(Invalid, match="scale_every_s: 0 must be more than zero"):
        load_config(None, ControllerConfig, env={}, overrides={"scale_every_s": "0"})
