"""The gateway's view of the store: follows it, folds it into the route table, puts that in force and saves it.

No controller is asked: a replica is routable once its plan and its shard say so. Invariants: trouble with the store
makes the table older, never smaller; a store that does not say which one it is, is not believed; and a store that was
restored takes no route away from a model it has no replica of, since what runs there is only about to be reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric

from llmgw.core import routing
from llmgw.core.routing import Route, RouteTable
from llmgw.core.snapshot import Index, Kind
from llmgw.errors import Denied
from llmgw.gateway.hub import Hub
from llmgw.gateway.metrics import counter, gauge
from llmgw.gateway.snapshot import Snapshot, SnapshotFile
from llmgw.obs.clock import WallClock
from llmgw.store import keys
from llmgw.store.mirror import Mirror, mirror
from llmgw.store.port import Store

PREFIXES: Final = (
    keys.ROOT + "meta/",
    *map(keys.prefix, (Kind.MODEL, Kind.ALIAS, Kind.REPLICA, Kind.SECRET, Kind.SHARD)),
)
"""What a gateway's role may read of the decision state."""

COALESCE_S: Final = 0.02
"""Changes that come this close together make one new table."""

YIELD_EVERY: Final = 256
"""Models looked at before requests get their turn."""

START_WAIT_S: Final = 2.0
"""How long the store may take at start before the saved routes are put in force."""

NOTICE_AGE_S: Final = 30.0
"""Routes older than this are told of in each answer's header. Source: five times the store's silence limit."""

TICK_S: Final = 1.0
CONFIRM_S: Final = 30.0
"""How often the file on disk is marked as still true."""

CARRY_S: Final = 600.0
"""How long routes from before a restore are kept for a model that the restored store has no replica of."""

DENIED_RETRY_S: Final = 5.0

log = logging.getLogger(__name__)


class Routes:
    """Keeps `hub`'s table as true as the store allows."""

    def __init__(self, hub: Hub, *, file: SnapshotFile | None, wall: WallClock, jitter: Callable[[], float]) -> None:
        self._hub = hub
        self._file = file
        self._wall = wall
        self._jitter = jitter
        self._mirror: Mirror | None = None
        self._routes: dict[str, tuple[Route, ...]] = {}
        self._spec: tuple[int, int, int] | None = None
        self._incarnation: str | None = None
        self._followed = False
        """Whether the table in force comes from the store, rather than from the file."""
        self._carried: dict[str, tuple[Route, ...]] = {}
        self._carried_until_s = 0.0
        self._loaded_true_at: float | None = None
        self._saving = asyncio.Event()
        self._table = RouteTable()
        self._loaded: tuple[Snapshot, float] | None = None
        """What was saved before this process began, and when it was known to be true."""
        self.known = asyncio.Event()
        """Set once there is a table, from wherever."""

    @property
    def age_s(self) -> float | None:
        """How long ago the table in force was known to be true, seconds; None while there is none."""
        if self._followed and self._mirror is not None:
            return self._mirror.age_s
        return None if self._loaded_true_at is None else max(0.0, self._wall() - self._loaded_true_at)

    # --- following the store ---

    async def run(self, store: Store, *, relist_s: float) -> None:
        """Follow `store` until cancelled."""
        if self._file is not None:
            self._loaded = await asyncio.to_thread(self._file.load)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._start_from_file())
            tasks.create_task(self._save())
            tasks.create_task(self._tick())
            while True:
                try:
                    await self._follow(store, relist_s)
                except Denied as error:
                    log.warning("the store refuses us", extra={"fields": {"why": str(error)}})
                    await asyncio.sleep(DENIED_RETRY_S)

    async def _follow(self, store: Store, relist_s: float) -> None:
        async with mirror(store, PREFIXES, jitter=self._jitter, relist_s=relist_s) as followed:
            self._mirror = followed
            seen = 0
            while True:
                seen = await followed.wait_changed(seen)
                await asyncio.sleep(COALESCE_S)
                await self._fold(followed.index)

    async def _fold(self, index: Index) -> None:
        """Make the table from what has changed in `index`, and put it in force."""
        incarnation = None if index.meta is None or index.meta.record is None else index.meta.record.incarnation
        if incarnation is None:
            log.warning("the store does not say which one it is; nothing in it is believed")
            return
        dirty = index.take_dirty()
        everything = dirty.everything or incarnation != self._incarnation
        if incarnation != self._incarnation:
            self._restored(incarnation)
        last = self._table if self._followed else self._before(incarnation)
        self._followed = True
        await self._look_again(index, self._routes.keys() | index.replicas_of if everything else dirty.models)
        names = self._table.names
        spec = _fingerprint(index)
        if spec != self._spec:
            names, self._spec = routing.names(index), spec
        carried = self._still_carried(index)
        table = RouteTable(names=names, routes={**carried, **self._routes})
        self._put(routing.keep_unreadable(index, table, last))

    def _before(self, incarnation: str) -> RouteTable:
        """What was known of this store before this process began."""
        saved = None if self._loaded is None else self._loaded[0]
        return saved.table if saved is not None and saved.incarnation == incarnation else RouteTable()

    async def _look_again(self, index: Index, models: Iterable[str]) -> None:
        for n, model in enumerate(sorted(models), start=1):
            if n % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            found = routing.routes_of(index, model)
            if found:
                self._routes[model] = found
            else:
                self._routes.pop(model, None)

    def _restored(self, incarnation: str) -> None:
        """Another store than before: it is believed, but what it can't know yet is kept for a while."""
        if self._incarnation is not None:
            log.warning("the store was restored", extra={"fields": {"incarnation": incarnation}})
            self._carried = self._table.routes
            self._carried_until_s = self._hub.clock() + CARRY_S
        self._routes = {}
        self._incarnation = incarnation

    def _still_carried(self, index: Index) -> dict[str, tuple[Route, ...]]:
        if self._hub.clock() > self._carried_until_s:
            self._carried = {}
        self._carried = {model: kept for model, kept in self._carried.items() if not index.replicas_of.get(model)}
        return self._carried

    def _put(self, table: RouteTable) -> None:
        if table == self._table and self.known.is_set():
            return
        self._table = table
        self._hub.swap(table)
        self.known.set()
        self._saving.set()
        log.info(
            "routes",
            extra={"fields": {"names": len(table.names), "replicas": sum(map(len, table.routes.values()))}},
        )

    # --- the file ---

    async def _start_from_file(self) -> None:
        """If the store does not answer soon, serve from what was saved."""
        if self._loaded is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await self.known.wait()
        if self.known.is_set():
            return
        snapshot, self._loaded_true_at = self._loaded
        self._incarnation = snapshot.incarnation
        self._table = snapshot.table
        self._hub.swap(snapshot.table)
        self.known.set()
        fields = {"age_s": round(self.age_s or 0), "names": len(snapshot.table.names)}
        log.warning("the store does not answer: serving from the saved routes", extra={"fields": fields})

    async def _save(self) -> None:
        """Write each new table, the newest only."""
        while True:
            await self._saving.wait()
            self._saving.clear()
            if self._file is None or self._incarnation is None or not self._followed:
                continue
            snapshot = Snapshot(incarnation=self._incarnation, table=self._table)
            try:
                await asyncio.to_thread(self._file.save, snapshot)
            except OSError as error:
                fields = {"file": self._file.path, "why": str(error)}
                log.warning("the routes can't be saved", extra={"fields": fields})

    async def _tick(self) -> None:
        """Tell the routes' age, and confirm the file while they are fresh."""
        ticks = 0
        while True:
            age_s = self.age_s
            stale = age_s is not None and age_s > NOTICE_AGE_S
            self._hub.routes_age_s = age_s
            self._hub.tell(b"x-llmgw-routes-age: %d\r\n" % age_s if stale and age_s is not None else b"")
            ticks += 1
            fresh = age_s is not None and not stale and self._followed
            if self._file is not None and fresh and ticks % round(CONFIRM_S / TICK_S) == 0:
                try:
                    await asyncio.to_thread(self._file.confirm)
                except OSError:
                    self._saving.set()  # it is not there any more: write it again
            await asyncio.sleep(TICK_S)

    # --- telling ---

    def metrics(self) -> Iterable[Metric]:
        """Age, resyncs and size, for Prometheus."""
        age = gauge("routes_age_seconds", "Since the routes in force were last known to be true.")
        if (age_s := self.age_s) is not None:
            age.add_metric([], age_s)
        resyncs = counter("route_resyncs", "Whole listings of the store, by what made them due.", "cause")
        if self._mirror is not None:
            for cause, count in self._mirror.resets.items():
                resyncs.add_metric([cause], count)
        names = gauge("names", "Models and aliases known.")
        if self.known.is_set():
            names.add_metric([], len(self._table.names))
        return (age, resyncs, names)


def _fingerprint(index: Index) -> tuple[int, int, int]:
    """Changes whenever a model or an alias does."""
    models, aliases = index.models, index.aliases
    newest = max((row.mod_revision for table in (models, aliases) for row in table.values()), default=0)
    return len(models), len(aliases), newest


def snapshot_file(path: str) -> SnapshotFile | None:
    """The file that a configuration names; none for an empty name."""
    return SnapshotFile(Path(path)) if path else None
