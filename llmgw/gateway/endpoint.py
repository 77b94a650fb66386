"""The exact list of what may be asked for: method and path, nothing else reaches an engine or this process.

A path is compared as it was sent: no dot segments, doubled slashes or escapes are resolved first, so nothing can be
smuggled past the list, and there are no redirects. Only a model's name below `/v1/models/` is percent-decoded, once.
"""

from __future__ import annotations

import enum
from typing import Final
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

from llmgw.core.catalog import Task
from llmgw.gateway.wire import Trouble


class Local(enum.Enum):
    """What the gateway answers by itself."""

    MODELS = "/v1/models"
    MODEL = "/v1/models/"
    HEALTH = "/healthz"
    METRICS = "/metrics"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that may be asked for: `local`, or (`to_engine`) an engine's path with the `task` a model needs."""

    path: str
    local: Local | None = None
    task: Task | None = None
    name: str = ""
    """The decoded name of `Local.MODEL`."""
    head_only: bool = False
    """Asked with HEAD: the answer's body is left out."""
    to_engine: bool = False


ENGINE: Final = {
    path.encode(): Endpoint(path=path, task=Task.GENERATE, to_engine=True)
    for path in ("/v1/chat/completions", "/v1/completions")
}
"""What a POST to each of these request targets means. Most requests ask for just that."""

_LOCAL: Final = {
    what.value.encode(): Endpoint(path=what.value, local=what) for what in (Local.MODELS, Local.HEALTH, Local.METRICS)
}
_MODEL: Final = Local.MODEL.value.encode()

NOWHERE: Final = Trouble(status=404, code="unknown_url", message="there is nothing here")

ENGINE_PATHS: Final = tuple(sorted(endpoint.path for endpoint in ENGINE.values()))
"""The paths that go to engines."""


def resolve(method: bytes, target: bytes) -> Endpoint | Trouble:
    """What `method` and the request target of a request line ask for."""
    path = _path(target)
    if path is None:
        return Trouble(status=400, code="invalid_url", message="the request target is no path")
    if path in ENGINE:
        return ENGINE[path] if method == b"POST" else _not_allowed(method, path, "POST")
    local = _LOCAL.get(path) or _model(path)
    if local is None:
        text = path.decode("ascii", "replace")[:200]
        return Trouble(status=404, code="unknown_url", message=f"there is no {text!r} here")
    if method == b"HEAD":
        return msgspec.structs.replace(local, head_only=True)
    return local if method == b"GET" else _not_allowed(method, path, "GET, HEAD")


def _path(target: bytes) -> bytes | None:
    """The path of a target in origin form (`/x?y`) or absolute form (`http://h/x?y`); the query means nothing here."""
    if not target.startswith(b"/"):
        try:
            path = httptools.parse_url(target).path
        except httptools.HttpParserInvalidURLError:
            return None
        return path or None
    return target.partition(b"?")[0]


def _model(path: bytes) -> Endpoint | None:
    if not path.startswith(_MODEL) or path == _MODEL:
        return None
    try:
        name = unquote_to_bytes(path.removeprefix(_MODEL)).decode()
    except UnicodeDecodeError:
        return None
    return Endpoint(path=Local.MODEL.value, local=Local.MODEL, name=name)


def _not_allowed(method: bytes, path: bytes, allow: str) -> Trouble:
    return Trouble(
        status=405,
        code="method_not_allowed",
        message=f"{path.decode('ascii', 'replace')} takes {allow}, not {method.decode('ascii', 'replace')}",
        allow=allow,
    )
