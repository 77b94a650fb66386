"""What a watch makes of its stream, on scripted members under virtual time: silence, refusals, going back."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from llmgw.core.ids import Secret
from llmgw.errors import Compacted, Denied, StoreError, WentBack
from llmgw.store import etcd_wire as wire
from llmgw.store.etcd_call import Broken, Caller, Lane, Login, Members, Reply, Stream
from llmgw.store.etcd_watch import BUFFER_BATCHES, Ledger, Watch
from llmgw.store.port import Batch
from llmgw.testing.virtual import run_virtual

URLS = ("http://a:1", "http://b:1", "http://c:1")
SILENCE_S = 6.0
CREATED: dict[str, Any] = {"created": True}


class FakeStream:
    """One open watch: the test says lines into it, the client hears them."""

    def __init__(self, member: str, body: bytes, token: str | None, opened_s: float) -> None:
        self.member, self.token, self.opened_s = member, token, opened_s
        parts = body.replace(b"}}{", b"}}\n{").split(b"\n")
        self.asked = [json.loads(part)["create_request"] for part in parts]
        self.starts = [part["start_revision"] for part in self.asked]
        self.status = 200
        self.closed = False
        self._say, self._hear = anyio.create_memory_object_stream[bytes](10_000)

    def say(self, watch: int = 1, *, revision: int, term: int = 2, mods: Sequence[int] = (), **more: Any) -> None:
        """One message; `mods` are the revisions of its events, each a put of the key /p/<revision>."""
        events = [{"kv": {"key": "L3Av", "mod_revision": str(mod)}} for mod in mods]
        header = {"revision": str(revision), "raft_term": str(term)}
        self.raw({"result": {"header": header, "watch_id": str(watch), "events": events, **more}})

    def raw(self, message: Any) -> None:
        self._say.send_nowait(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        self._say.close()

    async def receive(self) -> bytes:
        return await anext(self._hear, b"")

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self._hear])

    def close(self) -> None:
        self.closed = True
        self._say.close()
        self._hear.close()


class Cluster:
    """A transport. `open_`: what is done with a new stream, after its watches were made (unless `mute`)."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.open_: Callable[[FakeStream], None] = lambda stream: None
        self.hangs: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self.logins = 0
        self.leader = 1
        self.denies = self.mute = False
        self.revision, self.term = 100, 2
        self._changed = anyio.Event()

    async def call(
        self,
        member: str,
        path: str,
        body: bytes,
        *,
        token: Secret | None,
        lane: Lane,
        connect_s: float,
        read_s: float,
        leave: bool,
    ) -> Reply:
        self.calls.append((member, path))
        if member in self.hangs:
            await anyio.sleep(read_s)
            raise Broken("no answer", sent=True)
        await anyio.sleep(0.001)
        if path == wire.RANGE and self.denies:
            return Reply(status=403, body=b'{"code":7,"message":"etcdserver: permission denied"}')
        answer: dict[str, Any] = {"header": {"revision": self.revision, "raft_term": self.term}}
        if path == wire.AUTHENTICATE:
            self.logins += 1
            answer["token"] = f"t{self.logins}"
        if path == wire.STATUS and self.leader:
            answer["leader"] = self.leader
        return Reply(status=200, body=json.dumps(answer).encode())

    @asynccontextmanager
    async def stream(self, member: str, path: str, body: bytes, *, token: Secret | None) -> AsyncIterator[Stream]:
        if member in self.hangs:
            await anyio.sleep_forever()
        await anyio.sleep(0.001)
        made = FakeStream(member, body, None if token is None else token.reveal(), anyio.current_time())
        self.streams.append(made)
        for part in [] if self.mute else made.asked:
            made.say(part["watch_id"], revision=self.revision, term=self.term, **CREATED)
        self.open_(made)
        self._changed.set()
        self._changed = anyio.Event()
        try:
            yield made
        finally:
            made.close()

    async def opened(self, count: int) -> FakeStream:
        """The stream of that number, once it is there."""
        with anyio.fail_after(600):
            while len(self.streams) < count:
                await self._changed.wait()
        return self.streams[count - 1]


async def password() -> Secret:
    return Secret("pass")


class Rig:
    def __init__(self, *prefixes: str, from_revision: int = 10, user: str | None = None) -> None:
        self.cluster, self.ledger = Cluster(), Ledger()
        login = None if user is None else Login(user=user, password=password)
        self.caller = Caller(
            self.cluster, Members(URLS, first=0), login=login, connect_s=1.0, read_s=2.0, jitter=lambda: 0.0
        )
        self.watch = Watch(self.caller, prefixes or ("/p/",), from_revision, silence_s=SILENCE_S, ledger=self.ledger)


async def take(batches: AsyncIterator[Batch], count: int) -> list[int]:
    """The revisions of the next `count` events."""
    found: list[int] = []
    with anyio.fail_after(600):
        while len(found) < count:
            found += [event.mod_revision for event in (await anext(batches)).events]
    return found


async def end(batches: AsyncIterator[Batch]) -> StoreError:
    """The error that ends the watch."""
    with anyio.fail_after(600):
        try:
            async for _ in batches:
                pass
        except StoreError as error:
            return error
    raise AssertionError("the watch ended by itself")


# --- where it goes on -----------------------------------------------------------------------------------------------


def test_it_goes_on_behind_the_last_event_and_not_at_the_header_of_an_event() -> None:
    """A replay's header runs ahead of its events: 391427 was seen with a last event at 386826."""

    async def main() -> None:
        rig = Rig()
        async with rig.watch as batches:
            first = await rig.cluster.opened(1)
            first.say(revision=90, **CREATED)
            first.say(revision=90, mods=[11, 12])
            assert await take(batches, 2) == [11, 12]
            first.end()
            second = await rig.cluster.opened(2)
            assert (first.starts, second.starts) == ([10], [13])
            assert (first.member, second.member) == (URLS[0], URLS[1])
            second.say(revision=90, mods=[13])
            assert await take(batches, 1) == [13]

    run_virtual(main)


def test_word_of_progress_moves_it_on_so_that_a_compaction_does_not_catch_up() -> None:
    async def main() -> None:
        rig = Rig("/p/", "/q/")
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            stream.say(1, revision=50)
            assert await anext(batches) == Batch(revision=9)  # of /q/ nothing is known yet
            stream.say(2, revision=40)
            assert await anext(batches) == Batch(revision=40)
            stream.say(2, revision=60, mods=[55])
            assert (await anext(batches)).revision == 55
            stream.end()
            assert (await rig.cluster.opened(2)).starts == [51, 56]

    run_virtual(main)


def test_progress_behind_what_was_seen_takes_nothing_back() -> None:
    async def main() -> None:
        rig = Rig(from_revision=50)
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            stream.say(revision=30)
            assert await anext(batches) == Batch(revision=49)
            stream.end()
            assert (await rig.cluster.opened(2)).starts == [50]

    run_virtual(main)


def test_events_that_come_twice_are_told_once() -> None:
    """Etcd before 3.4.24 and 3.5.8 repeats some; a watch that goes back in time after a snapshot looks the same."""

    async def main() -> None:
        rig = Rig()
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            for mods in ([11, 12], [11, 12], [12], [9], [12, 13]):
                stream.say(revision=90, mods=mods)
            assert await take(batches, 3) == [11, 12, 13]

    run_virtual(main)


def test_prefixes_go_on_each_from_its_own_place() -> None:
    async def main() -> None:
        rig = Rig("/p/", "/q/", "/r")
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            stream.say(2, revision=90, mods=[20])
            await take(batches, 1)
            stream.end()
            assert (await rig.cluster.opened(2)).starts == [10, 21, 10]
            assert len({part["watch_id"] for part in stream.asked}) == 3

    run_virtual(main)


# --- is it alive ----------------------------------------------------------------------------------------------------


def test_silence_is_death_once_progress_was_seen_though_the_member_answers() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            await anyio.sleep(1)
            stream.say(revision=20)
            await anext(batches)
            heard_s = rig.watch.heard_s
            second = await rig.cluster.opened(2)
            assert heard_s + SILENCE_S <= second.opened_s <= heard_s + SILENCE_S + 1  # virtual
            assert second.member == URLS[1]
            assert rig.ledger.restarts == 1
            assert stream.closed

    run_virtual(main)


def test_without_progress_a_quiet_member_that_has_a_leader_is_kept() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            stream.say(revision=20, **CREATED)
            await anyio.sleep(3600)
            assert len(rig.cluster.streams) == 1
            assert {member for member, path in rig.cluster.calls if path == wire.STATUS} == {URLS[0]}
            stream.say(revision=20, mods=[15])
            assert await take(batches, 1) == [15]

    run_virtual(main)


@pytest.mark.parametrize("how", ["frozen", "no leader"])
def test_without_progress_a_member_that_does_not_answer_well_is_left(how: str) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.watch:
            stream = await rig.cluster.opened(1)
            stream.say(revision=20, **CREATED)
            await anyio.sleep(100)
            sick_s = anyio.current_time()
            if how == "frozen":
                rig.cluster.hangs.add(URLS[0])
            else:
                rig.cluster.leader = 0
            second = await rig.cluster.opened(2)
            assert second.member == URLS[1]
            assert second.opened_s - sick_s <= SILENCE_S + 2  # virtual

    run_virtual(main)


def test_a_member_that_does_not_even_open_the_watch_is_left() -> None:
    async def main() -> None:
        rig = Rig()
        rig.cluster.hangs.add(URLS[0])
        async with rig.watch:
            assert (await rig.cluster.opened(1)).member == URLS[1]
            assert anyio.current_time() <= 4  # connect and read time-out; virtual

    run_virtual(main)


def test_a_stream_that_lacks_a_watch_is_replaced() -> None:
    """Etcd's gateway may lose a part of the request; progress of the others would hide it for ever."""

    async def main() -> None:
        rig = Rig("/p/", "/q/", "/r/")
        rig.cluster.mute = True
        async with rig.watch as batches:
            first = await rig.cluster.opened(1)
            rig.cluster.mute = False
            for watch in (1, 3):
                first.say(watch, revision=20, **CREATED)
            for _ in range(2):
                await anyio.sleep(1)
                first.say(1, revision=20)
                await anext(batches)
            second = await rig.cluster.opened(2)
            assert second.opened_s - first.opened_s < SILENCE_S  # connect and read time-out, and a look; virtual
            second.say(2, revision=20, mods=[15])
            assert await take(batches, 1) == [15]
            await anyio.sleep(2 * SILENCE_S / 3)
            assert len(rig.cluster.streams) == 2

    run_virtual(main)


def test_a_slow_reader_is_no_silence_and_fills_no_memory() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            stream.say(revision=20)
            await anext(batches)
            count = 3 * BUFFER_BATCHES
            for mod in range(21, 21 + count):
                stream.say(revision=mod, mods=[mod])
            await anyio.sleep(10 * SILENCE_S)
            assert rig.watch._receive.statistics().current_buffer_used == BUFFER_BATCHES
            assert await take(batches, count) == list(range(21, 21 + count))
            assert (len(rig.cluster.streams), rig.ledger.restarts) == (1, 0)

    run_virtual(main)


def test_reconnecting_slows_down_and_recovers() -> None:
    async def main() -> None:
        rig = Rig()
        rig.cluster.open_ = lambda stream: stream.end()
        async with rig.watch as batches:
            await rig.cluster.opened(20)
            times = [stream.opened_s for stream in rig.cluster.streams]
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            assert gaps[0] < 0.1
            assert sorted(gaps) == pytest.approx(gaps, abs=0.01)
            assert 0.9 < gaps[-1] < 1.1  # 2 s, times 0.5 by lot
            rig.cluster.open_ = lambda stream: stream.say(revision=20, mods=[11])
            await take(batches, 1)
            good = rig.cluster.streams[-1]
            good.end()
            following = await rig.cluster.opened(len(rig.cluster.streams) + 1)
            assert following.opened_s - good.opened_s < 0.5

    run_virtual(main)


def test_an_outage_may_last_long() -> None:
    async def main() -> None:
        rig = Rig()
        rig.cluster.open_ = lambda stream: stream.end()
        async with rig.watch as batches:
            await anyio.sleep(1500)
            assert rig.ledger.restarts > 1100  # a power of two with more digits is no float any more
            rig.cluster.open_ = lambda stream: stream.say(revision=20, mods=[11])
            assert await take(batches, 1) == [11]

    run_virtual(main)


# --- what a member may say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        {"error": {"grpc_code": 14, "http_code": 503, "message": "etcdserver: no leader"}},
        {"error": {"code": 14, "message": "etcdserver: no leader"}},
        {"result": {"header": {}, "watch_id": "1", "canceled": True, "cancel_reason": "etcdserver: mvcc: watcher"}},
        {"result": {"header": {}, "watch_id": "7", "events": []}},
        {"something": "else"},
        ["no", "object"],
    ],
)
def test_whatever_ends_a_stream_leads_to_another(message: Any) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.watch as batches:
            (await rig.cluster.opened(1)).raw(message)
            second = await rig.cluster.opened(2)
            second.say(revision=20, mods=[15])
            assert await take(batches, 1) == [15]

    run_virtual(main)


def test_compaction_ends_it_although_the_stream_stays_open() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            stream.say(revision=90, **CREATED)
            stream.say(revision=90, mods=[11])
            stream.say(revision=90, canceled=True, compact_revision="80")
            assert await take(batches, 1) == [11]  # what came before is not lost
            error = await end(batches)
            assert isinstance(error, Compacted)
            assert error.revision == 80
            assert rig.ledger.resyncs == 1

    run_virtual(main)


LOST_LOGIN = "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token"
DENIED = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"


def test_a_denied_watch_says_so_although_it_was_created() -> None:
    async def main() -> None:
        rig = Rig("/p/", "/q/")
        rig.cluster.denies = rig.cluster.mute = True
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            stream.say(-1, revision=90, created=True, canceled=True, cancel_reason=DENIED)
            error = await end(batches)
            assert isinstance(error, Denied)
            assert "/p/, /q/" in str(error)
            assert len(rig.cluster.streams) == 1

    run_virtual(main)


def test_a_watch_is_called_denied_where_only_the_login_was_lost() -> None:
    """So does etcd 3.5.1. A read of the same keys tells the difference."""

    async def main() -> None:
        rig = Rig(user="u")
        async with rig.watch as batches:
            (await rig.cluster.opened(1)).say(-1, revision=90, created=True, canceled=True, cancel_reason=DENIED)
            second = await rig.cluster.opened(2)
            second.say(revision=90, **CREATED)
            second.say(revision=90, mods=[11])
            assert await take(batches, 1) == [11]

    run_virtual(main)


@pytest.mark.parametrize("reason", ["denied", "login"])
def test_a_watch_that_stays_refused_is_denied_though_another_prefix_is_fine(reason: str) -> None:
    async def main() -> None:
        def refuse(stream: FakeStream) -> None:
            stream.say(revision=90, **CREATED)
            stream.say(-1, revision=90, canceled=True, cancel_reason=DENIED if reason == "denied" else LOST_LOGIN)

        rig = Rig("/p/", "/q/", user="u")
        rig.cluster.mute = True
        rig.cluster.open_ = refuse
        async with rig.watch as batches:
            assert isinstance(await end(batches), Denied)
            assert len(rig.cluster.streams) == 2

    run_virtual(main)


def test_a_watch_whose_login_is_lost_logs_in_once_and_goes_on() -> None:
    async def main() -> None:
        rig = Rig(user="u")
        async with rig.watch as batches:
            first = await rig.cluster.opened(1)
            assert first.token == "t1"
            first.say(-1, revision=90, created=True, canceled=True, cancel_reason=LOST_LOGIN)
            second = await rig.cluster.opened(2)
            assert second.token == "t2"
            assert rig.ledger.restarts == 0
            second.say(revision=90, **CREATED)
            second.say(revision=90, mods=[11])
            assert await take(batches, 1) == [11]
            second.say(-1, revision=90, canceled=True, cancel_reason=LOST_LOGIN)  # much later, once more
            assert (await rig.cluster.opened(3)).token == "t3"

    run_virtual(main)


def test_a_watch_does_not_log_in_for_ever() -> None:
    async def main() -> None:
        rig = Rig(user="u")
        rig.cluster.mute = True
        rig.cluster.open_ = lambda stream: stream.say(
            -1, revision=90, created=True, canceled=True, cancel_reason=LOST_LOGIN
        )
        async with rig.watch as batches:
            assert isinstance(await end(batches), Denied)
            assert rig.cluster.logins == 2

    run_virtual(main)


def test_a_watch_refused_by_status_is_judged_by_its_body() -> None:
    async def main() -> None:
        def refuse(stream: FakeStream) -> None:
            stream.status = 401
            stream.raw({"code": 16, "message": "etcdserver: invalid auth token"})
            stream.end()

        rig = Rig(user="u")
        rig.cluster.open_ = refuse
        async with rig.watch as batches:
            assert isinstance(await end(batches), Denied)
            assert [stream.token for stream in rig.cluster.streams] == ["t1", "t2"]

    run_virtual(main)


# --- going back -----------------------------------------------------------------------------------------------------


def test_a_member_that_lags_is_kept() -> None:
    """The header of a follower's watch may lie behind what was seen elsewhere; only a linearizable read can judge."""

    async def main() -> None:
        rig = Rig(from_revision=90)
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            stream.say(revision=70, **CREATED)
            stream.say(revision=95, mods=[92])
            assert await take(batches, 1) == [92]
            assert (len(rig.cluster.streams), rig.ledger.restarts) == (1, 0)
            assert wire.RANGE in [path for _, path in rig.cluster.calls]

    run_virtual(main)


def test_a_store_that_went_back_is_told() -> None:
    async def main() -> None:
        rig = Rig(from_revision=201)
        async with rig.watch as batches:
            (await rig.cluster.opened(1)).say(revision=100, **CREATED)
            error = await end(batches)
            assert isinstance(error, WentBack)
            assert (error.seen, error.got, error.what) == (200, 100, "revision")
            assert rig.ledger.resyncs == 1

    run_virtual(main)


def test_a_member_with_an_old_raft_term_is_left() -> None:
    async def main() -> None:
        rig = Rig()
        rig.caller.raft_term = rig.cluster.term = 5
        async with rig.watch as batches:
            (await rig.cluster.opened(1)).say(revision=100, term=4, **CREATED)
            second = await rig.cluster.opened(2)
            assert second.member == URLS[1]
            second.say(revision=100, term=5, mods=[11])
            assert await take(batches, 1) == [11]

    run_virtual(main)


def test_a_raft_term_that_went_back_everywhere_is_told_once() -> None:
    async def main() -> None:
        rig = Rig()
        rig.caller.raft_term, rig.cluster.term = 5, 3
        async with rig.watch as batches:
            (await rig.cluster.opened(1)).say(revision=100, term=3, **CREATED)
            error = await end(batches)
            assert isinstance(error, WentBack)
            assert (error.seen, error.got, error.what) == (5, 3, "raft term")
        assert rig.caller.raft_term == 3  # from here on that is the highest

    run_virtual(main)


# --- leaving it -----------------------------------------------------------------------------------------------------


def test_the_readers_own_error_passes_as_it_is() -> None:
    async def main() -> None:
        rig = Rig()

        async def read() -> None:
            async with rig.watch:
                await rig.cluster.opened(1)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await read()
        assert rig.cluster.streams[0].closed
        assert rig.ledger.open == set()

    run_virtual(main)


def test_an_ended_watch_stays_ended() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.watch as batches:
            (await rig.cluster.opened(1)).say(revision=90, canceled=True, compact_revision="80")
            assert await end(batches) is await end(batches)

    run_virtual(main)


def test_a_reader_that_gives_up_waiting_loses_nothing() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.watch as batches:
            stream = await rig.cluster.opened(1)
            for mod in (11, 12):
                with anyio.move_on_after(1):
                    await anext(batches)
                stream.say(revision=90, mods=[mod])
                assert await take(batches, 1) == [mod]
            assert len(rig.cluster.streams) == 1

    run_virtual(main)
