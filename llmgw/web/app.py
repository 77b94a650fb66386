"""A controller's page, health and metrics, read-only, from its own mirror: no request reaches the store.

Everything shown is escaped by the template engine, and the page may load nothing but its own style sheet: the content
security policy forbids scripts, inline styles and every foreign origin, so no name can become code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import anyio
import jinja2
import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmgw.obs.clock import WallClock, now
from llmgw.obs.status import ControllerStatus
from llmgw.web.page import page

HERE: Final = Path(__file__).resolve().parent

POLICY: Final = (
    "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

SECURITY_HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


def build_app(status: ControllerStatus, metrics: CollectorRegistry, *, wall: WallClock) -> ASGIApp:
    """The application of one controller. Its handlers run in the event loop that owns `status`."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    cluster = templates.get_template("cluster.html")

    async def show_page(_: Request) -> Response:
        return HTMLResponse(cluster.render(page=page(status, now(wall))))

    async def show_health(_: Request) -> Response:
        found = health(status, anyio.current_time())
        code = 200 if found["status"] == "ok" else 503
        return Response(msgspec.json.encode(found) + b"\n", code, media_type="application/json")

    async def show_metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics), headers={"content-type": content_type})

    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/healthz", show_health),
            Route("/metrics", show_metrics),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ]
    )
    return _Secured(app)


def health(status: ControllerStatus, mono_s: float) -> dict[str, object]:
    """Whether this controller is well, and what that was judged by. Ages in seconds, null when unknown.

    A standby is healthy, and so is a controller that waits for etcd: restarting it would help nobody.
    """
    term, mirror, why = status.term, status.mirror, status.unhealthy(mono_s)
    return {
        "status": "ok" if why is None else "unhealthy",
        "why": why,
        "id": status.leader.id,
        "version": status.leader.version,
        "role": "standby" if term is None else "leader",
        "term": None if term is None else term.number,
        "renewed_age_s": None if term is None else round(mono_s - term.renewed_mono_s, 3),
        "mirror": {
            "ready": mirror is not None and mirror.ready,
            "age_s": None if mirror is None or mirror.age_s is None else round(mirror.age_s, 3),
            "revision": None if mirror is None or not mirror.ready else mirror.index.revision,
        },
    }


class _Secured:
    """Adds the security headers to every answer, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *SECURITY_HEADERS]}
            await send(message)

        await self._app(scope, receive, send_secured)
