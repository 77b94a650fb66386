"""What the gateway answers by itself: the list of models, its health, its figures."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from llmgw.core.routing import Target
from llmgw.gateway import wire
from llmgw.gateway.endpoint import Endpoint, Local
from llmgw.gateway.metrics import Exposition
from llmgw.gateway.wire import Trouble

if TYPE_CHECKING:
    from llmgw.gateway.hub import Hub
    from llmgw.gateway.request import Request
    from llmgw.gateway.server import Client

NEAR_MAX: Final = 200
"""Names compared when looking for the nearest one: a typing error must not cost the others their time."""

RETRY_AFTER_S: Final = 2


def unknown_model(name: str, names: Iterable[str]) -> Trouble:
    """There is no such model or alias."""
    near = nearest(name, names)
    hint = f"; did you mean {near!r}?" if near is not None else ""
    return Trouble(status=404, code="model_not_found", message=f"there is no model {_short(name)}{hint}", param="model")


def wrong_task(name: str, target: Target, endpoint: Endpoint) -> Trouble:
    """The model is there, and is for something else."""
    return Trouble(
        status=400,
        code="wrong_task",
        message=f"model {_short(name)} is for {target.task.value}, which {endpoint.path} does not do",
        param="model",
    )


def no_routes() -> Trouble:
    """Nothing is known yet, which is not the same as nothing being there."""
    return Trouble(
        status=503,
        code="routes_not_loaded",
        message="this gateway has not seen any routes yet",
        retry_after_s=RETRY_AFTER_S,
    )


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name most like `name`, None when none is like it."""
    if len(name) > 255:
        return None
    folded = name.casefold()
    likely = []
    for each in names:
        if each.casefold() == folded:
            return each
        if abs(len(each) - len(name)) <= 4 or folded in each.casefold():
            likely.append(each)
    return next(iter(difflib.get_close_matches(name, likely[:NEAR_MAX], n=1)), None)


def _short(name: str) -> str:
    return repr(name) if len(name) <= 100 else repr(name[:100]) + "…"


def answer(endpoint: Endpoint, hub: Hub) -> tuple[int, bytes]:
    """Status and JSON body for `endpoint`, which is any local one but the metrics."""
    if endpoint.local is Local.HEALTH:
        return _health(hub)
    names = hub.names
    if names is None:
        return _error(no_routes())
    if endpoint.local is Local.MODELS:
        return 200, wire.encode_json({"object": "list", "data": [_model(name, names[name]) for name in names]})
    target = names.get(endpoint.name)
    if target is None:
        return _error(unknown_model(endpoint.name, names))
    return 200, wire.encode_json(_model(endpoint.name, target))


def _error(trouble: Trouble) -> tuple[int, bytes]:
    return trouble.status, trouble.body()


def _model(name: str, target: Target) -> dict[str, object]:
    # Clients insist on `created` being a number; the time a model was first applied is not kept.
    return {"id": name, "object": "model", "created": 0, "owned_by": "llmgw", "root": target.models[0]}


def _health(hub: Hub) -> tuple[int, bytes]:
    status = "ok"
    if hub.draining:
        status = "draining"
    elif hub.names is None:
        status = "no routes yet"
    age_s = hub.routes_age_s
    said = {"status": status, "routes_age_s": None if age_s is None else round(age_s, 1)}
    return 200 if status == "ok" else 503, wire.encode_json(said)


class Scrape:
    """One answer to Prometheus, made in a thread: with many models that takes longer than streams may wait."""

    def __init__(self, hub: Hub, client: Client, request: Request, exposition: Exposition, *, head_only: bool) -> None:
        self._client = client
        self._request = request
        self._head_only = head_only
        self._task = hub.spawn(self._run(exposition))

    async def _run(self, exposition: Exposition) -> None:
        keep_alive, answered = self._request.keep_alive, False
        try:
            text = await asyncio.to_thread(exposition.text, exposition.gather())
            self._client.write(
                wire.reply(200, text, content_type=wire.TEXT, close=not keep_alive, head_only=self._head_only)
            )
            answered = True
        finally:
            if answered:
                self._client.finished(keep_alive)
            else:
                self._client.abort()

    def cancel(self) -> None:
        """The client left."""
        self._task.cancel()

    def pause(self) -> None:
        """Nothing is sent in pieces here."""

    def resume(self) -> None:
        """As `pause`."""

    def sweep(self, now_s: float) -> None:
        """No time-out of its own: it needs nobody else."""
