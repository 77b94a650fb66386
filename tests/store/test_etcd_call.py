"""How a call to etcd is carried through, on a scripted transport under virtual time: every answer a member can give."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import anyio
import msgspec
import pytest

from llmgw.core.ids import Secret
from llmgw.errors import Denied, NotApplied, OutcomeUnknown, Unavailable
from llmgw.store import etcd_wire as wire
from llmgw.store.etcd_call import AVOID_S, Broken, Caller, Lane, Login, Members, Reply, Stream
from llmgw.testing.virtual import run_virtual

URLS = ("http://a:1", "http://b:1", "http://c:1")
GOOD = b'{"header":{"revision":"7","raft_term":"2"}}'
TOKEN = b'{"header":{},"token":"t%d"}'
LOST_LOGIN = b'{"error":"etcdserver: invalid auth token","message":"etcdserver: invalid auth token","code":16}'

Answer = Reply | Broken | float
"""A reply, a failure, or so many seconds of nothing."""


def refusal(message: str, code: int, status: int = 503) -> Reply:
    return Reply(status=status, body=msgspec.json.encode({"error": message, "message": message, "code": code}))


NO_LEADER = refusal("etcdserver: no leader", 14)
TIMED_OUT = refusal("etcdserver: request timed out", 14)
BUSY = refusal("etcdserver: too many requests", 8, 429)
REFUSED = Broken("Connection refused", sent=False)
RESET = Broken("Connection reset by peer", sent=True)
EMPTY = Broken("Remote end closed connection without response", sent=True, empty=True)
OK = Reply(status=200, body=GOOD)


class Script:
    """A transport whose members answer as the test says; it remembers who was asked for what, and as whom."""

    def __init__(self, answers: Callable[[str, str], Answer]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str]] = []
        self.tokens: list[str | None] = []
        self.lanes: list[Lane] = []
        self.logins = 0

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
        self.asked.append((member, path))
        self.lanes.append(lane)
        self.tokens.append(None if token is None else token.reveal())
        await anyio.sleep(0.001)
        answer = self.answers(member, path)
        if isinstance(answer, float):
            if answer > read_s:
                await anyio.sleep(read_s)
                raise Broken("no answer", sent=True)
            await anyio.sleep(answer)
            return OK
        if isinstance(answer, Broken):
            raise answer
        return answer

    def stream(
        self, member: str, path: str, body: bytes, *, token: Secret | None
    ) -> AbstractAsyncContextManager[Stream]:
        raise NotImplementedError

    def count(self, path: str) -> int:
        return sum(1 for _, asked in self.asked if asked == path)


async def password() -> Secret:
    return Secret("pass")


def caller(script: Script, *, user: str | None = None, urls: tuple[str, ...] = URLS) -> Caller:
    login = None if user is None else Login(user=user, password=password)
    return Caller(script, Members(urls, first=0), login=login, connect_s=1.0, read_s=2.0, jitter=lambda: 0.0)


async def read(made: Caller) -> int:
    return (await made.call(wire.RANGE, b"{}", wire.RANGE_REPLY, again=True)).header.revision


async def write(made: Caller) -> int:
    return (await made.call(wire.TXN, b"{}", wire.TXN_REPLY, again=False)).header.revision


Do = Callable[[Caller], Awaitable[int]]


def by_member(answers: dict[str, Answer]) -> Callable[[str, str], Answer]:
    return lambda member, _: answers.get(member, OK)


@pytest.mark.parametrize("failure", [REFUSED, NO_LEADER, BUSY])
@pytest.mark.parametrize("do", [read, write])
def test_what_was_certainly_not_done_is_asked_elsewhere(failure: Answer, do: Do) -> None:
    async def main() -> None:
        script = Script(by_member({URLS[0]: failure, URLS[1]: failure}))
        assert await do(caller(script)) == 7
        assert [member for member, _ in script.asked] == list(URLS)

    run_virtual(main)


@pytest.mark.parametrize("failure", [RESET, EMPTY, TIMED_OUT, math.inf, refusal("etcdserver: leader changed", 14)])
def test_a_write_without_an_answer_is_never_repeated(failure: Answer) -> None:
    async def main() -> None:
        script = Script(by_member({URLS[0]: failure}))
        made = caller(script)
        with pytest.raises(OutcomeUnknown) as told:
            await write(made)
        assert script.asked == [(URLS[0], wire.TXN)]
        assert URLS[0] in str(told.value)
        assert await write(made) == 7  # and the next goes elsewhere
        assert script.asked[-1] == (URLS[1], wire.TXN)

    run_virtual(main)


@pytest.mark.parametrize("failure", [RESET, EMPTY, TIMED_OUT, math.inf, Reply(status=200, body=b"<html>")])
def test_a_read_without_an_answer_is_repeated_elsewhere_in_the_same_call(failure: Answer) -> None:
    async def main() -> None:
        script = Script(by_member({URLS[0]: failure}))
        assert await read(caller(script)) == 7
        assert [member for member, _ in script.asked] == [URLS[0], URLS[1]]

    run_virtual(main)


@pytest.mark.parametrize("failure", [REFUSED, NO_LEADER, math.inf])
@pytest.mark.parametrize(("do", "error"), [(read, Unavailable), (write, NotApplied)])
def test_a_call_ends_at_its_dead_line_and_names_every_member(failure: Answer, do: Do, error: type[Unavailable]) -> None:
    async def main() -> None:
        script = Script(by_member(dict.fromkeys(URLS, failure)))
        made = caller(script)
        start = anyio.current_time()
        expected = OutcomeUnknown if failure is math.inf and do is write else error
        with pytest.raises(expected) as told:
            await do(made)
        assert anyio.current_time() - start <= 3.3  # connect and read time-out, and a last pause; the clock is virtual
        if expected is not OutcomeUnknown:
            assert all(url in str(told.value) for url in URLS)
        assert made.errors == 1
        assert len(script.asked) < 100  # refusals at once are no hot loop

    run_virtual(main)


def test_an_election_is_waited_out_within_a_call() -> None:
    async def main() -> None:
        start = anyio.current_time()
        script = Script(lambda *_: OK if anyio.current_time() - start > 1.5 else NO_LEADER)
        assert await write(caller(script)) == 7

    run_virtual(main)


def test_a_member_that_failed_is_left_alone_for_a_while() -> None:
    async def main() -> None:
        sick = {URLS[0]: math.inf}
        script = Script(by_member(dict(sick)))
        made = caller(script, urls=URLS[:2])
        await read(made)
        script.asked.clear()
        end = anyio.current_time() + AVOID_S - 1
        while anyio.current_time() < end:
            await read(made)
            await anyio.sleep(1)
        assert {member for member, _ in script.asked} == {URLS[1]}
        # It stays where it is afterwards, too; only a failure moves it.
        await anyio.sleep(AVOID_S)
        script.answers = by_member({URLS[1]: NO_LEADER})
        await read(made)
        assert made.members.current == URLS[0]
        assert made.members.rotations == 2

    run_virtual(main)


def test_answers_to_other_calls_do_not_clear_a_sick_member() -> None:
    """A member that answers reads and fails at leases must not be chosen again because a read went well."""

    async def main() -> None:
        script = Script(lambda member, path: TIMED_OUT if (member, path) == (URLS[0], wire.KEEPALIVE) else OK)
        made = caller(script)
        await read(made)
        await made.call(wire.KEEPALIVE, b"{}", wire.RANGE_REPLY, again=True, lane=Lane.KEEPALIVE)
        for _ in range(5):
            await read(made)
        assert [member for member, _ in script.asked[-6:]] == [URLS[1]] * 6

    run_virtual(main)


def test_with_every_member_failing_the_oldest_failure_is_tried_first() -> None:
    async def main() -> None:
        script = Script(by_member(dict.fromkeys(URLS, NO_LEADER)))
        with pytest.raises(Unavailable):
            await read(caller(script))
        members = [member for member, _ in script.asked]
        assert members == [URLS[index % 3] for index in range(len(members))]

    run_virtual(main)


def test_space_exhausted_is_not_asked_elsewhere() -> None:
    async def main() -> None:
        script = Script(lambda *_: refusal("etcdserver: mvcc: database space exceeded", 8, 429))
        with pytest.raises(NotApplied, match="space exceeded"):
            await write(caller(script))
        assert len(script.asked) == 1

    run_virtual(main)


# --- logins ---------------------------------------------------------------------------------------------------------


def with_auth(script: Script, *, good: Callable[[str], bool]) -> Callable[[str, str], Answer]:
    """Answers as an etcd does whose valid tokens are those that `good` says."""

    def answer(_: str, path: str) -> Answer:
        token = script.tokens[-1]
        if path == wire.AUTHENTICATE:
            if token is not None:
                return Reply(status=401, body=LOST_LOGIN)
            script.logins += 1
            return Reply(status=200, body=TOKEN % script.logins)
        if token is None:
            return refusal("etcdserver: user name is empty", 3, 400)
        return OK if good(token) else Reply(status=401, body=LOST_LOGIN)

    return answer


def authenticated(*, good: Callable[[str], bool]) -> tuple[Script, Caller]:
    script = Script(lambda *_: OK)
    script.answers = with_auth(script, good=good)
    return script, caller(script, user="u")


@pytest.mark.parametrize("do", [read, write])
def test_a_lost_login_costs_one_login_and_drops_the_stale_token_first(do: Do) -> None:
    async def main() -> None:
        valid = {"t1"}
        script, made = authenticated(good=lambda token: token in valid)
        await do(made)
        assert script.logins == 1
        valid.clear()
        valid.add("t2")
        assert await do(made) == 7
        assert (script.logins, made.logins) == (2, 2)
        sent = [
            token for (_, path), token in zip(script.asked, script.tokens, strict=True) if path == wire.AUTHENTICATE
        ]
        assert sent == [None, None]

    run_virtual(main)


def test_a_keepalive_logs_in_again_on_its_own_lane() -> None:
    """Etcd from 3.5.28 on asks a token for it, and permission on every key of the lease."""

    async def main() -> None:
        valid = {"t1"}
        script, made = authenticated(good=lambda token: token in valid)
        await read(made)
        valid.clear()
        valid.add("t2")
        script.lanes.clear()
        await made.call(wire.KEEPALIVE, b"{}", wire.RANGE_REPLY, again=True, lane=Lane.KEEPALIVE)
        assert script.logins == 2
        assert script.lanes == [Lane.KEEPALIVE] * 3

    run_virtual(main)


@pytest.mark.parametrize("do", [read, write])
def test_logging_in_never_loops(do: Do) -> None:
    async def main() -> None:
        script, made = authenticated(good=lambda _: False)
        with pytest.raises(Denied, match="'u'"):
            await do(made)
        assert script.logins == 2  # the first one, and one more

    run_virtual(main)


def test_many_calls_share_one_login() -> None:
    async def main() -> None:
        script, made = authenticated(good=lambda _: True)
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(read, made)
        assert script.logins == 1

    run_virtual(main)


@pytest.mark.parametrize(
    "lost",
    [
        refusal("etcdserver: invalid auth token", 16, 401),
        refusal("etcdserver: user name is empty", 3, 400),
        refusal("etcdserver: revision of auth store is old", 3, 400),
        Reply(status=401, body=b'{"code":16,"message":"etcdserver: invalid auth token","details":[]}'),  # 3.6
        Reply(
            status=200, body=b'{"error":{"grpc_code":16,"http_code":401,"message":"etcdserver: invalid auth token"}}'
        ),
        EMPTY,  # 3.4.23 was seen to answer so
    ],
)
def test_every_way_of_losing_a_login_is_known(lost: Answer) -> None:
    async def main() -> None:
        script, made = authenticated(good=lambda _: True)
        await read(made)
        answers, left = script.answers, [lost]
        script.answers = lambda member, path: left.pop() if left else answers(member, path)
        assert await read(made) == 7
        assert script.logins == 2

    run_virtual(main)


def test_a_login_is_jittered() -> None:
    async def main() -> None:
        script = Script(lambda *_: OK)
        script.answers = with_auth(script, good=lambda _: True)
        delays = iter([0.9, 0.0])
        login = Login(user="u", password=password)
        made = Caller(
            script, Members(URLS, first=0), login=login, connect_s=1.0, read_s=2.0, jitter=lambda: next(delays)
        )
        start = anyio.current_time()
        await read(made)
        assert anyio.current_time() - start > 0.25  # virtual

    run_virtual(main)


def test_a_wrong_password_is_denied_and_not_shown() -> None:
    async def main() -> None:
        wrong = refusal("etcdserver: authentication failed, invalid user ID or password", 3, 400)
        script = Script(lambda _, path: wrong if path == wire.AUTHENTICATE else OK)
        with pytest.raises(Denied, match=r"'u'.*invalid user ID or password") as told:
            await read(caller(script, user="u"))
        assert "pass" not in str(told.value).replace("password", "")
        assert script.count(wire.AUTHENTICATE) == 1

    run_virtual(main)


def test_a_login_where_none_is_wanted_is_no_error() -> None:
    async def main() -> None:
        off = refusal("etcdserver: authentication is not enabled", 9, 412)
        script = Script(lambda _, path: off if path == wire.AUTHENTICATE else OK)
        made = caller(script, user="u")
        for _ in range(3):
            assert await read(made) == 7
        assert script.count(wire.AUTHENTICATE) == 1

    run_virtual(main)


def test_no_user_where_one_is_wanted_says_what_to_set() -> None:
    async def main() -> None:
        script = Script(lambda *_: refusal("etcdserver: user name is empty", 3, 400))
        with pytest.raises(Denied, match=r"etcd\.user and etcd\.password_file"):
            await read(caller(script))
        assert len(script.asked) == 1

    run_virtual(main)


@pytest.mark.parametrize("broken", [REFUSED, RESET, TIMED_OUT, math.inf])
@pytest.mark.parametrize("do", [read, write])
def test_a_member_that_cannot_log_us_in_is_left(broken: Answer, do: Do) -> None:
    """A login that got no answer leaves the call itself unsent, so even a write goes on elsewhere."""

    async def main() -> None:
        script, made = authenticated(good=lambda _: True)
        answers = script.answers
        script.answers = lambda member, path: broken if member == URLS[0] else answers(member, path)
        assert await do(made) == 7
        assert script.asked[-1][0] == URLS[1]

    run_virtual(main)


def test_a_password_is_read_anew_for_each_login() -> None:
    async def main() -> None:
        valid = {"t1"}
        script = Script(lambda *_: OK)
        script.answers = with_auth(script, good=lambda token: token in valid)
        passwords: Iterator[Secret] = iter([Secret("old"), Secret("new")])

        async def changing() -> Secret:
            return next(passwords)

        login = Login(user="u", password=changing)
        made = Caller(script, Members(URLS, first=0), login=login, connect_s=1.0, read_s=2.0, jitter=lambda: 0.0)
        await read(made)
        valid.clear()
        valid.add("t2")
        assert await read(made) == 7
        assert next(passwords, None) is None

    run_virtual(main)
