"""Which replica gets a request: the least busy one in rotation. Knows replicas as members of their model's group.

A member that fails is ejected: it gets nothing until a connection to it succeeds again (passive health). Faults of the
engine count, never what a client did wrong. Where all members of a model are ejected they are asked all the same, since
one failure of the only replica must not take the model away. Invariant: `in_flight` rises once for each request sent to
a member and falls once for it, whichever way that ends; it is the gateway's own count and nobody else writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from llmgw.core.routing import Route
from llmgw.gateway.endpoint import ENGINE_PATHS

if TYPE_CHECKING:
    from llmgw.gateway.admission import Queue
    from llmgw.gateway.upstream import Upstream

FAULTS_MAX: Final = 3
"""Soft faults in a row (a broken answer, a 500) that eject a member. One may be the request's own doing."""


class Member:
    """One start of one replica's engine, as this gateway sees it. `in_flight` includes what is only `held`."""

    __slots__ = ("ejected", "faults", "gone", "group", "heads", "held", "idle", "in_flight", "picked", "route")

    def __init__(self, route: Route, group: Group) -> None:
        self.route = route
        self.group = group
        self.in_flight = 0
        self.held = 0
        """Requests whose client left but whose answer the engine goes on generating."""
        self.picked = 0
        """When it was last chosen, in choices of its group: ties go to who waited longest."""
        self.faults = 0
        self.ejected = False
        self.gone = False
        """No longer in the table: what runs may end, nothing new begins."""
        self.idle: list[Upstream] = []
        """Connections ready for another request, the latest used last."""
        self.heads = {path: _head("POST", path, route) + b"content-length: " for path in ENGINE_PATHS}
        """Path -> the head of a request for it, up to its length."""

    def ask_head(self, path: str) -> bytes:
        """The whole head of a GET of the gateway's own."""
        return _head("GET", path, self.route) + b"\r\n"

    def take(self, now_s: float, idle_max_s: float) -> Upstream | None:
        """A connection to use again; None when there is none young enough for the engine to still have it open."""
        while self.idle:
            upstream = self.idle.pop()
            if now_s - upstream.idle_since_s < idle_max_s:
                return upstream
            upstream.close()
        return None

    def close_idle(self, before_s: float) -> None:
        """Close the connections that are idle since `before_s` or longer."""
        while self.idle and self.idle[0].idle_since_s <= before_s:
            self.idle.pop(0).close()

    def __repr__(self) -> str:
        return f"<member {self.route.replica} {self.route.address}:{self.route.port}>"


def _head(method: str, path: str, route: Route) -> bytes:
    """What every engine gets to see: nothing of the client's but what it is told explicitly, and our key."""
    host = f"[{route.address}]" if ":" in route.address else route.address
    return (
        f"{method} {path} HTTP/1.1\r\nhost: {host}:{route.port}\r\nauthorization: Bearer {route.key.reveal()}\r\n"
        "content-type: application/json\r\n"
    ).encode()


class Group:
    """The members of one model and those who wait for one of them."""

    __slots__ = ("_picks", "in_flight_max", "members", "model", "queue", "tries_max")

    def __init__(self, model: str, queue: Queue, *, in_flight_max: int, tries_max: int) -> None:
        self.model = model
        self.queue = queue
        self.members: list[Member] = []
        self.in_flight_max = in_flight_max
        self.tries_max = tries_max
        self._picks = 0

    def choose(self, tried: Sequence[Member], *, ejected: bool = False) -> Member | None:
        """The member to ask, `ejected` ones or those in rotation, or None.

        None may mean that all are full (`full`), that all were `tried`, that enough were, or that there are none.
        """
        best = None
        least = self.in_flight_max
        for member in self.members:
            busy = member.in_flight
            nearer = busy < least or (busy == least and best is not None and member.picked < best.picked)
            if nearer and member.ejected is ejected and member not in tried:
                best, least = member, busy
        if best is None or (tried and self._tries(tried) >= self.tries_max):
            return None
        self._picks += 1
        best.picked = self._picks
        return best

    def full(self, tried: Sequence[Member]) -> bool:
        """Whether there is a member that could be asked if it had room."""
        return self._tries(tried) < self.tries_max and any(
            member.in_flight >= self.in_flight_max and not member.ejected and member not in tried
            for member in self.members
        )

    def _tries(self, tried: Sequence[Member]) -> int:
        return sum(member.group is self for member in tried)
