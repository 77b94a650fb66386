"""What etcd's gateway says and what it means: shapes and texts as they were captured from 3.4.23, 3.5 and 3.6."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.store import etcd_wire as wire
from llmgw.store.etcd_verdict import Verdict, judge, judge_canceled, judge_error
from llmgw.store.port import Compare, DeleteOp, GetOp, Op, PutOp, Target

# message, code, HTTP status of a unary reply
REFUSALS = [
    ("etcdserver: invalid auth token", 16, 401, Verdict.LOGIN),
    ("etcdserver: user name is empty", 3, 400, Verdict.LOGIN),
    ("etcdserver: revision of auth store is old", 3, 400, Verdict.LOGIN),
    ("etcdserver: authentication is not enabled", 9, 412, Verdict.AUTH_OFF),
    ("etcdserver: authentication failed, invalid user ID or password", 3, 400, Verdict.DENIED),
    ("etcdserver: permission denied", 7, 403, Verdict.DENIED),
    ("etcdserver: requested lease not found", 5, 404, Verdict.LEASE_GONE),
    ("etcdserver: mvcc: required revision has been compacted", 11, 400, Verdict.COMPACTED),
    ("etcdserver: mvcc: required revision is a future revision", 11, 400, Verdict.NOWHERE),
    ("etcdserver: request is too large", 3, 400, Verdict.TOO_LARGE),
    ("grpc: received message larger than max (2099999 vs. 2097152)", 8, 429, Verdict.TOO_LARGE),
    ("etcdserver: too many operations in txn request", 3, 400, Verdict.TOO_LARGE),
    ("etcdserver: no leader", 14, 503, Verdict.ELSEWHERE),
    ("etcdserver: too many requests", 8, 429, Verdict.ELSEWHERE),
    ("etcdserver: mvcc: database space exceeded", 8, 429, Verdict.NOWHERE),
    ("etcdserver: request timed out", 14, 503, Verdict.UNCLEAR),
    ("etcdserver: request timed out, possibly due to previous leader failure", 14, 503, Verdict.UNCLEAR),
    ("etcdserver: request timed out, possibly due to connection lost", 14, 503, Verdict.UNCLEAR),
    ("etcdserver: leader changed", 14, 503, Verdict.UNCLEAR),
    ("etcdserver: server stopped", 14, 503, Verdict.UNCLEAR),
    ("context deadline exceeded", 2, 500, Verdict.UNCLEAR),
    ("context canceled", 1, 408, Verdict.UNCLEAR),
    ("something nobody has seen yet", 13, 500, Verdict.UNCLEAR),
    ("etcdserver: duplicate key given in txn request", 3, 400, Verdict.NOWHERE),
]


@pytest.mark.parametrize(("message", "code", "status", "verdict"), REFUSALS)
def test_every_shape_of_an_error_means_the_same(message: str, code: int, status: int, verdict: Verdict) -> None:
    unary_34 = {"error": message, "message": message, "code": code}
    unary_36 = {"code": code, "message": message, "details": []}
    stream_34 = {"error": {"grpc_code": code, "http_code": status, "message": message, "http_status": "x"}}
    stream_36 = {"error": {"code": code, "message": message}}
    for shape in (unary_34, unary_36, stream_34, stream_36):
        failure = judge(status, json.dumps(shape).encode())
        assert failure.verdict is verdict, shape
        assert failure.why == message.removeprefix("etcdserver: ")
    for shape in (stream_34, stream_36):
        error = wire.WATCH_MESSAGE.decode(json.dumps(shape)).error
        assert error is not None
        assert judge_error(error).verdict is verdict


@pytest.mark.parametrize(
    ("status", "body", "verdict", "words"),
    [
        (404, b"Not Found\n", Verdict.ELSEWHERE, "--enable-grpc-gateway=false"),
        (404, b"404 page not found\n", Verdict.ELSEWHERE, "--enable-grpc-gateway=false"),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", Verdict.ELSEWHERE, "HTTPS server"),
        (
            400,
            b"CommonName of client sending a request against gateway will be ignored and not used as expected",
            Verdict.DENIED,
            "certificate has a CN",
        ),
        (502, b"<html>\n<b>Bad Gateway</b>", Verdict.UNCLEAR, "HTTP 502: <html>"),
        (500, b"", Verdict.UNCLEAR, "an empty reply"),
        (500, b"\xff\xfe", Verdict.UNCLEAR, "HTTP 500"),
        (400, b"{}", Verdict.UNCLEAR, "error code None"),
        (500, b"x" * 10_000, Verdict.UNCLEAR, "xxx"),
    ],
)
def test_what_is_no_json_is_judged_too(status: int, body: bytes, verdict: Verdict, words: str) -> None:
    failure = judge(status, body)
    assert failure.verdict is verdict
    assert words in failure.why
    assert len(failure.why) < 300


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("rpc error: code = PermissionDenied desc = etcdserver: permission denied", Verdict.DENIED),
        ("rpc error: code = Unauthenticated desc = etcdserver: invalid auth token", Verdict.LOGIN),
        ("rpc error: code = InvalidArgument desc = etcdserver: user name is empty", Verdict.LOGIN),
        ("", Verdict.ELSEWHERE),
        ("something new", Verdict.ELSEWHERE),
    ],
)
def test_why_a_watch_was_cancelled(reason: str, verdict: Verdict) -> None:
    """Captured: a denied watch is `created` and `canceled` in one message, with watch_id -1."""
    line = {"result": {"header": {}, "watch_id": "-1", "created": True, "canceled": True, "cancel_reason": reason}}
    result = wire.WATCH_MESSAGE.decode(json.dumps(line)).result
    assert result is not None
    assert (result.created, result.canceled, result.watch_id) == (True, True, -1)
    assert judge_canceled(result).verdict is verdict


def test_absent_means_zero_and_strings_are_numbers() -> None:
    line = (
        b'{"result":{"header":{"cluster_id":"17093","revision":"9007199254740993","raft_term":"2"},"watch_id":"1",'
        b'"events":[{"kv":{"key":"L2E=","create_revision":"2","mod_revision":"9007199254740993","version":"1",'
        b'"value":"AP8=","lease":"7587877389324134404"}},{"type":"DELETE","kv":{"key":"L2I=","mod_revision":"7"}}]}}'
    )
    result = wire.WATCH_MESSAGE.decode(line).result
    assert result is not None
    assert (result.created, result.canceled, result.compact_revision) == (False, False, 0)
    put, delete = wire.events(result, from_revision=1)
    assert (put.key, put.value, put.mod_revision) == ("/a", b"\x00\xff", 2**53 + 1)
    assert put.lease == 7587877389324134404
    assert (delete.key, delete.value, delete.create_revision) == ("/b", None, 0)
    assert wire.TXN_REPLY.decode(b'{"header":{"revision":"3"}}').succeeded is False
    assert wire.RANGE_REPLY.decode(b'{"header":{}}').kvs == ()
    assert wire.KEEPALIVE_REPLY.decode(b'{"result":{"header":{},"ID":"5"}}').result.ttl_s == 0


def test_events_that_were_seen_are_dropped() -> None:
    line = {"result": {"header": {}, "events": [{"kv": {"key": "YQ==", "mod_revision": str(n)}} for n in (4, 5, 6)]}}
    result = wire.WATCH_MESSAGE.decode(json.dumps(line)).result
    assert result is not None
    assert [event.mod_revision for event in wire.events(result, from_revision=6)] == [6]


@given(st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_lines_come_whole_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    text = b"".join(line + b"\n" for line in lines)
    cutter, found = wire.Lines(), []
    while text:
        size = data.draw(st.integers(1, len(text)))
        found += cutter.feed(text[:size])
        text = text[size:]
    assert found == lines


def decoded(value: object) -> object:
    """JSON as etcd's gateway understands it: bytes fields out of base64."""
    if isinstance(value, dict):
        fields = {"key", "range_end", "value"}
        return {k: base64.b64decode(v) if k in fields else decoded(v) for k, v in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def test_requests() -> None:
    lease = 7587877389324134404  # needs all of its 63 bits
    body = wire.txn_request(
        [
            Compare(key="/a", target=Target.CREATE, number=0),
            Compare(key="/p/", target=Target.MOD, op=Op.LESS, number=9, prefix=True),
            Compare(key="/a", target=Target.LEASE, op=Op.NOT_EQUAL, number=lease),
        ],
        [PutOp(key="/a", value=b"\xff", lease=lease), DeleteOp(key="/p/", prefix=True), GetOp(key="/p/")],
        [PutOp(key="/a", value=b"")],
    )
    assert decoded(json.loads(body)) == {
        "compare": [
            {"key": b"/a", "result": "EQUAL", "target": "CREATE", "create_revision": 0},
            {"key": b"/p/", "range_end": b"/p0", "result": "LESS", "target": "MOD", "mod_revision": 9},
            {"key": b"/a", "result": "NOT_EQUAL", "target": "LEASE", "lease": lease},
        ],
        "success": [
            {"request_put": {"key": b"/a", "value": b"\xff", "lease": lease}},
            {"request_delete_range": {"key": b"/p/", "range_end": b"/p0"}},
            {"request_range": {"key": b"/p/"}},
        ],
        "failure": [{"request_put": {"key": b"/a", "value": b""}}],
    }
    page = decoded(json.loads(wire.range_request("/p/", prefix=True, limit=10, revision=4, after=b"/p/x")))
    assert page == {"key": b"/p/x\0", "range_end": b"/p0", "limit": 10, "revision": 4}
    assert decoded(json.loads(wire.range_request("/p/", prefix=False))) == {"key": b"/p/"}


def test_watches_of_one_stream() -> None:
    body = wire.watch_request(["/p/", "/a"], [5, 6])
    parts = [decoded(json.loads(part)) for part in body.replace(b"}}{", b"}}\n{").split(b"\n")]
    common = {"progress_notify": True}
    assert parts == [
        {"create_request": {"key": b"/p/", "range_end": b"/p0", "start_revision": 5, "watch_id": 1, **common}},
        {"create_request": {"key": b"/a", "start_revision": 6, "watch_id": 2, **common}},
    ]


def test_a_foreign_key_is_shown_and_breaks_nothing() -> None:
    assert wire.key_text(b"/x/\xff\xc3\xa9") == r"/x/\xff\xc3\xa9"
