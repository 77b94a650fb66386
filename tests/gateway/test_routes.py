"""The route table follows the store, in any order, through compaction, restores and outages; these never shrink it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskGroup

from llmgw.config import GatewayConfig
from llmgw.core.catalog import Alias, ModelSpec
from llmgw.core.ids import Secret
from llmgw.core.record import Record, StoreMeta
from llmgw.core.replica import Claim, EngineSecret, Replica, ReplicaPhase, ReplicaShard, ShardPhase, ShardReport
from llmgw.core.snapshot import Kind, Ref
from llmgw.gateway.routes import NOTICE_AGE_S, Routes
from llmgw.gateway.snapshot import SnapshotFile
from llmgw.store import codec, keys
from llmgw.store.memory import MemoryCluster, MemoryStore
from llmgw.store.port import DeleteOp, PutOp
from llmgw.testing.faults import FaultyStore, Link
from llmgw.testing.gateway import Rig, chat, request
from llmgw.testing.stub_engine import Silent, Stream, sse

pytestmark = pytest.mark.anyio

KEY = "k" * 64
META = (Ref(Kind.META), StoreMeta(incarnation="one"))

Put = tuple[Ref, Record]


def model(name: str = "m", **more: object) -> Put:
    return Ref(Kind.MODEL, name), ModelSpec(name=name, source="x", **more)  # type: ignore[arg-type]  # a test's fields


def replica(name: str, *, of: str = "m", phase: ReplicaPhase = ReplicaPhase.PLACED) -> Put:
    return Ref(Kind.REPLICA, name), Replica(
        id=name,
        model=of,
        profile="cpu",
        engine="llama.cpp",
        launch="0" * 16,
        phase=phase,
        shards=(ReplicaShard(rank=0, node="n1", claim=Claim()),),
        created_at=1.0,
        phase_at=1.0,
    )


def secret(name: str, key: str = KEY) -> Put:
    return Ref(Kind.SECRET, name), EngineSecret(replica=name, key=Secret(key))


def shard(name: str, port: int, *, phase: ShardPhase = ShardPhase.READY, incarnation: str = "i1") -> Put:
    return Ref(Kind.SHARD, f"n1/{name}.0"), ShardReport(
        node="n1",
        replica=name,
        rank=0,
        model="m",
        phase=phase,
        phase_at=1.0,
        incarnation=incarnation,
        address="127.0.0.1",
        port=port,
    )


class Following:
    """A gateway that follows a store, whose link a test can cut."""

    def __init__(self, rig: Rig, file: SnapshotFile, tasks: TaskGroup) -> None:
        self.rig = rig
        self.cluster = MemoryCluster()
        self.admin = MemoryStore(self.cluster)
        self.wall_s = 1_000_000.0
        self.file = file
        self.tasks = tasks
        self.link = FaultyStore(MemoryStore(self.cluster), tasks)

    async def start(self) -> Routes:
        routes = Routes(self.rig.hub, file=self.file, wall=lambda: self.wall_s, jitter=lambda: 0.0)
        self.rig.exposition.extra = [routes.metrics]

        async def run() -> None:
            await routes.run(self.link, relist_s=420)

        self.tasks.start_soon(run)
        return routes

    async def put(self, *puts: Put) -> None:
        ops = [PutOp(key=keys.key(ref), value=codec.encode_stored(record)) for ref, record in puts]
        await self.admin.txn([], ops)

    async def delete(self, *refs: Ref) -> None:
        await self.admin.txn([], [DeleteOp(key=keys.key(ref)) for ref in refs])

    async def routed(self, *replicas: str, model: str = "m") -> None:
        """Until just these replicas are routable."""
        await self.rig.until(lambda: self.replicas(model) == set(replicas))

    def replicas(self, model: str = "m") -> set[str]:
        group = self.rig.hub.groups.get(model)
        return set() if group is None else {member.route.replica for member in group.members}


@pytest.fixture
def config() -> GatewayConfig:
    return GatewayConfig()


@pytest.fixture
def file(tmp_path: Path) -> SnapshotFile:
    return SnapshotFile(tmp_path / "state" / "routes.json")


@asynccontextmanager
async def cancelled_at_the_end() -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()


@pytest.fixture
async def store(rig: Rig, file: SnapshotFile) -> Following:
    return Following(rig, file, await rig.hold(cancelled_at_the_end()))


async def test_a02_gateway_lists_again_after_a_compaction_it_slept_through(rig: Rig, store: Following) -> None:
    one, two = await rig.engine(), await rig.engine()
    await store.put(META, model(), replica("r1"), secret("r1"), shard("r1", one.port))
    await store.start()
    await store.routed("r1")
    assert (await rig.ask()).status == 200

    store.link.link = Link.SILENT
    await store.delete(Ref(Kind.REPLICA, "r1"), Ref(Kind.SECRET, "r1"), Ref(Kind.SHARD, "n1/r1.0"))
    await store.put(replica("r2"), secret("r2"), shard("r2", two.port))
    store.cluster.compact(store.cluster.revision)
    assert (await rig.ask()).status == 200  # it does not know yet, and serves on
    asked = len(one.seen)
    store.link.link = Link.UP

    await store.routed("r2")
    for _ in range(5):
        assert (await rig.ask()).status == 200
    assert (len(one.seen), len(two.seen)) == (asked, 5)
    metrics = (await rig.ask(request(method="GET", path="/metrics"))).body.decode()
    assert 'llmgw_gateway_route_resyncs_total{cause="compacted"} 1.0' in metrics


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
async def test_records_may_come_in_any_order_and_no_leader_is_needed(
    rig: Rig, store: Following, order: tuple[int, ...]
) -> None:
    engine = await rig.engine()
    parts = [model(), replica("r1"), secret("r1"), shard("r1", engine.port)]
    await store.put(META)
    routes = await store.start()
    await asyncio.wait_for(routes.known.wait(), 10)
    for n in order:
        assert not store.replicas()
        await store.put(parts[n])
    await rig.until(lambda: bool(rig.hub.names) and store.replicas() == {"r1"})
    assert (await rig.ask()).status == 200


async def test_a_replica_leaves_rotation_by_phase_and_finishes_what_it_has(rig: Rig, store: Following) -> None:
    engine = await rig.engine(Stream(events=sse(*"abcdef"), pause_s=0.05))
    await store.put(META, model(), replica("r1"), secret("r1"), shard("r1", engine.port))
    await store.start()
    await store.routed("r1")
    wire = await rig.connect()
    await wire.send(request(chat(stream=True)))
    await wire.head()
    await store.put(replica("r1", phase=ReplicaPhase.DRAINING))
    await store.routed()
    assert (await rig.ask()).status == 503
    body = b""
    while chunk := await wire.chunk():
        body += chunk
    assert body == b"".join(sse(*"abcdef"))
    await store.put(replica("r1", phase=ReplicaPhase.READY), shard("r1", engine.port, phase=ShardPhase.STOPPING))
    await store.put(model("later"))
    await rig.until(lambda: "later" in (rig.hub.names or {}))
    assert not store.replicas()


async def test_a_new_start_of_the_engine_is_a_new_member(rig: Rig, store: Following) -> None:
    engine = await rig.engine()
    await store.put(META, model(), replica("r1"), secret("r1"), shard("r1", engine.port))
    await store.start()
    await store.routed("r1")
    (before,) = rig.hub.groups["m"].members
    await store.put(shard("r1", engine.port, incarnation="i2"))
    await rig.until(lambda: rig.hub.groups["m"].members[0].route.incarnation == "i2")
    assert before.gone


async def test_aliases_and_fallbacks_follow_the_spec(rig: Rig, store: Following) -> None:
    engine = await rig.engine()
    await store.put(META, model(fallbacks=("spare",)), model("spare"))
    await store.put((Ref(Kind.ALIAS, "a"), Alias(name="a", model="m")))
    await store.put(replica("s1", of="spare"), secret("s1"), shard("s1", engine.port))
    await store.start()
    await store.routed("s1", model="spare")
    assert (await rig.ask(request(chat(model="a")))).status == 200
    await store.put((Ref(Kind.ALIAS, "a"), Alias(name="a", model="spare")))
    await rig.until(lambda: (rig.hub.names or {})["a"].models == ("spare",))
    await store.delete(Ref(Kind.ALIAS, "a"))
    await rig.until(lambda: "a" not in (rig.hub.names or {}))
    assert (await rig.ask(request(chat(model="a")))).status == 404


async def test_a_corrupt_record_drops_no_route(rig: Rig, store: Following, caplog: pytest.LogCaptureFixture) -> None:
    engine = await rig.engine()
    await store.put(META, model(), replica("r1"), secret("r1"), shard("r1", engine.port))
    await store.start()
    await store.routed("r1")
    await store.admin.txn(
        [], [PutOp(key="/llmgw/plan/replicas/r1", value=b"{"), PutOp(key="/llmgw/spec/models/m", value=b"")]
    )
    await store.put(model("later"))
    await rig.until(lambda: "later" in (rig.hub.names or {}))
    assert store.replicas() == {"r1"}
    assert (await rig.ask()).status == 200
    keys_named = [getattr(record, "fields", {}).get("key") for record in caplog.records]
    assert "/llmgw/plan/replicas/r1" in keys_named


async def test_a_store_that_does_not_say_which_one_it_is_is_not_believed(
    rig: Rig, store: Following, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await rig.engine()
    await store.put(META, model(), replica("r1"), secret("r1"), shard("r1", engine.port))
    await store.start()
    await store.routed("r1")
    everything = [Ref(Kind.META), Ref(Kind.MODEL, "m"), Ref(Kind.REPLICA, "r1"), Ref(Kind.SECRET, "r1")]
    await store.delete(*everything, Ref(Kind.SHARD, "n1/r1.0"))
    await rig.until(lambda: "is believed" in caplog.text)
    assert (await rig.ask()).status == 200
    await store.put((Ref(Kind.META), StoreMeta(incarnation="one")), model("other"))
    await rig.until(lambda: "other" in (rig.hub.names or {}))
    assert not store.replicas()


async def test_a_restored_store_takes_no_route_from_a_model_it_has_no_replica_of(rig: Rig, store: Following) -> None:
    engine = await rig.engine()
    await store.put(META, model(), model("n"))
    await store.put(replica("r1"), secret("r1"), shard("r1", engine.port))
    await store.put(replica("q1", of="n"), secret("q1"), shard("q1", engine.port))
    await store.start()
    await store.routed("r1")
    await store.routed("q1", model="n")
    lost = [Ref(Kind.REPLICA, "r1"), Ref(Kind.SECRET, "r1"), Ref(Kind.SHARD, "n1/r1.0"), Ref(Kind.SHARD, "n1/q1.0")]
    await store.admin.txn(
        [],
        [
            *(DeleteOp(key=keys.key(ref)) for ref in lost),
            PutOp(key=keys.key(Ref(Kind.META)), value=codec.encode_stored(StoreMeta(incarnation="two"))),
        ],
    )
    await store.routed(model="n")  # its replica is known there, and is not ready
    assert store.replicas() == {"r1"}
    assert (await rig.ask()).status == 200
    await store.put(replica("r1"))  # adopted: from here on the store knows
    await store.routed()
    await store.put(secret("r1"), shard("r1", engine.port))
    await store.routed("r1")


async def test_with_the_store_gone_it_serves_on_and_says_how_old_its_routes_are(rig: Rig, store: Following) -> None:
    engine = await rig.engine()
    await store.put(META, model(), replica("r1"), secret("r1"), shard("r1", engine.port))
    routes = await store.start()
    await store.routed("r1")
    assert b"x-llmgw-routes-age" not in (await rig.ask()).headers
    store.link.link = Link.REFUSED
    store.cluster.stop()
    first = routes.age_s
    assert first is not None
    await rig.until(lambda: (routes.age_s or 0.0) > first)
    assert (await rig.ask()).status == 200
    metrics = (await rig.ask(request(method="GET", path="/metrics"))).body.decode()
    assert "llmgw_gateway_routes_age_seconds " in metrics


async def test_a_gateway_that_starts_on_unreadable_records_keeps_what_was_saved(
    rig: Rig, store: Following, file: SnapshotFile
) -> None:
    engine = await rig.engine()
    alias = (Ref(Kind.ALIAS, "a"), Alias(name="a", model="m"))
    await store.put(META, model(), alias, replica("r1"), secret("r1"), shard("r1", engine.port))
    await store.start()
    await store.routed("r1")
    await rig.until(lambda: file.path.exists() and b'"r1"' in file.path.read_bytes())
    for kind, name in ((Kind.MODEL, "m"), (Kind.REPLICA, "r1"), (Kind.SECRET, "r1"), (Kind.SHARD, "n1/r1.0")):
        async with AsyncExitStack() as stack:
            fresh = await Rig(stack, rig.config).start()
            stack.push_async_callback(fresh.stop)
            copy = SnapshotFile(file.path.with_name(kind.name))
            shutil.copy(file.path, copy.path)
            later = Following(fresh, copy, store.tasks)
            await later.put(META, model(), alias, replica("r1"), secret("r1"), shard("r1", engine.port))
            await later.admin.txn([], [PutOp(key=keys.key(Ref(kind, name)), value=b"{bad")])
            await later.start()
            await later.routed("r1")
            assert (await fresh.ask()).status == 200
            assert set(fresh.hub.names or {}) == {"m", "a"}
            await later.delete(Ref(kind, name))  # gone is not unreadable
            await fresh.until(lambda: not later.replicas() or "m" not in (fresh.hub.names or {}))  # noqa: B023  # awaited here


async def test_a_gateway_that_starts_without_a_store_serves_from_what_was_saved(
    rig: Rig, store: Following, file: SnapshotFile, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await rig.engine()
    await store.put(META, model(), replica("r1"), secret("r1"), shard("r1", engine.port))
    await store.start()
    await store.routed("r1")
    await rig.until(file.path.exists)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]

    async with AsyncExitStack() as stack:
        fresh = await Rig(stack, rig.config).start()
        stack.push_async_callback(fresh.stop)
        later = Following(fresh, file, store.tasks)
        later.cluster.stop()
        os.utime(file.path, (later.wall_s - 90, later.wall_s - 90))
        routes = await later.start()
        assert (await fresh.ask()).error["code"] == "routes_not_loaded"
        await later.routed("r1")
        assert (await fresh.ask()).status == 200
        assert routes.age_s == 90 > NOTICE_AGE_S
        await fresh.until(lambda: fresh.hub.notice == b"x-llmgw-routes-age: 90\r\n")
        assert (await fresh.ask()).headers[b"x-llmgw-routes-age"] == b"90"
        assert KEY not in caplog.text

        later.cluster.start()
        await later.put(META, model(), replica("r2"), secret("r2"), shard("r2", engine.port))
        await later.routed("r2")
        await fresh.until(lambda: fresh.hub.notice == b"")
        assert (routes.age_s or 0) < NOTICE_AGE_S


async def test_a_damaged_file_is_set_aside_with_a_word(
    rig: Rig, store: Following, file: SnapshotFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    file.path.parent.mkdir()
    for text in (b"", b"{", b'{"incarnation":"one","table":{"names":7}}', b"\xff\xfe"):
        file.path.write_bytes(text)
        assert await asyncio.to_thread(file.load) is None
        assert not file.path.exists()
        assert file.path.with_name(file.path.name + ".bad").read_bytes() == text
        assert "snapshot can't be read" in caplog.text
    assert rig.hub.names is None


async def test_a_file_that_can_not_be_written_costs_nothing_but_a_line(
    rig: Rig, store: Following, file: SnapshotFile, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.write_text("a file where a directory should be")
    engine = await rig.engine(Silent())
    await store.put(META, model(), replica("r1"), secret("r1"), shard("r1", engine.port))
    await store.start()
    await store.routed("r1")
    await rig.until(lambda: "the routes can't be saved" in caplog.text)
