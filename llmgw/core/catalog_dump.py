"""A catalog as people write it: what `llmgw get catalog` prints and `llmgw apply` reads.

Invariant: loading what is made here gives the same catalog, and making it from that gives the same again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from llmgw.core.catalog import Catalog


def written(catalog: Catalog) -> dict[str, Any]:
    """`catalog` as plain values in the files' one form, names sorted, without what is a default anyway."""
    return {
        "models": {name: _fields(spec, leave_out=("name",)) for name, spec in sorted(catalog.models.items())},
        "aliases": {name: alias.model for name, alias in sorted(catalog.aliases.items())},
        "engines": {name: _fields(spec, leave_out=("name",)) for name, spec in sorted(catalog.engines.items())},
    }


def _fields(value: msgspec.Struct, *, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(value):
        own = getattr(value, field.name)
        default = (
            field.default_factory() if field.default is msgspec.NODEFAULT and not field.required else field.default
        )
        if field.name not in leave_out and (field.required or own != default):
            fields[field.name] = _plain(own)
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _fields(value)
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    return msgspec.to_builtins(value)
