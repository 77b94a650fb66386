"""Names, and the keys they become."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.core.ids import escape, model_name_problem, name_problem, replica_id, shard_name, split_shard_name, unescape
from llmgw.core.live import ModelLoad
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import CorruptRecord
from llmgw.store import codec, keys
from llmgw.store.port import KeyValue, range_end

FREE = (Kind.MODEL, Kind.ALIAS, Kind.MODEL_STATE)
SHARDS = (Kind.ASSIGNMENT, Kind.SHARD)
STRICT = tuple(kind for kind in Kind if kind.many and kind not in (*FREE, *SHARDS))

tricky = st.text(st.sampled_from("/%.ÿa0-_ 2FEé€\U0001f600"), min_size=1, max_size=40)
names = st.one_of(tricky, st.text(min_size=1, max_size=80)).map(lambda text: unicodedata.normalize("NFC", text))
node_names = st.from_regex(r"[a-z0-9]([-._a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)


@given(names)
@example("/")
@example("%")
@example(".")
@example("..")
@example("ÿ")
@example("a/../b%2F")
@example("%2E")
def test_a13_any_model_name_round_trips_through_its_key(name: str) -> None:
    if model_name_problem(name) is not None:
        return
    segment = escape(name)
    assert "/" not in segment
    assert segment.strip(".")
    assert unescape(segment) == name
    for kind in FREE:
        key = keys.key(Ref(kind, name))
        assert key.isascii()
        assert keys.parse(key) == Ref(kind, name)


@given(names, names)
def test_a13_two_names_never_share_a_key_and_none_lies_below_another(one: str, other: str) -> None:
    if one == other or model_name_problem(one) or model_name_problem(other):
        return
    first, second = keys.key(Ref(Kind.MODEL, one)), keys.key(Ref(Kind.MODEL, other))
    assert first != second
    assert not second.startswith(first + "/")


@given(st.text(st.sampled_from("/%.ABab2Ff0-_é"), max_size=12))
def test_a13_a_segment_that_escaping_did_not_make_is_no_name(segment: str) -> None:
    name = unescape(segment)
    if name is not None:
        assert escape(name) == segment


@pytest.mark.parametrize("name", ["gpu-1/x", "gpu-1/", "/gpu-1", "..", ".", "%2F", "ÿ", "gpu 1", "GPU-1", "", "a" * 64])
@pytest.mark.parametrize("kind", STRICT)
def test_a13_a_node_s_name_with_a_slash_is_refused(kind: Kind, name: str) -> None:
    assert name_problem(name)
    with pytest.raises(ValueError, match=r"may hold|characters long"):
        keys.key(Ref(kind, name))
    assert keys.parse(keys.prefix(kind) + name) is None


@pytest.mark.parametrize("kind", STRICT)
def test_a13_gpu_1_is_not_gpu_10(kind: Kind) -> None:
    one, ten = keys.key(Ref(kind, "gpu-1")), keys.key(Ref(kind, "gpu-10"))
    assert not ten.startswith(one + "/")
    assert keys.parse(one + "/x") is None
    below = range_end(one + "/", prefix=True)
    assert below is not None
    assert not one + "/" <= ten < below


@given(node_names, node_names, st.integers(min_value=0, max_value=9999))
def test_a_shard_s_name_splits_where_it_was_joined(node: str, replica: str, rank: int) -> None:
    name = shard_name(node, replica, rank)
    assert split_shard_name(name) == (node, replica, rank)
    for kind in SHARDS:
        assert keys.parse(keys.key(Ref(kind, name))) == Ref(kind, name)


@given(names)
def test_a_replica_s_id_is_a_valid_name_whatever_its_model_is_called(name: str) -> None:
    assert name_problem(replica_id(name, "abcde")) is None


@pytest.mark.parametrize(
    "name",
    ["gpu-1", "gpu-1/r", "gpu-1/r.x", "gpu-1/r.00", "gpu-1/r.-1", "gpu-1//r.0", "gpu-1/a/r.0", "/r.0", "gpu-1/.0"],
)
def test_what_is_no_shard_s_name_is_refused(name: str) -> None:
    assert split_shard_name(name) is None
    for kind in SHARDS:
        with pytest.raises(ValueError, match="is not <node>"):
            keys.key(Ref(kind, name))
        assert keys.parse(keys.prefix(kind) + name) is None


@pytest.mark.parametrize(
    "key",
    [
        "/llmgw",
        "/llmgw/",
        "/llmgw/meta",
        "/llmgw/meta/store/x",
        "/llmgw/spec/models/",
        "/llmgw/spec/models/a%2f",
        "/llmgw/spec/models/a b",
        "/llmgw/unknown/x",
        "/llmgw-live/measurement/gpu-1",
        "/other/spec/models/a",
    ],
)
def test_what_is_not_ours_is_nothing(key: str) -> None:
    assert keys.parse(key) is None
    assert codec.change(KeyValue(key=key, value=b"{}", create_revision=2, mod_revision=2, version=1)) is None


@pytest.mark.parametrize("kind", [kind for kind in Kind if not kind.many])
def test_a_single_record_has_one_key(kind: Kind) -> None:
    assert keys.parse(keys.key(Ref(kind))) == Ref(kind)


def test_every_kind_has_its_own_place() -> None:
    places = [keys.prefix(kind) for kind in Kind]
    for place in places:
        assert [other for other in places if other.startswith(place)] == [place]


@given(names)
@example("gpu-host:8880")
@example("a/../b")
@example("..")
def test_a_gateways_id_round_trips_through_its_key_outside_the_tree(gateway: str) -> None:
    if model_name_problem(gateway) is not None:
        return
    key = keys.gateway_key(gateway)
    assert key.startswith("/llmgw-live/gateway/")
    assert "/" not in key.removeprefix(keys.GATEWAYS)
    assert keys.parse_gateway(key) == gateway
    assert keys.parse(key) is None


@pytest.mark.parametrize(
    "raw",
    ["/llmgw-live/gateway/", "/llmgw-live/gateway/a/b", "/llmgw-live/gateway/%2f", "/llmgw-live/gateways", "/llmgw/a"],
)
def test_what_no_gateway_wrote_is_no_gateways(raw: str) -> None:
    assert keys.parse_gateway(raw) is None


def test_a_gateways_load_is_read_whatever_else_it_says_and_never_as_less_than_nothing() -> None:
    said = b'{"gateway":"g","models":{"m":{"in_flight":3,"new":1},"k":{"queued":2,"idle_s":0}},"of_the_future":[1]}'
    load = codec.decode_load("g", said)
    assert load.models == {"m": ModelLoad(in_flight=3), "k": ModelLoad(queued=2)}
    assert codec.decode_load("g", codec.encode_stored(load)) == load
    for bad, why in [
        (b'{"gateway":"other"}', "speaks of 'other'"),
        (b'{"gateway":"g","models":{"m":{"in_flight":-1}}}', ">= 0"),
        (b'{"gateway":"g","models":{"m":{"queued":1e400}}}', "out of range"),
        (b'{"gateway":"g","models":{"m":{"queued":99999999999999999999999999999}}}', "<= 1000000000"),
        (b'{"gateway":"g","models":{"m":{"idle_s":-0.1}}}', ">= 0"),
        (b'{"gateway":"g","models":[]}', "object"),
        (b"{}", "gateway"),
        (b"\xff", "malformed"),
        (b"", "truncated"),
        (b'{"gateway":"g","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    ]:
        with pytest.raises(CorruptRecord, match=why) as caught:
            codec.decode_load("g", bad)
        assert caught.value.key == "/llmgw-live/gateway/g"


def test_a_record_nested_without_end_is_unreadable_and_no_more() -> None:
    value = b'{"node":"n","boot_id":"b","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(CorruptRecord, match="recursion"):
        codec.decode(Ref(Kind.FACTS, "n"), value)
