"""Single keys of the store as `etcdctl` would show them, except that no secret is shown, ever."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from llmgw.core.snapshot import Kind
from llmgw.errors import CorruptRecord
from llmgw.store import codec, keys
from llmgw.store.port import Event, KeyValue

SECRET_KINDS: Final = (Kind.ASSIGNMENT, Kind.SECRET, Kind.SHARD)
"""Kinds whose records hold a secret somewhere."""

REDACTED: Final = "***"


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A value made presentable: as text, as plain data, and why it is not a record of its kind (None: it is one)."""

    text: str
    data: Any
    corrupt: str | None = None


def shown(key: str, value: bytes) -> Shown:
    """`value` as it stands at `key`: the store's own bytes, but a record that may hold secrets without them."""
    may_hold_secrets = any(key.startswith(keys.prefix(kind)) for kind in SECRET_KINDS)
    corrupt: str | None = None
    ref = keys.parse(key)
    if ref is not None:
        try:
            record = codec.decode(ref, value)
        except CorruptRecord as error:
            corrupt = error.why
        else:
            public = codec.encode_public(record).decode() if may_hold_secrets else value.decode()
            return Shown(text=public, data=codec.to_public(record))
    if may_hold_secrets:
        return Shown(text=REDACTED, data=REDACTED, corrupt=corrupt or "is no record of ours")
    text = value.decode(errors="backslashreplace")
    try:
        return Shown(text=text, data=msgspec.json.decode(value), corrupt=corrupt)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Shown(text=text, data=text, corrupt=corrupt)


def key_object(item: KeyValue) -> dict[str, Any]:
    """A key as `get -o json` prints it."""
    value = shown(item.key, item.value)
    return {
        "key": item.key,
        "value": value.data,
        "create_revision": item.create_revision,
        "mod_revision": item.mod_revision,
        "version": item.version,
        "lease": item.lease,
        **({} if value.corrupt is None else {"corrupt": value.corrupt}),
    }


def event_object(event: Event) -> dict[str, Any]:
    """A change as `watch` prints it, one JSON object a line. A deletion has value null."""
    line = {"type": "delete" if event.value is None else "put", "key": event.key, "mod_revision": event.mod_revision}
    if event.value is None:
        return {**line, "value": None}
    value = shown(event.key, event.value)
    if value.corrupt is not None:
        return {**line, "value": None, "corrupt": value.corrupt}
    return {**line, "value": value.data}


def event_text(event: Event) -> str:
    """A change as etcdctl prints it: what happened, the key, the value."""
    return (
        f"DELETE\n{event.key}\n" if event.value is None else f"PUT\n{event.key}\n{shown(event.key, event.value).text}"
    )


def parent(key: str) -> str:
    """The shortest prefix with a slash at its end that holds every key beginning with `key`."""
    return key[: key.rfind("/") + 1]
