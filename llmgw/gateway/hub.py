"""What all exchanges share: the table in force, the groups of replicas made from it, their health, and the ticking.

Invariants: a new table takes effect at once and whole; a replica that is in the old one and the new one keeps its
counts, its connections and its ejection; requests in flight on one that is gone end where they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from llmgw.config import GatewayConfig
from llmgw.core.routing import RouteTable, Target
from llmgw.gateway.admission import Queue
from llmgw.gateway.balance import FAULTS_MAX, Group, Member
from llmgw.gateway.hold import Holds
from llmgw.gateway.metrics import Figures, GroupGauge
from llmgw.gateway.upstream import Upstream

if TYPE_CHECKING:
    from llmgw.gateway.exchange import Exchange
    from llmgw.gateway.server import Client

SWEEP_S: Final = 0.25
"""How often time-outs are looked at; so much later than asked for they may come."""

log = logging.getLogger(__name__)


class Hub:
    """The gateway's shared state, owned by its event loop."""

    def __init__(self, config: GatewayConfig, figures: Figures, *, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.figures = figures
        self.loop = loop
        self.clock = loop.time
        self.names: dict[str, Target] | None = None
        """Every name of the spec; None while no table was ever seen, which is not the same as there being none."""
        self.groups: dict[str, Group] = {}
        self.clients: set[Client] = set()
        self.emptied = asyncio.Event()
        """Set each time the last client has gone."""
        self.draining = False
        self.notice = b""
        """A header line for every answer, while there is something to tell about the routes' age."""
        self.head_end = self.last_head_end = b""
        """What ends the head of an engine's answer: `notice`; of the last one on a connection, also that it is that."""
        self.tell(b"")
        self.routes_age_s: float | None = None
        """How old the routes were a moment ago; None while unknown."""
        self._holds = Holds(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.TimerHandle | None = None

    # --- what clients are told ---

    def tell(self, notice: bytes) -> None:
        """Put a header line (or none) into every answer from now on."""
        self.notice = notice
        self.last_head_end = notice + b"connection: close\r\n\r\n"
        self.head_end = self.last_head_end if self.draining else notice + b"\r\n"

    def drain(self) -> None:
        """The process is about to end: each connection closes after its present answer."""
        self.draining = True
        self.tell(self.notice)
        for client in tuple(self.clients):
            client.drain()

    # --- the table ---

    def swap(self, table: RouteTable) -> None:
        """Put `table` in force."""
        members = {member.route: member for group in self.groups.values() for member in group.members}
        groups = {model: self.groups.get(model) or self._group(model) for model in table.routes}
        for model, routes in table.routes.items():
            group = groups[model]
            group.members = [members.pop(route) if route in members else Member(route, group) for route in routes]
        for member in members.values():
            member.gone = True
            member.close_idle(self.clock())
        left = [group for model, group in self.groups.items() if model not in groups]
        for group in left:
            group.members = []
        self.names, self.groups = table.names, groups
        self.figures.retain(table.names)
        for group in (*left, *groups.values()):
            self.admit(group)

    def _group(self, model: str) -> Group:
        config = self.config
        queue = Queue(model, len_max=config.queue_max, wait_s=config.queue_wait_s)
        return Group(model, queue, in_flight_max=config.in_flight_max, tries_max=config.attempts_max)

    def gauges(self) -> dict[str, GroupGauge]:
        """How each model's replicas are now."""
        return {
            model: GroupGauge(
                ready=sum(not member.ejected for member in group.members),
                ejected=sum(member.ejected for member in group.members),
                held=sum(member.held for member in group.members),
                queued=len(group.queue.waiting),
            )
            for model, group in list(self.groups.items())
        }

    # --- choosing ---

    def find(self, target: Target, tried: Sequence[Member], *, in_turn: bool = False) -> Member | Group | None:
        """Whom to ask: a member; a group to wait for, since all that could be asked are full; None when nobody is left.

        The model itself first, then its fallbacks; those in rotation first, then the ejected ones. `in_turn`: for one
        who has waited, so that those behind don't matter.
        """
        for model in target.models:
            group = self.groups.get(model)
            if group is None:
                continue
            if group.queue.waiting and not in_turn:
                return group
            member = group.choose(tried)
            if member is not None:
                return member
            if group.full(tried):
                return group
        for model in target.models:
            group = self.groups.get(model)
            if group is not None and (member := group.choose(tried, ejected=True)) is not None:
                return member
        return None

    def release(self, member: Member) -> None:
        """A request on `member` is over."""
        member.in_flight -= 1
        if member.group.queue.waiting:
            self.admit(member.group)

    def admit(self, group: Group) -> None:
        """Let those in, who wait for `group`, as far as there is room or nothing to wait for any more."""
        while (waiter := group.queue.first()) is not None:
            exchange: Exchange = waiter  # type: ignore[assignment]  # only exchanges join
            found = self.find(exchange.target, exchange.tried, in_turn=True)
            if isinstance(found, Group):
                return
            group.queue.leave(exchange)
            exchange.admitted()

    # --- health ---

    def fault(self, member: Member, why: str, *, hard: bool) -> None:
        """The engine did wrong. `hard`: it can't serve at all."""
        member.faults += 1
        log.log(
            # The first of a row is news; the others would only flood the log while everything fails.
            logging.WARNING if member.faults == 1 else logging.DEBUG,
            "replica at fault",
            extra={"fields": {"model": member.group.model, "replica": member.route.replica, "why": why}},
        )
        if member.ejected or member.gone or not (hard or member.faults >= FAULTS_MAX):
            return
        member.ejected = True
        member.close_idle(self.clock())
        self.figures.of(member.group.model).ejections += 1
        self.loop.call_later(self.config.eject_s, self._probe, member)
        self.admit(member.group)

    def healthy(self, member: Member) -> None:
        """It answered as an engine should."""
        member.faults = 0
        if member.ejected:
            member.ejected = False
            log.info("replica back in rotation", extra={"fields": {"replica": member.route.replica}})
            self.admit(member.group)

    def _probe(self, member: Member) -> None:
        if member.ejected and not member.gone:
            self.spawn(self._readmit(member))

    async def _readmit(self, member: Member) -> None:
        """No client pays for finding out whether an ejected replica is back: a mere connection does."""
        self.figures.of(member.group.model).probes += 1
        try:
            upstream = await self.connect(member)
        except OSError:
            self.loop.call_later(self.config.eject_s, self._probe, member)
            return
        upstream.idle_since_s = self.clock()
        member.idle.append(upstream)
        self.healthy(member)

    async def connect(self, member: Member) -> Upstream:
        """A new connection to `member`. Raises OSError (a time-out is one)."""
        config = self.config
        make = partial(Upstream, member, ack_timeout_s=config.connect_timeout_s, clock=self.clock)
        async with asyncio.timeout(config.connect_timeout_s):
            _, upstream = await self.loop.create_connection(make, member.route.address, member.route.port)
        return upstream

    def hold(self, member: Member) -> None:
        """A client left while `member` generates an answer in one piece: it stays busy until that is over."""
        self._holds.hold(member)

    # --- time ---

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run `work` in the background, held on to."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)  # a bug; requests go on

    def gone(self, client: Client) -> None:
        """A client's connection has ended."""
        self.clients.discard(client)
        if not self.clients:
            self.emptied.set()

    async def wait_empty(self) -> None:
        """Until no client is connected."""
        while self.clients:
            self.emptied.clear()
            await self.emptied.wait()

    def start(self) -> None:
        """Begin to look at time-outs."""
        self._ticking = self.loop.call_later(SWEEP_S, self._sweep)

    def stop(self) -> None:
        """End everything at once."""
        if self._ticking is not None:
            self._ticking.cancel()
        for task in self._tasks:
            task.cancel()
        for client in tuple(self.clients):
            client.abort()
        self.swap(RouteTable())

    def _sweep(self) -> None:
        now_s = self.clock()
        for client in tuple(self.clients):
            client.sweep(now_s)
        for group in tuple(self.groups.values()):
            group.queue.expire(now_s)
            for member in group.members:
                member.close_idle(now_s - self.config.upstream_idle_s)
        self.start()
