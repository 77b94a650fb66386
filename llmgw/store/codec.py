"""Records as JSON: once with secrets for the store, once without them for everything else.

Only `encode_stored` reveals a `Secret`. A value that can't be read is a `CorruptRecord` naming its key, never None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from llmgw.core.ids import Secret, shard_name, split_shard_name
from llmgw.core.live import GatewayLoad
from llmgw.core.record import Record
from llmgw.core.snapshot import RECORDS, Change, Kind, Ref
from llmgw.errors import CorruptRecord
from llmgw.store import keys
from llmgw.store.port import Event, KeyValue

R = TypeVar("R", bound=Record)


def _reveal(value: Any) -> Any:
    if isinstance(value, Secret):
        return value.reveal()
    raise NotImplementedError(f"{type(value).__name__} is no part of a record")


def _redact(value: Any) -> Any:
    if isinstance(value, Secret):
        return "***"
    raise NotImplementedError(f"{type(value).__name__} is no part of a record")


def _decode(kind: type, value: Any) -> Any:
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise msgspec.ValidationError(f"expected {kind.__name__}")


_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a value raises that is no record of ours. The last one: JSON nested a thousand deep."""

_STORED: Final = msgspec.json.Encoder(enc_hook=_reveal)
_PUBLIC: Final = msgspec.json.Encoder(enc_hook=_redact)
_DECODERS: Final[Mapping[Kind, msgspec.json.Decoder[Record]]] = {
    kind: msgspec.json.Decoder(record, dec_hook=_decode) for kind, record in RECORDS.items()
}
_LOAD: Final = msgspec.json.Decoder(GatewayLoad)


def encode_stored(record: Record) -> bytes:
    """`record` as the store keeps it, secrets included. For the store, and for an agent's 0600 state file, only."""
    return _STORED.encode(record)


def encode_public(record: Any) -> bytes:
    """Any record or builtin as JSON for people and pages, with `***` for secrets."""
    return _PUBLIC.encode(record)


def to_public(record: Any) -> Any:
    """Any record as plain builtins (dict, list, str, …), with `***` for secrets."""
    return msgspec.to_builtins(record, enc_hook=_redact, str_keys=True)


def decode_file(kind: type[R], value: bytes) -> R:
    """A record that `encode_stored` wrote to a 0600 file. Raises msgspec.DecodeError, UnicodeDecodeError."""
    return msgspec.json.decode(value, type=kind, dec_hook=_decode)


def decode(ref: Ref, value: bytes) -> Record:
    """The record at `ref`. Raises CorruptRecord, also when it speaks of another name than its key."""
    try:
        record = _DECODERS[ref.kind].decode(value)
    except _UNREADABLE as error:
        raise CorruptRecord(keys.key(ref), str(error)) from error
    said = _name(ref.kind, record)
    if said is not None and said != ref.name:
        raise CorruptRecord(keys.key(ref), f"its value speaks of {said!r}")
    return record


def decode_load(gateway: str, value: bytes) -> GatewayLoad:
    """What the gateway of that id tells. Raises CorruptRecord, also when it speaks of another gateway."""
    try:
        load = _LOAD.decode(value)
    except _UNREADABLE as error:
        raise CorruptRecord(keys.gateway_key(gateway), str(error)) from error
    if load.gateway != gateway:
        raise CorruptRecord(keys.gateway_key(gateway), f"its value speaks of {load.gateway!r}")
    return load


def _name(kind: Kind, record: Any) -> str | None:
    """The name a record gives itself; None where the kind carries none."""
    match kind:
        case Kind.ASSIGNMENT | Kind.SHARD:
            name = shard_name(record.node, record.replica, record.rank)
            return name if split_shard_name(name) else "?"
        case Kind.REPLICA:
            return str(record.id)
        case Kind.SECRET:
            return str(record.replica)
        case Kind.SESSION | Kind.FACTS:
            return str(record.node)
        case Kind.MODEL | Kind.ALIAS | Kind.ENGINE | Kind.NODE_SPEC | Kind.NODE_STATE | Kind.MODEL_STATE:
            return str(record.name)
        case _:
            return None


def change(item: KeyValue | Event) -> Change | None:
    """A stored key or a watch event as the core sees it; None for a key that is none of ours."""
    ref = keys.parse(item.key)
    if ref is None:
        return None
    if item.value is None:
        return Change(ref=ref, mod_revision=item.mod_revision)
    try:
        record, corrupt = decode(ref, item.value), None
    except CorruptRecord as error:
        record, corrupt = None, error.why
    return Change(
        ref=ref,
        mod_revision=item.mod_revision,
        create_revision=item.create_revision,
        record=record,
        corrupt=corrupt,
    )
