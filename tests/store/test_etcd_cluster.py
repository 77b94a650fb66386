"""A real cluster whose members die, freeze and come back, or are sick for some calls only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import pytest

from llmgw.config import EtcdConfig
from llmgw.core.record import Leader, StoreMeta
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Compacted, NotApplied, OutcomeUnknown, TooLarge, Unavailable
from llmgw.store import codec, keys
from llmgw.store.election import lead
from llmgw.store.etcd import EtcdStore, open_etcd, wait_until_reachable
from llmgw.store.port import DeleteOp, Event, Listing, PutOp, Store, absent
from llmgw.testing.conformance import events_until, put
from llmgw.testing.etcd import Etcd
from llmgw.testing.etcd_proxy import Act, EtcdProxy, etcd_proxy
from llmgw.testing.reader import WAIT_S, reading

pytestmark = [pytest.mark.etcd, pytest.mark.anyio]
BOTH = pytest.mark.parametrize("anyio_backend", ["trio", ("asyncio", {"use_uvloop": True})], ids=["trio", "uvloop"])


@pytest.fixture
def anyio_backend() -> str:
    """Calls run on threads, whatever the loop; what differs between the loops is marked `BOTH`."""
    return "trio"


@asynccontextmanager
async def client(*urls: str, read_timeout_s: float = 1.5) -> AsyncIterator[EtcdStore]:
    """One that begins with the first of `urls`."""
    config = EtcdConfig(endpoints=urls, connect_timeout_s=0.5, read_timeout_s=read_timeout_s, watch_silence_s=2.0)
    async with open_etcd(config, jitter=lambda: 0.0) as store:
        yield store


async def create(store: Store, key: str, value: bytes) -> None:
    """Create `key`, whatever happens to the store, without ever writing it twice."""
    while True:
        try:
            await store.txn([absent(key)], [PutOp(key=key, value=value)])
        except (NotApplied, OutcomeUnknown):
            await anyio.sleep(0.05)
            continue  # the compare makes it safe: if it landed, this time it is refused
        return


# --- members die and freeze -----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_follow_survives_the_loss_of_its_member(lively3: Etcd, how: str) -> None:
    async with (
        client(*lively3.endpoints) as store,
        client(*lively3.endpoints[1:]) as other,
        reading(store, ["/t/"]) as reader,
    ):
        await put(other, "/t/a", b"1")
        await reader.sees("/t/a", b"1")
        if how == "killed":
            lively3.members[0].kill()
        else:
            lively3.members[0].stop()
        with anyio.fail_after(WAIT_S):
            await create(other, "/t/b", b"2")
        await reader.sees("/t/b", b"2")
        assert store.stats().endpoint in lively3.endpoints[1:]
        assert reader.causes == ["start"]


@BOTH
async def test_nothing_is_lost_or_told_twice_while_members_die_and_freeze(lively3: Etcd) -> None:
    """Each member goes in turn under a writer; a watch that outlived it all equals one that saw nothing of it."""
    first, second, third = lively3.members
    async with client(*lively3.endpoints) as store, client(*lively3.endpoints) as writer:
        start = await put(writer, "/t/start")
        seen: list[Event] = []
        written = 0
        async with store.watch(["/t/"], from_revision=start) as batches, anyio.create_task_group() as tasks:

            async def write() -> None:
                nonlocal written
                while True:
                    await create(writer, f"/t/{written}", b"%d" % written)
                    written += 1
                    await anyio.sleep(0.01)

            async def more(count: int) -> None:
                """Return once so many more have arrived."""
                target = written + count
                while not any(event.key == f"/t/{target}" for event in seen[-200:]):
                    seen.extend((await anext(batches)).events)

            tasks.start_soon(write)
            with anyio.fail_after(2 * WAIT_S):
                await more(20)
                first.kill()
                await more(20)
                first.start()
                await lively3.healthy()
                second.stop()
                await more(20)
                second.cont()
                await lively3.healthy()
                third.stop()
                await more(20)
                third.cont()
            tasks.cancel_scope.cancel()
        async with client(*lively3.endpoints) as fresh:
            last = await put(fresh, "/t/end")
            async with fresh.watch(["/t/"], from_revision=start) as batches:
                expected = await events_until(batches, last)
        assert seen == expected[: len(seen)]
        assert len(seen) >= 80
        assert {event.version for event in expected} == {1}
        assert store.stats().watch_restarts >= 1


async def test_writing_goes_on_over_the_death_of_etcds_leader(lively3: Etcd) -> None:
    async with client(*lively3.endpoints) as store:
        leader = await leader_of(lively3)
        async with anyio.create_task_group() as tasks:

            async def write() -> None:
                for n in range(100):
                    await create(store, f"/t/{n}", b"%d" % n)
                    await anyio.sleep(0.01)

            tasks.start_soon(write)
            with anyio.fail_after(WAIT_S):
                while await store.get("/t/20") is None:  # noqa: ASYNC110  # the store is what is looked at
                    await anyio.sleep(0.02)
            lively3.members[leader].kill()
        listing = await store.list(["/t/"])
        assert len(listing.items) == 100
        assert {item.version for item in listing.items} == {1}


async def leader_of(etcd: Etcd) -> int:
    """The position of the member that leads."""
    async with etcd.client() as http:
        for index, url in enumerate(etcd.endpoints):
            answer = (await http.post(f"{url}/v3/maintenance/status", json={})).json()
            if answer["leader"] == answer["header"]["member_id"]:
                return index
    raise AssertionError("etcd has no leader")


async def test_a_write_to_a_frozen_member_has_an_unknown_outcome_within_the_dead_line(lively3: Etcd) -> None:
    async with client(*lively3.endpoints) as store:
        await put(store, "/t/a", b"1")
        lively3.members[0].stop()
        with anyio.fail_after(WAIT_S):
            with pytest.raises(OutcomeUnknown):
                await put(store, "/t/a", b"2")
            await create(store, "/t/b", b"3")  # elsewhere
        assert store.stats().endpoint in lively3.endpoints[1:]


async def test_without_a_majority_calls_fail_and_nothing_hangs(lively3: Etcd) -> None:
    """A member that lost its leader refuses at once, thanks to the header; it is certain that nothing was done."""
    async with client(*lively3.endpoints) as store, reading(store, ["/t/"]) as reader:
        await put(store, "/t/a", b"1")
        await reader.sees("/t/a", b"1")
        for member in lively3.members[1:]:
            member.kill()
        with anyio.fail_after(WAIT_S):
            while True:
                try:
                    await put(store, "/t/a", b"2")
                except NotApplied as error:
                    if "no leader" in str(error):
                        break
                except OutcomeUnknown:
                    pass  # before it has noticed
        with pytest.raises(Unavailable, match="no leader"):
            await store.get("/t/a")
        assert reader.known == {"/t/a": b"1"}  # older, not empty
        for member in lively3.members[1:]:
            member.start()
        with anyio.fail_after(WAIT_S):
            await create(store, "/t/b", b"3")
        await reader.sees("/t/b", b"3")


async def test_a_lease_outlives_an_outage_longer_than_its_ttl(lively3: Etcd) -> None:
    """A new leader gives every lease its full TTL again: expiry may be late, never early."""
    async with client(*lively3.endpoints) as store:
        lease = await store.grant(3)
        await put(store, "/t/a", lease=lease.id)
        down_s = anyio.current_time()
        for member in lively3.members[1:]:
            member.kill()
        while anyio.current_time() < down_s + lease.ttl_s + 1:  # noqa: ASYNC110  # the outage has this length
            await anyio.sleep(0.1)
        for member in lively3.members[1:]:
            member.start()
        with anyio.fail_after(WAIT_S):
            while True:
                try:
                    assert await store.keepalive(lease.id) == lease.ttl_s
                    break
                except Unavailable:
                    await anyio.sleep(0.1)
        found = await store.get("/t/a")
        assert found is not None
        assert found.lease == lease.id


async def test_a_restarted_member_is_gone_to_again(lively3: Etcd) -> None:
    """With one endpoint there is nowhere else to go; dead connections in the pool must not matter."""
    member = lively3.members[0]
    async with client(member.client_url) as store, reading(store, ["/t/"]) as reader:
        async with anyio.create_task_group() as tasks:
            for n in range(8):
                tasks.start_soon(store.get, f"/t/{n}")
        member.kill()
        with pytest.raises(Unavailable, match="Connection refused"):
            await store.get("/t/a")
        member.start()
        with anyio.fail_after(WAIT_S):
            await create(store, "/t/a", b"1")
        await reader.sees("/t/a", b"1")


# --- one sick member, the client stuck to it ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["errors", "blackhole"])
async def test_a07_a_member_that_is_sick_for_leases_only_is_left(lively3: Etcd, how: str) -> None:
    """It accepts connections and answers reads. The leader that leans on it keeps its lease, and its term."""
    ttl_s = 9.0
    unclear = b'{"error":"etcdserver: request timed out","message":"etcdserver: request timed out","code":14}'
    async with (
        etcd_proxy(lively3.endpoints[0]) as sick,
        client(sick.url, *lively3.endpoints[1:], read_timeout_s=1.0) as store,
        client(*lively3.endpoints[1:]) as other,
    ):
        await put(other, keys.key(Ref(Kind.META)), codec.encode_stored(StoreMeta(incarnation="0" * 32)))
        me = Leader(id="c0", address="127.0.0.1:1", version="0", pid=1)
        act, status = (Act.ANSWER, 503) if how == "errors" else (Act.BLACKHOLE, 0)
        async with lead(store, me, ttl_s=ttl_s, keepalive_s=1.0, margin_s=1.5, call_timeout_s=1.5) as term:
            assert store.stats().endpoint == sick.url
            with sick.fault("/v3/lease/", act, status=status, body=unclear) as fault:
                with anyio.fail_after(WAIT_S):
                    await fault.hit.wait()
                renewed_s = term.renewed_mono_s
                with anyio.fail_after(ttl_s / 3):  # the bound of the case
                    while term.renewed_mono_s == renewed_s:  # noqa: ASYNC110  # the record is plain data
                        await anyio.sleep(0.02)
                assert store.stats().endpoint in lively3.endpoints[1:]
                asked = sick.count("/v3/kv/")
                renewed_s = term.renewed_mono_s
                for _ in range(10):  # reads would be answered there, and still go elsewhere
                    await store.get("/t/a")
                with anyio.fail_after(WAIT_S):
                    while term.renewed_mono_s <= renewed_s + 2:  # noqa: ASYNC110  # as above
                        await anyio.sleep(0.02)
                assert sick.count("/v3/kv/") == asked
                assert fault.hits == 1
            held = await other.get(keys.key(Ref(Kind.LEADER)))
            assert held is not None
            assert held.create_revision == term.number


async def test_a07_a_grant_that_gets_no_answer_moves_the_next_one_elsewhere(lively3: Etcd) -> None:
    async with etcd_proxy(lively3.endpoints[0]) as sick, client(sick.url, *lively3.endpoints[1:]) as store:
        with sick.fault("/v3/lease/grant", Act.BLACKHOLE):
            with anyio.fail_after(WAIT_S), pytest.raises(OutcomeUnknown):
                await store.grant(10)
            assert (await store.grant(10)).ttl_s == 10
        assert store.stats().endpoint in lively3.endpoints[1:]


# --- what becomes of a write without an answer ----------------------------------------------------------------------


@asynccontextmanager
async def one_faulty(etcd: Etcd, *, read_timeout_s: float = 1.0) -> AsyncIterator[tuple[EtcdProxy, EtcdStore]]:
    async with etcd_proxy(etcd.endpoints[0]) as proxy, client(proxy.url, read_timeout_s=read_timeout_s) as store:
        yield proxy, store


async def test_a_write_may_land_although_its_answer_is_lost(etcd: Etcd) -> None:
    async with one_faulty(etcd) as (proxy, store):
        with proxy.fault("/v3/kv/txn", Act.LOSE), pytest.raises(OutcomeUnknown):
            await put(store, "/t/a", b"1")
        found = await store.get("/t/a")
        assert found is not None
        assert (found.value, found.version) == (b"1", 1)
        assert proxy.count("/v3/kv/txn") == 1


async def test_a_write_may_land_long_after_it_was_given_up(etcd: Etcd) -> None:
    async with one_faulty(etcd) as (proxy, store):
        with proxy.fault("/v3/kv/txn", Act.HOLD, times=1) as held:
            with pytest.raises(OutcomeUnknown):
                await put(store, "/t/a", b"late")
            assert await store.get("/t/a") is None
            await put(store, "/t/a", b"newer")
            held.release()
            with anyio.fail_after(WAIT_S):
                await held.delivered.wait()
            found = await store.get("/t/a")
            assert found is not None
            assert found.value == b"late"  # which is why every write of consequence carries a compare


@BOTH
async def test_a_cancelled_write_is_waited_for(etcd: Etcd) -> None:
    """Left behind, its thread might still send it when somebody else has taken over."""
    async with one_faulty(etcd) as (proxy, store):
        with proxy.fault("/v3/kv/txn", Act.BLACKHOLE) as fault:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put, store, "/t/a")
                with anyio.fail_after(WAIT_S):
                    await fault.hit.wait()
                tasks.cancel_scope.cancel()
            assert all(limiter.borrowed_tokens == 0 for limiter in store._caller.transport._threads.values())  # type: ignore[attr-defined]  # the real one has threads


@BOTH
async def test_a_cancelled_read_is_not_waited_for(etcd: Etcd) -> None:
    async with one_faulty(etcd, read_timeout_s=3600.0) as (proxy, store):
        with proxy.fault("/v3/kv/range", Act.BLACKHOLE) as fault, anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(store.get, "/t/a")
                await fault.hit.wait()
                tasks.cancel_scope.cancel()


async def test_a_slow_call_does_not_hold_up_a_keepalive(etcd: Etcd) -> None:
    """Every thread for calls hangs; keepalives have their own, and their own connection."""
    async with one_faulty(etcd, read_timeout_s=3600.0) as (proxy, store):
        lease = await store.grant(60)
        with proxy.fault("/v3/kv/", Act.BLACKHOLE):
            async with anyio.create_task_group() as tasks:
                for _ in range(50):
                    tasks.start_soon(store.get, "/t/a")
                with anyio.fail_after(WAIT_S):
                    while proxy.count("/v3/kv/") < 16:  # noqa: ASYNC110  # all the threads there are
                        await anyio.sleep(0.02)
                    assert await store.keepalive(lease.id) == 60
                tasks.cancel_scope.cancel()


async def test_an_answer_that_comes_byte_by_byte_has_a_dead_line_too() -> None:
    """Time-outs of a socket hold for each read; a server that drips would be waited for without end."""
    dripping = anyio.Event()

    async def drip(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            dripping.set()
            while True:
                await stream.send(b" ")
                await anyio.sleep(0.05)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610  # a socket's attribute, no SQL
    async with (
        listener,
        client(f"http://127.0.0.1:{port}", read_timeout_s=0.5) as store,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, drip)
        with anyio.fail_after(WAIT_S):
            with pytest.raises(OutcomeUnknown, match="no whole answer"):
                await put(store, "/t/a")
            with pytest.raises(Unavailable):
                await store.get("/t/a")
        assert dripping.is_set()
        tasks.cancel_scope.cancel()


# --- a listing in pages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["written", "compacted"])
async def test_a_listing_of_many_pages_is_of_one_revision(etcd: Etcd, then: str) -> None:
    async with one_faulty(etcd, read_timeout_s=WAIT_S) as (proxy, store), client(*etcd.endpoints) as other:
        keys_ = [f"/t/{n:05}" for n in range(1500)]
        revision = 0
        for first in range(0, len(keys_), 100):
            put_all = [PutOp(key=key, value=b"old") for key in keys_[first : first + 100]]
            revision = (await other.txn([], put_all)).revision
        listings: list[Listing | Compacted] = []

        async def list_all() -> None:
            try:
                listings.append(await store.list(["/t/"]))
            except Compacted as error:
                listings.append(error)

        async with anyio.create_task_group() as tasks:
            with (
                anyio.fail_after(WAIT_S),
                proxy.fault("/v3/kv/range", Act.HOLD, times=1) as page1,
                proxy.fault("/v3/kv/range", Act.HOLD, times=1) as page2,
            ):
                tasks.start_soon(list_all)
                page1.release()
                await page2.hit.wait()
                await put(other, keys_[-1], b"new")
                last = (await other.txn([], [DeleteOp(key=keys_[-2])])).revision
                if then == "compacted":
                    async with etcd.client() as http:
                        await http.post(f"{etcd.endpoints[0]}/v3/kv/compaction", json={"revision": last})
                page2.release()
        (found,) = listings
        if then == "compacted":
            assert isinstance(found, Compacted)
        else:
            assert isinstance(found, Listing)
            assert found.revision == revision
            assert [item.key for item in found.items] == keys_
            assert {item.value for item in found.items} == {b"old"}


# --- too big for one transaction ------------------------------------------------------------------------------


async def test_a12_what_never_fits_is_refused_before_it_is_sent(etcd: Etcd) -> None:
    async with one_faulty(etcd) as (proxy, store):
        for ops, size, limit, unit in (
            ([PutOp(key=f"/t/{n}", value=b"") for n in range(129)], 129, 128, "operations"),
            ([PutOp(key="/t/a", value=b"x" * 3 * 2**20)], 3 * 2**20 + 52, 1_500_000, "bytes"),
        ):
            with pytest.raises(TooLarge) as told:
                await store.txn([], ops)
            assert (told.value.size, told.value.limit, told.value.unit) == (size, limit, unit)
        assert proxy.requests == []


async def test_a12_an_etcd_with_a_lower_limit_is_named(etcd: Etcd) -> None:
    async with one_faulty(etcd) as (proxy, store):
        refusal = b'{"error":"etcdserver: request is too large","message":"etcdserver: request is too large","code":3}'
        with proxy.fault("/v3/kv/txn", Act.ANSWER, status=400, body=refusal), pytest.raises(TooLarge, match="max-req"):
            await put(store, "/t/a")
        assert proxy.count("/v3/kv/txn") == 1


# --- starting without etcd ------------------------------------------------------------------------------------------


async def test_a_missing_etcd_is_waited_for_with_a_line_that_says_why(lively3: Etcd) -> None:
    member = lively3.members[0]
    for other in lively3.members:
        other.kill()
    lines: list[str] = []
    async with client(member.client_url, "http://127.0.0.1:1") as store, anyio.create_task_group() as tasks:
        reached = anyio.Event()

        async def wait() -> None:
            await wait_until_reachable(store, lines.append, every_s=0.1)
            reached.set()

        tasks.start_soon(wait)
        with anyio.fail_after(WAIT_S):
            while len(lines) < 2:  # noqa: ASYNC110  # a list of lines tells nobody
                await anyio.sleep(0.02)
            for other in lively3.members:
                other.start()
            await reached.wait()
    for line in lines:
        assert "\n" not in line
        assert "http://127.0.0.1:1: Connection refused" in line
    assert f"{member.client_url}: Connection refused" in lines[0]
