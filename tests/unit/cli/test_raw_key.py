"""Raw keys: the store's own bytes, and never a secret."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from llmgw.cli.raw_key import SECRET_KINDS, event_object, event_text, key_object, shown
from llmgw.core.catalog import Task
from llmgw.core.ids import Secret
from llmgw.core.replica import Assignment, Claim, Desired, EngineSecret, Launch, ShardPhase, ShardReport
from llmgw.core.snapshot import RECORDS
from llmgw.store.codec import encode_stored
from llmgw.store.port import Event, KeyValue

KEY = "f00d" * 16
ORDER = Assignment(
    node="n1",
    replica="m-aaaaa",
    rank=0,
    model="m",
    desired=Desired.RUNNING,
    launch=Launch(source="x", task=Task.GENERATE, profile="cpu", engine="llama.cpp", context=1, slots=1),
    claim=Claim(),
    engine_key=Secret(KEY),
)
REPORT = ShardReport(
    node="n1", replica="m-aaaaa", rank=0, model="m", phase=ShardPhase.READY, phase_at=1.0, assigned=False, order=ORDER
)
SECRETS = {
    "/llmgw/plan/assignments/n1/m-aaaaa.0": encode_stored(ORDER),
    "/llmgw/node/shards/n1/m-aaaaa.0": encode_stored(REPORT),
    "/llmgw/plan/secrets/m-aaaaa": encode_stored(EngineSecret(replica="m-aaaaa", key=Secret(KEY))),
    # Whatever lies where secrets lie is not shown unless it can be read, and then without them.
    "/llmgw/plan/secrets/m-bbbbb": f'{{"replica": "m-aaaaa", "key": "{KEY}"}}'.encode(),
    "/llmgw/plan/secrets/NOT A NAME": KEY.encode(),
    "/llmgw/plan/assignments/n1/m-aaaaa.1": f'{{"engine_key": "{KEY}"'.encode(),
    "/llmgw/node/shards/n1/x": f'"{KEY}"'.encode(),
}


@pytest.mark.parametrize("key", SECRETS)
def test_e06_no_key_shows_a_secret(key: str) -> None:
    item = KeyValue(key=key, value=SECRETS[key], create_revision=1, mod_revision=2, version=1)
    event = Event(key=key, value=SECRETS[key], mod_revision=2)
    for seen in (shown(key, item.value).text, str(key_object(item)), str(event_object(event)), event_text(event)):
        assert KEY not in seen
    assert "***" in shown(key, item.value).text


def _holds_secret(kind: Any) -> bool:
    match kind:
        case inspect.StructType():
            return any(_holds_secret(field.type) for field in kind.fields)
        case inspect.CustomType():
            return kind.cls is Secret
        case inspect.UnionType():
            return any(_holds_secret(part) for part in kind.types)
        case inspect.VarTupleType():
            return _holds_secret(kind.item_type)
        case inspect.DictType():
            return _holds_secret(kind.value_type)
        case _:
            return False


def test_every_kind_that_holds_a_secret_is_known() -> None:
    assert {kind for kind, record in RECORDS.items() if _holds_secret(inspect.type_info(record))} == set(SECRET_KINDS)


def test_other_values_are_shown_as_they_are() -> None:
    alias = b'{"name":"a","model":"m","field_of_a_newer_version":1}'
    assert shown("/llmgw/spec/aliases/a", alias).text == alias.decode()
    assert shown("/llmgw/spec/aliases/a", b'{"name":').corrupt is not None
    assert shown("/elsewhere", b"\xff\x00").text == "\\xff\x00"
    assert shown("/elsewhere", b'{"a": 1}').data == {"a": 1}


def test_a_watch_line() -> None:
    put = Event(key="/llmgw/spec/aliases/a", value=b'{"name":"a","model":"m"}', mod_revision=7)
    assert event_object(put) == {
        "type": "put",
        "key": "/llmgw/spec/aliases/a",
        "mod_revision": 7,
        "value": {"name": "a", "model": "m"},
    }
    assert event_text(put) == 'PUT\n/llmgw/spec/aliases/a\n{"name":"a","model":"m"}'
    gone = Event(key="/llmgw/spec/aliases/a", value=None, mod_revision=8)
    assert event_object(gone) == {"type": "delete", "key": "/llmgw/spec/aliases/a", "mod_revision": 8, "value": None}
    assert event_text(gone) == "DELETE\n/llmgw/spec/aliases/a\n"
    bad = event_object(Event(key="/llmgw/spec/aliases/a", value=b"{", mod_revision=9))
    assert bad["value"] is None
    assert bad["corrupt"]
    assert msgspec.json.encode(bad)
