"""The node's session: that the agent is there, what its machine is and all that runs on it, in one transaction.

Nothing is written but under a session that is certainly this agent's (a compare on its key in every transaction), and
no order is carried out but from a linearizable listing made while it was. Whoever finds the name taken by another
machine, or by a copy of this data directory, waits for that session to end and says whose it is. Without the store
nothing happens here at all: engines are the supervisor's, which does not wait for it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Final, Protocol

import anyio
import msgspec

from llmgw.config import AgentConfig
from llmgw.core.node import Facts, Session
from llmgw.core.record import Record
from llmgw.core.replica import ShardReport
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import Denied, LeaseLost, OutcomeUnknown, StoreError
from llmgw.obs.clock import WallClock
from llmgw.store import codec, keys
from llmgw.store.mirror import Mirror, mirror
from llmgw.store.port import Compare, DeleteOp, Operation, PutOp, Store, absent, unchanged
from llmgw_agent.event import Event, OrdersRead, OrdersSeen, SessionHeld
from llmgw_agent.retry import RETRY_S, Retry
from llmgw_agent.saying import Sayings
from llmgw_agent.tree import Tree, TreeReader

RECHECK_S: Final = 30.0
"""How long what was published is taken for granted: somebody may have deleted or overwritten it. One read each time."""

AGAIN_S: Final = 0.5
"""Pause between losing a session and registering again, so that no quarrel over a name becomes a hot loop."""

WRITES_MAX: Final = 60
"""Shard records in one transaction: each takes a compare and an operation of 128, beside the session's."""

log = logging.getLogger(__name__)


class Desk(Protocol):
    """What the session needs of the agent around it."""

    @property
    def facts(self) -> Facts: ...

    @property
    def lease(self) -> int: ...

    def reports(self) -> Mapping[str, ShardReport]: ...

    async def tell(self, event: Event) -> None:
        """Returns when the supervisor has taken it in."""
        ...

    async def wait_changed(self, since: int) -> int:
        """Until reports or facts may have changed since that number; returns the new one."""
        ...


class SessionLost(Exception):  # named by what happened, as in llmgw.errors
    """The session is not ours any more, or not of this store; register again. Never leaves this module."""


class Held(msgspec.Struct, kw_only=True):
    """A session that is ours: `written` is what the store holds of us, by key, with the revision it was written at."""

    lease: int
    incarnation: str
    session_rev: int
    written: dict[str, tuple[bytes, int]]


class SessionKeeper:
    """Holds the session of one node for as long as `run` runs."""

    def __init__(
        self, store: Store, config: AgentConfig, desk: Desk, *, wall: WallClock, boot_id: str, data: str, pid: int
    ) -> None:
        self._store, self._config, self._desk, self._wall = store, config, desk, wall
        self._boot_id, self._data, self._pid = boot_id, data, pid
        node = config.name
        self._node = node
        self._meta = keys.key(Ref(Kind.META))
        self._session = keys.key(Ref(Kind.SESSION, node))
        self._facts = keys.key(Ref(Kind.FACTS, node))
        self._shards = keys.prefix(Kind.SHARD) + f"{node}/"
        self._assignments = keys.prefix(Kind.ASSIGNMENT) + f"{node}/"
        self._started_at = wall()
        self._version = importlib.metadata.version("llmgw")
        self._ttl_s = max(1, round(config.session_ttl_s))  # etcd counts whole seconds
        self._granted: set[int] = set()
        self._sayings = Sayings(log)
        self._reader = TreeReader(store, node, self._sayings)
        digest = hashlib.sha256(node.encode()).digest()
        self._phase = int.from_bytes(digest[:4], "big") / 2**32
        """This node's place in every interval, [0, 1): so that a fleet does not speak in chorus."""
        self.held: Held | None = None

    async def run(self) -> None:
        """Hold the session, or try to, until cancelled."""
        prefixes = [self._meta, self._session, self._assignments]
        relist_s = self._config.etcd.relist_s
        while True:
            try:
                async with mirror(self._store, prefixes, jitter=lambda: self._phase, relist_s=relist_s) as reflected:
                    await self._hold(reflected)
            except Denied as error:  # the mirror's first listing
                self._trouble(error)
            await anyio.sleep(RETRY_S)

    async def farewell(self) -> None:
        """The agent ends and its engines have: say so and end the session. Raises nothing the store may do."""
        if self.held is None:
            return
        try:
            await self._publish(self.held)
            await self._store.revoke(self.held.lease)
        except (StoreError, SessionLost) as error:
            log.warning("could not take leave of the store", extra={"fields": {"why": str(error)}})

    async def _hold(self, reflected: Mirror) -> None:
        retry = Retry(self._phase)
        while True:
            try:
                self.held = await self._register(retry)
            except StoreError as error:
                self._trouble(error)
                await anyio.sleep(retry.failed())
            else:
                retry.worked()
                await self._serve(self.held, reflected)
                await anyio.sleep(AGAIN_S)

    # --- registering --------------------------------------------------------------------------------------------

    async def _register(self, retry: Retry) -> Held:
        """Wait until the name is ours, then write session, facts and the full report at once. Raises: StoreError."""
        while True:
            tree = await self._reader.read([self._session, self._facts, self._shards])
            if tree is None:
                await anyio.sleep(retry.failed())
                continue
            lease = await self._claim(tree)
            if lease is None:
                await anyio.sleep(max(1.0, self._config.session_ttl_s / 10))
                continue
            held = await self._report_all(tree, lease)
            if held is not None:
                log.info(
                    "session held",
                    extra={"fields": {"node": self._node, "lease": f"{lease:x}", "store": held.incarnation}},
                )
                self._sayings.over()
                return held

    async def _claim(self, tree: Tree) -> int | None:
        """A lease under which the session may be written: a fresh one, or that of our own; None: it is another's."""
        item = tree.items.get(self._session)
        if item is None:
            lease = (await self._store.grant(self._ttl_s)).id
            self._granted.add(lease)
            return lease
        change = codec.change(item)
        holder = None if change is None else change.record
        ours = {self._desk.lease, *self._granted}
        if isinstance(holder, Session) and item.lease in ours and holder.lease == item.lease:
            mine = (self._boot_id, self._config.address, self._data)
            if (holder.boot_id, holder.address, holder.data) == mine:
                try:
                    await self._store.keepalive(item.lease)
                except LeaseLost:
                    return None
                return item.lease
        if isinstance(holder, Session):
            self._sayings.say(
                "taken",
                f"the name {self._node!r} is held by the agent at {holder.address}; waiting for its session to end",
                address=holder.address,
                pid=holder.pid,
                boot=holder.boot_id,
                data=holder.data,
            )
        else:
            self._sayings.say(
                "taken", "the session of this name can't be read; waiting for it to end", key=self._session
            )
        return None

    async def _report_all(self, tree: Tree, lease: int) -> Held | None:
        """One transaction; None when something moved meanwhile."""
        # Known before it is used: should this process die right after, its successor may resume.
        await self._desk.tell(SessionHeld(lease=lease))
        await self._desk.tell(OrdersRead(orders=tree.orders))
        session = Session(
            node=self._node,
            boot_id=self._boot_id,
            data=self._data,
            lease=lease,
            store=tree.meta.incarnation,
            address=self._config.address,
            version=self._version,
            pid=self._pid,
            started_at=self._started_at,
            ttl_s=self._ttl_s,
        )
        wanted = self._wanted()
        stale = [key for key in tree.items if key.startswith(self._shards) and key not in wanted]
        before = tree.items.get(self._session)
        compares: list[Compare] = [
            unchanged(self._meta, tree.items[self._meta].mod_revision),
            absent(self._session) if before is None else unchanged(self._session, before.mod_revision),
        ]
        ops: list[Operation] = [PutOp(key=self._session, value=codec.encode_stored(session), lease=lease)]
        # A node holds at most 60 shards; should it run more, after a restore, the rest follows.
        first = dict(islice(wanted.items(), 2 * WRITES_MAX))
        ops += [PutOp(key=key, value=value) for key, value in first.items()]
        deleted = stale[: 2 * WRITES_MAX - len(first)]
        ops += [DeleteOp(key=key) for key in deleted]
        result = await self._store.txn(compares, ops)
        if not result.ok:
            return None
        written = {key: (value, result.revision) for key, value in first.items()}
        written |= {key: (tree.items[key].value, tree.items[key].mod_revision) for key in stale[len(deleted) :]}
        return Held(lease=lease, incarnation=tree.meta.incarnation, session_rev=result.revision, written=written)

    def _wanted(self) -> dict[str, bytes]:
        """What is to stand below our prefixes now, the session apart."""
        records: dict[str, Record] = {self._facts: self._desk.facts}
        for name, report in self._desk.reports().items():
            records[self._shards + name] = report
        return {key: codec.encode_stored(record) for key, record in records.items()}

    # --- holding ------------------------------------------------------------------------------------------------

    async def _serve(self, held: Held, reflected: Mirror) -> None:
        """Until the session is lost."""

        async def until_lost(task: Callable[[], Awaitable[None]]) -> None:
            try:
                await task()
            except (SessionLost, LeaseLost) as error:
                log.warning("registering again", extra={"fields": {"node": self._node, "why": str(error)}})
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_lost, lambda: self._keep_alive(held))
            tasks.start_soon(until_lost, lambda: self._keep_published(held))
            tasks.start_soon(until_lost, lambda: self._keep_ordered(held, reflected))

    async def _keep_alive(self, held: Held) -> None:
        """Renew the lease every third of its time; own task, so that nothing else can be in its way."""
        every_s, retry = self._config.session_ttl_s / 3, Retry(self._phase)
        await anyio.sleep(every_s * self._phase)
        while True:
            try:
                await self._store.keepalive(held.lease)
            except LeaseLost:
                raise
            except StoreError as error:
                self._trouble(error)
                await anyio.sleep(retry.failed())
            else:
                retry.worked()
                await anyio.sleep(every_s)

    async def _keep_published(self, held: Held) -> None:
        version = 0
        unsure, retry = False, Retry(self._phase)
        read_again_s = anyio.current_time() + RECHECK_S
        while True:
            try:
                if unsure:
                    await self._reread(held)
                    unsure = False
                    read_again_s = anyio.current_time() + RECHECK_S
                await self._publish(held)
            except LeaseLost:
                raise
            except StoreError as error:
                unsure = unsure or isinstance(error, OutcomeUnknown)
                self._trouble(error)
                await anyio.sleep(retry.failed())
            else:
                retry.worked()
                with anyio.CancelScope(deadline=read_again_s):
                    version = await self._desk.wait_changed(version)
                unsure = anyio.current_time() >= read_again_s

    async def _publish(self, held: Held) -> None:
        """Bring the store up to what is. Each key is compared, so that a write that lands late can't undo a newer one.

        Raises: StoreError; SessionLost when the session is not ours any more.
        """
        while True:
            wanted = self._wanted()
            changes = [key for key, value in wanted.items() if held.written.get(key, (b"", 0))[0] != value]
            changes += [key for key in held.written if key not in wanted]
            if not changes:
                return
            batch = changes[:WRITES_MAX]
            compares = [unchanged(self._session, held.session_rev)]
            compares += [unchanged(key, held.written.get(key, (b"", 0))[1]) for key in batch]
            ops: list[Operation] = [
                PutOp(key=key, value=wanted[key]) if key in wanted else DeleteOp(key=key) for key in batch
            ]
            result = await self._store.txn(compares, ops)
            if not result.ok:
                await self._reread(held)
                continue
            for key in batch:
                if key in wanted:
                    held.written[key] = (wanted[key], result.revision)
                else:
                    held.written.pop(key, None)

    async def _reread(self, held: Held) -> None:
        """Learn what the store holds of us: after a write whose outcome is not known, and now and then anyway."""
        listing = await self._store.list([self._session, self._facts, self._shards])
        items = {item.key: item for item in listing.items}
        session = items.pop(self._session, None)
        if session is None or session.mod_revision != held.session_rev:
            raise SessionLost("the session is gone or was written by another")
        held.written = {key: (item.value, item.mod_revision) for key, item in items.items()}

    async def _keep_ordered(self, held: Held, reflected: Mirror) -> None:
        """On every sign of change, list linearizably and carry out what stands there."""
        acted: object = None
        changes = -1
        while True:
            sign = self._sign(reflected)
            if sign == acted:
                changes = await reflected.wait_changed(changes)
                continue
            tree = await self._read_patiently()
            session = tree.items.get(self._session)
            if session is None or session.mod_revision != held.session_rev:
                raise SessionLost("the session is gone or was written by another")
            if tree.meta.incarnation != held.incarnation:
                raise SessionLost("the store is another incarnation")
            await self._desk.tell(OrdersSeen(orders=tree.orders))
            acted = sign

    async def _read_patiently(self) -> Tree:
        retry = Retry(self._phase)
        while True:
            try:
                tree = await self._reader.read([self._session])
            except StoreError as error:
                self._trouble(error)
                tree = None
            if tree is not None:
                return tree
            await anyio.sleep(retry.failed())

    def _sign(self, reflected: Mirror) -> object:
        """What the mirror knows that orders depend on; only a sign that it is time to read."""
        index = reflected.index
        rows = tuple((name, row.mod_revision) for name, row in sorted(index.assignments.items()))
        session = index.sessions.get(self._node)
        return rows, reflected.incarnation, None if session is None else session.mod_revision

    def _trouble(self, error: StoreError) -> None:
        if isinstance(error, Denied):
            self._sayings.say(
                "denied", "the store denies this agent: its user's role must be this node's", why=str(error)
            )
        else:
            self._sayings.say("store", "waiting for the store; engines go on", why=str(error))
