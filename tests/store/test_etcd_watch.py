"""Watching a real cluster through a member with faults: every way in which a watch dies, and what etcd may send."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from llmgw.config import EtcdConfig
from llmgw.errors import NotApplied, OutcomeUnknown, WentBack
from llmgw.store import etcd_wire as wire
from llmgw.store.etcd import EtcdStore, open_etcd
from llmgw.store.port import DeleteOp, Event, PutOp
from llmgw.testing.conformance import events_until, put
from llmgw.testing.etcd import Etcd
from llmgw.testing.etcd_proxy import WATCH, EtcdProxy, etcd_proxy
from llmgw.testing.reader import WAIT_S, reading

pytestmark = [pytest.mark.etcd, pytest.mark.anyio]

ERROR = b'{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader","http_status":"-"}}'


def settings(*urls: str) -> EtcdConfig:
    return EtcdConfig(endpoints=urls, connect_timeout_s=0.5, read_timeout_s=1.5, watch_silence_s=2.0)


@asynccontextmanager
async def client(*urls: str) -> AsyncIterator[EtcdStore]:
    """One that begins with the first of `urls` and waits as little as it may."""
    async with open_etcd(settings(*urls), jitter=lambda: 0.0) as store:
        yield store


@asynccontextmanager
async def faulty(etcd: Etcd) -> AsyncIterator[tuple[EtcdProxy, EtcdStore, EtcdStore]]:
    """The first member behind a proxy; a store that begins there, and one that never goes there."""
    async with (
        etcd_proxy(etcd.endpoints[0]) as proxy,
        client(proxy.url, *etcd.endpoints[1:]) as store,
        client(*etcd.endpoints[1:]) as other,
    ):
        yield proxy, store, other


async def steady(proxy: EtcdProxy) -> None:
    with anyio.fail_after(WAIT_S):
        await proxy.watched()


# --- a watch stream dies without an exception -----------------------------------------------------------------


async def test_a06_a_an_error_object_in_the_stream(lively3: Etcd) -> None:
    async with faulty(lively3) as (proxy, store, other), reading(store, ["/t/"]) as reader:
        await steady(proxy)
        await put(other, "/t/a", b"1")
        await reader.sees("/t/a", b"1")
        await proxy.say(ERROR)
        await put(other, "/t/a", b"2")
        await reader.sees("/t/a", b"2")
        stats = store.stats()
        assert (stats.watch_restarts, stats.rotations) == (1, 1)
        assert stats.endpoint in lively3.endpoints[1:]
        assert reader.causes == ["start"]  # resumed, not listed again


@pytest.mark.parametrize("how", ["ended", "closed"])
async def test_a06_b_a_closed_connection(lively3: Etcd, how: str) -> None:
    async with faulty(lively3) as (proxy, store, other), reading(store, ["/t/"]) as reader:
        await steady(proxy)
        if how == "ended":
            await proxy.end_watches()
        else:
            proxy.close_watches()
        await put(other, "/t/a", b"1")
        await reader.sees("/t/a", b"1")
        assert store.stats().watch_restarts == 1
        assert store.stats().endpoint in lively3.endpoints[1:]


async def test_a06_c_a_frozen_server(lively3: Etcd) -> None:
    async with client(*lively3.endpoints) as store, client(*lively3.endpoints[1:]) as other:
        assert store.stats().watch_progress_age_s is None
        async with reading(store, ["/t/"]) as reader:
            await put(other, "/t/a", b"1")
            await reader.sees("/t/a", b"1")
            lively3.members[0].stop()
            with anyio.fail_after(WAIT_S):
                while store.stats().endpoint == lively3.endpoints[0]:  # noqa: ASYNC110  # nothing tells of it
                    await anyio.sleep(0.05)
            revision = await until_written(other, "/t/a", b"2")
            await reader.sees("/t/a", b"2")
            assert store.stats().watch_restarts >= 1
            age_s = store.stats().watch_progress_age_s
            assert age_s is not None
            assert age_s < settings().watch_silence_s
            assert reader.following.revision >= revision
            assert reader.causes == ["start"]


async def test_a_stream_that_went_silent_while_its_member_answers(lively3: Etcd) -> None:
    async with faulty(lively3) as (proxy, store, other), reading(store, ["/t/"]) as reader:
        with anyio.fail_after(WAIT_S):
            while not store._ledger.progress_seen:  # noqa: ASYNC110  # nothing tells of it
                await anyio.sleep(0.05)
        proxy.on_watch = lambda line: line if b'"created":true' in line else None
        await put(other, "/t/a", b"1")
        await reader.sees("/t/a", b"1")
        assert store.stats().endpoint in lively3.endpoints[1:]


async def test_a_watch_is_opened_elsewhere_when_its_member_is_frozen(lively3: Etcd) -> None:
    async with faulty(lively3) as (proxy, store, other):
        revision = await put(other, "/t/a", b"1")
        proxy.freeze()
        async with store.watch(["/t/"], from_revision=revision) as batches:
            (event,) = await events_until(batches, revision)
        assert event.value == b"1"


async def until_written(store: EtcdStore, key: str, value: bytes) -> int:
    """Put, again if an election got in the way; returns the revision."""
    with anyio.fail_after(WAIT_S):
        while True:
            try:
                return await put(store, key, value)
            except (NotApplied, OutcomeUnknown):
                await anyio.sleep(0.1)


# --- the history is gone --------------------------------------------------------------------------------------


async def test_a02_a_compacted_resume_lists_again(lively3: Etcd) -> None:
    async with (
        etcd_proxy(lively3.endpoints[0]) as proxy,
        client(proxy.url) as store,
        client(*lively3.endpoints) as other,
    ):
        await put(other, "/t/r1")
        async with reading(store, ["/t/"]) as reader:
            await steady(proxy)
            proxy.freeze()
            await other.txn([], [DeleteOp(key="/t/r1")])
            last = await put(other, "/t/r2")
            async with lively3.client() as http:
                answer = await http.post(f"{lively3.endpoints[1]}/v3/kv/compaction", json={"revision": last})
                assert answer.status_code == 200
            proxy.close_watches()
            proxy.thaw()
            await reader.until(lambda known: list(known) == ["/t/r2"])
            assert reader.causes == ["start", "compacted"]
            assert store.stats().resyncs == 1
            await put(other, "/t/r3")  # and it watches on
            await reader.sees("/t/r3", b"v")
            assert reader.causes == ["start", "compacted"]


async def test_a_restored_store_is_noticed(lively3: Etcd, etcd: Etcd) -> None:
    """The member's data is another, younger history: what was seen is no more."""
    async with (
        client(*lively3.endpoints) as old,
        client(*etcd.endpoints) as new,
        etcd_proxy(lively3.endpoints[0]) as proxy,
        client(proxy.url) as store,
    ):
        await put(new, "/t/new")
        behind = (await new.list(["/t/"])).revision
        while (await put(old, "/t/old")) <= behind + 10:
            pass
        async with reading(store, ["/t/"]) as reader:
            await steady(proxy)
            proxy.upstream = etcd.endpoints[0]
            proxy.close_watches()
            await reader.until(lambda known: list(known) == ["/t/new"])
            assert reader.causes == ["start", "went_back"]
            assert store.stats().resyncs == 1


# --- what may come down the stream ----------------------------------------------------------------------------------


async def test_messages_may_be_cut_anywhere(lively3: Etcd) -> None:
    async with faulty(lively3) as (proxy, store, other):
        proxy.cut = 7
        start = await put(other, "/t/0")
        async with store.watch(["/t/"], from_revision=start) as batches:
            last = max([await put(other, f"/t/{n}", b"x" * n) for n in range(1, 40)])
            assert [len(event.value or b"") for event in (await events_until(batches, last))[1:]] == list(range(1, 40))
        assert store.stats().rotations == 0


async def test_repeated_events_are_dropped(lively3: Etcd) -> None:
    async with faulty(lively3) as (proxy, store, other):
        lines: list[bytes] = []

        def record(line: bytes) -> bytes:
            lines.append(line)
            return line

        start = await put(other, "/t/a", b"0")
        proxy.on_watch = record
        async with store.watch(["/t/"], from_revision=start) as batches:
            middle = await put(other, "/t/a", b"1")
            seen = await events_until(batches, middle)
            for line in [line for line in lines if b'"events"' in line]:
                await proxy.say(line)
            seen += await events_until(batches, await put(other, "/t/a", b"2"))
        assert [event.value for event in seen] == [b"0", b"1", b"2"]


def renumbered(line: bytes, **header: int) -> bytes:
    """A line with other numbers in its header."""
    message: dict[str, Any] = json.loads(line)
    if "result" in message:
        message["result"]["header"].update({name: str(number) for name, number in header.items()})
    return json.dumps(message).encode()


async def test_the_header_of_an_event_does_not_say_where_to_go_on(lively3: Etcd) -> None:
    async with faulty(lively3) as (proxy, store, other):
        start = await put(other, "/t/a", b"0")
        far = start + 100_000
        proxy.on_watch = lambda line: renumbered(line, revision=far) if b'"events"' in line else line
        async with store.watch(["/t/"], from_revision=start) as batches:
            seen = await events_until(batches, start)
            proxy.close_watches()
            seen += await events_until(batches, await put(other, "/t/a", b"1"))
        assert [event.value for event in seen] == [b"0", b"1"]


async def test_a_member_with_an_old_raft_term_is_left(lively3: Etcd) -> None:
    async with faulty(lively3) as (proxy, store, other):
        start = await put(other, "/t/a", b"0")
        await store.list(["/t/"])  # from which it knows the term
        proxy.on_watch = lambda line: renumbered(line, raft_term=1)
        async with store.watch(["/t/"], from_revision=start) as batches:
            (event,) = await events_until(batches, start)
        assert event.value == b"0"
        assert store.stats().endpoint in lively3.endpoints[1:]


async def test_a_header_behind_what_was_seen_is_no_reason_to_start_over(lively3: Etcd) -> None:
    async with faulty(lively3) as (proxy, store, other):
        start = await put(other, "/t/a", b"0")
        proxy.on_watch = lambda line: line if b'"events"' in line else renumbered(line, revision=1)
        async with store.watch(["/t/"], from_revision=start) as batches:
            seen = await events_until(batches, start)
            for _ in range(3):
                await anext(batches)  # word of progress, each with the old revision
            seen += await events_until(batches, await put(other, "/t/a", b"1"))
        assert [event.value for event in seen] == [b"0", b"1"]
        assert (store.stats().watch_restarts, store.stats().rotations) == (0, 0)


async def test_prefixes_share_one_stream(lively3: Etcd) -> None:
    async with faulty(lively3) as (proxy, store, other):
        start = await put(other, "/t/start")
        async with store.watch(["/t/a/", "/t/b/", "/t/c"], from_revision=start) as batches:
            for key in ("/t/a/1", "/t/b/1", "/t/c", "/t/a/2"):
                await put(other, key)
            events: list[Event] = []
            with anyio.fail_after(WAIT_S):
                while len(events) < 4:
                    events += (await anext(batches)).events
        assert sorted(event.key for event in events) == ["/t/a/1", "/t/a/2", "/t/b/1", "/t/c"]
        assert [event.key for event in events if "/a/" in event.key] == ["/t/a/1", "/t/a/2"]
        assert proxy.count(WATCH) == 1


async def test_however_many_prefixes_each_is_watched(lively3: Etcd) -> None:
    """Etcd's gateway loses a part of such a request if it begins to answer before it has read it all."""
    async with client(*lively3.endpoints) as store:
        prefixes = [f"/t/some/rather/long/prefix/{n}/" for n in range(30)]
        for n in range(10):
            revision = await put(store, prefixes[-1] + "a", b"%d" % n)
            async with store.watch(prefixes, from_revision=revision) as batches:
                (event,) = await events_until(batches, revision)
            assert event.value == b"%d" % n
        assert store.stats().watch_restarts == 0


async def test_the_end_of_one_watch_disturbs_nobody(lively3: Etcd) -> None:
    async with client(*lively3.endpoints) as store, client(*lively3.endpoints[1:]) as other:
        start = await put(other, "/t/a", b"0")
        async with store.watch(["/t/"], from_revision=start) as kept:
            async with store.watch(["/t/"], from_revision=start) as left:
                await events_until(left, start)
            for n in range(5):
                async with store.watch(["/t/"], from_revision=start) as left:
                    await store.get("/t/a")
                await put(store, "/t/a", b"%d" % n)
            last = await put(other, "/t/a", b"end")
            assert len(await events_until(kept, last)) == 7
        assert (store.stats().errors, store.stats().rotations, store.stats().watch_restarts) == (0, 0, 0)
        assert store.stats().watch_progress_age_s is None


async def test_where_no_progress_is_told_a_frozen_member_is_found_by_asking_it(lively3: Etcd) -> None:
    """An operator may have left etcd's own interval, which is ten minutes."""

    def mute(line: bytes) -> bytes | None:
        return line if b'"events"' in line or b'"created"' in line else None

    async with (
        etcd_proxy(lively3.endpoints[0]) as first,
        etcd_proxy(lively3.endpoints[1]) as second,
        client(first.url, second.url) as store,
        client(*lively3.endpoints) as other,
    ):
        first.on_watch = second.on_watch = mute
        async with reading(store, ["/t/"]) as reader:
            await steady(first)
            with anyio.fail_after(WAIT_S):
                while first.count("/v3" + wire.STATUS) < 4:  # noqa: ASYNC110  # it is asked again and again, and kept
                    await anyio.sleep(0.05)
            assert store.stats().watch_restarts == 0
            first.freeze()
            await put(other, "/t/a", b"1")
            await reader.sees("/t/a", b"1")
            assert store.stats().endpoint == second.url


# --- a prefix without a closing slash -------------------------------------------------------------------------


async def test_a13_a_name_is_not_the_beginning_of_another(etcd: Etcd) -> None:
    async with client(*etcd.endpoints) as store:
        start = await put(store, "/t/node/gpu-1/x")
        for key in ("/t/node/gpu-10/x", "/t/node/gpu-1", "/t/node/gpu-1.x/y"):
            await put(store, key)
        async with store.watch(["/t/node/gpu-1/"], from_revision=start) as batches:
            assert [item.key for item in (await store.list(["/t/node/gpu-1/"])).items] == ["/t/node/gpu-1/x"]
            gone = await store.txn([], [DeleteOp(key="/t/node/gpu-1/", prefix=True)])
            events = await events_until(batches, gone.revision)
        assert [event.key for event in events] == ["/t/node/gpu-1/x"] * 2
        left = [item.key for item in (await store.list(["/t/node/"])).items]
        assert left == ["/t/node/gpu-1", "/t/node/gpu-1.x/y", "/t/node/gpu-10/x"]


async def test_a_foreign_key_does_not_break_a_listing_or_a_watch(etcd: Etcd) -> None:
    async with client(*etcd.endpoints) as store:
        start = await put(store, "/t/a")
        async with etcd.client() as http:
            answer = await http.post(f"{etcd.endpoints[0]}/v3/kv/put", json={"key": "L3Qv/8Op", "value": "eA=="})
            assert answer.status_code == 200
        last = await put(store, "/t/z")
        keys = [item.key for item in (await store.list(["/t/"])).items]
        assert keys == ["/t/\\xff\\xc3\\xa9", "/t/a", "/t/z"]
        async with store.watch(["/t/"], from_revision=start) as batches:
            assert sorted(event.key for event in await events_until(batches, last)) == keys


async def test_a_watch_from_the_future_of_a_store_says_that_it_went_back(etcd: Etcd) -> None:
    async with client(*etcd.endpoints) as store:
        revision = await put(store, "/t/a")
        async with store.watch(["/t/"], from_revision=revision + 1000) as batches:
            with anyio.fail_after(WAIT_S), pytest.raises(WentBack) as told:
                await anext(batches)
        assert told.value.seen == revision + 999
        async with store.watch(["/t/"], from_revision=revision + 1) as batches:
            last = (await store.txn([], [PutOp(key="/t/a", value=b"2")])).revision
            assert [event.mod_revision for event in await events_until(batches, last)] == [last]
