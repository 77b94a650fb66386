"""A controller's life: follow the store, stand for election, and while leading turn changes into plans and commits.

Invariant: a plan is only ever made from a mirror that has applied our last commit (after winning: all that a
linearizable read saw), and only ever committed on exactly that head. What was dirty stays so until its commit has
succeeded. Nothing here decides; `llmgw.core.reconcile` does.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

import anyio
import anyio.lowlevel
import msgspec

from llmgw.config import ControllerConfig
from llmgw.controller.commit import ELECTION, HEAD, META, Committed, Committer
from llmgw.core.ids import Ids
from llmgw.core.liveness import observe
from llmgw.core.plan import Plan, Settings, View
from llmgw.core.reconcile import due, reconcile
from llmgw.core.record import Leader
from llmgw.core.snapshot import Dirty, Index
from llmgw.core.units import Now, stepped_s
from llmgw.errors import Conflict, LostTerm, StoreError, WentBack
from llmgw.obs.clock import WallClock, now
from llmgw.obs.status import ControllerStatus
from llmgw.store import incarnation, keys
from llmgw.store.election import Term, check_durations, lead
from llmgw.store.follow import Jitter, ungrouped
from llmgw.store.incarnation import HighWater
from llmgw.store.mirror import Mirror, mirror
from llmgw.store.port import KeyValue, Store

RETRY_S: Final = 1.0
"""Pause after a commit or a read of the leader failed, and before standing again after a lost term."""

STAND_AGAIN_S: Final = 3.0
"""Pause, on average, before standing again after the store failed us outside a term."""

REJECTED_PAUSE_S: Final = 5.0
"""Pause after a pass that held groups no transaction takes: deciding the same again at once would be a hot loop."""

STEP_S: Final = 1.0
"""A wall clock that moved so much against the monotonic one has stepped: backoffs and `since_at` are by the wall clock,
their timers are not, so everything is looked at."""

log = logging.getLogger(__name__)


class Decide(Protocol):
    """`llmgw.core.reconcile.reconcile`."""

    def __call__(self, index: Index, dirty: Dirty, *, now: Now, view: View, ids: Ids, settings: Settings) -> Plan:
        """The plan for what is dirty."""
        ...


def settings(config: ControllerConfig) -> Settings:
    """What the core is told of a controller's configuration."""
    return Settings(
        session_ttl_s=config.session_ttl_s,
        lost_after_s=config.lost_after_s,
        backoff_base_s=config.backoff_base_s,
        backoff_max_s=config.backoff_max_s,
    )


async def control(
    store: Store,
    config: ControllerConfig,
    *,
    identity: Leader,
    wall: WallClock,
    ids: Ids,
    jitter: Jitter,
    status: ControllerStatus,
    decide: Decide = reconcile,
) -> None:
    """Run a controller until cancelled; cancellation while leading hands over at once.

    Raises:
        Invalid: the durations don't fit together.
        Denied: the store's very first answer was a refusal.
    """
    call_timeout_s = config.etcd.connect_timeout_s + config.etcd.read_timeout_s
    durations = {
        "ttl_s": config.ttl_s,
        "keepalive_s": config.keepalive_s,
        "margin_s": config.margin_s,
        "call_timeout_s": call_timeout_s,
    }
    check_durations(**durations)
    high_water = HighWater()
    async with mirror(store, [keys.ROOT], jitter=jitter, relist_s=config.etcd.relist_s) as reflected:
        status.mirror, status.store = reflected, store.stats
        await reflected.wait_ready()
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_keep_set_up, store, reflected, ids, jitter)
                while True:
                    try:
                        await incarnation.ensure(store, ids)
                        async with lead(store, identity, high_water=high_water, **durations) as term:
                            status.term, status.terms = term, status.terms + 1
                            reign = Reign(
                                store,
                                config,
                                term=term,
                                mirror=reflected,
                                high_water=high_water,
                                wall=wall,
                                ids=ids,
                                status=status,
                                decide=decide,
                            )
                            try:
                                await reign.run()
                            finally:
                                status.term = None
                    except LostTerm as error:
                        log.warning("no longer leading", extra={"fields": {"why": error.why}})
                        await anyio.sleep(RETRY_S * (0.5 + jitter()))
                    except StoreError as error:
                        log.warning("the store fails us", extra={"fields": {"why": str(error)}})
                        await anyio.sleep(STAND_AGAIN_S * (0.5 + jitter()))


async def _keep_set_up(store: Store, reflected: Mirror, ids: Ids, jitter: Jitter) -> None:
    """A store that was wiped gets its `meta/store` again: without it everybody would stand by for ever."""
    while True:
        changes = reflected.changes
        if reflected.index.meta is None:
            try:
                await incarnation.ensure(store, ids)
            except StoreError as error:
                log.warning("can't set up the store", extra={"fields": {"why": str(error)}})
                await anyio.sleep(STAND_AGAIN_S * (0.5 + jitter()))
                continue
        await reflected.wait_changed(changes)


class Reign:
    """One term: passes, until it is over. Everything it remembers beyond the store ends with it."""

    def __init__(  # noqa: PLR0913  # all of a controller's seams meet here
        self,
        store: Store,
        config: ControllerConfig,
        *,
        term: Term,
        mirror: Mirror,
        high_water: HighWater,
        wall: WallClock,
        ids: Ids,
        status: ControllerStatus,
        decide: Decide,
    ) -> None:
        self._store, self._config, self._term, self._mirror = store, config, term, mirror
        self._high_water, self._wall, self._ids, self._status = high_water, wall, ids, status
        self._decide, self._settings = decide, settings(config)
        self._view = View(won_mono_s=anyio.current_time())
        self._dirty = Dirty(everything=True)
        self._more = False
        self._wake_mono_s: dict[tuple[str, str], float] = {}
        self._wake_next_s = self._full_s = 0.0
        self._earliest_s = 0.0
        self._resets = dict(mirror.resets)
        self._meta_rev = 0
        self._moment: Now | None = None

    async def run(self) -> None:
        """Passes until cancelled. Raises: LostTerm; StoreError when a restored store could not be marked as one."""
        committer = await self._begin()
        await self._look_afresh()
        while True:
            await anyio.lowlevel.checkpoint()
            await self._caught_up(committer.head_rev)
            cause = await self._due()
            await self._pass(committer, cause)

    # --- beginning, and knowing where we are ---

    async def _begin(self) -> Committer:
        """Read what this reign stands on, linearizably. A store that went back in time becomes another one."""
        found, went_back = await self._read()
        election, meta = found.get(ELECTION), found.get(META)
        if election is None or election.create_revision != self._term.number:
            raise LostTerm("the election key is not ours")
        if meta is None:
            raise LostTerm("meta/store is gone")
        self._meta_rev = meta.mod_revision
        if went_back:
            replaced = await incarnation.replace(
                self._store, self._ids, term=self._term.number, old=meta, high_water=self._high_water
            )
            if replaced is None:
                raise LostTerm("somebody else changed the store's incarnation")
            self._meta_rev = replaced
        return Committer(
            self._store,
            term=self._term.number,
            meta_rev=self._meta_rev,
            head=found.get(HEAD),
            high_water=self._high_water,
        )

    async def _read(self) -> tuple[dict[str, KeyValue], bool]:
        """The keys of the fence, linearizably, however long it takes; and whether the store went back in time."""
        while True:
            mark = self._high_water.mark()
            try:
                listing = await self._store.list([ELECTION, META, HEAD])
            except StoreError as error:
                log.warning("can't read what the term stands on", extra={"fields": {"why": str(error)}})
                await anyio.sleep(RETRY_S)
                continue
            found = {item.key: item for item in listing.items}
            try:
                self._high_water.see(found.get(META), listing.revision, mark=mark)
            except WentBack as error:
                log.warning("the store went back in time", extra={"fields": {"seen": error.seen, "got": error.got}})
                return found, True
            return found, False

    async def _look_afresh(self) -> None:
        """List everything once at the beginning of a reign. Raises: LostTerm.

        The mirror of one who stood by may lack what its watch lost (some etcd releases do), or have followed two stores
        as if they were one, and no revision would tell. While leading, all of plan/ is our own writing.
        """
        listed = sum(self._mirror.resets.values())
        while sum(self._mirror.resets.values()) == listed:
            changes = self._mirror.changes
            self._mirror.start_over()
            await self._mirror.wait_changed(changes)

    async def _caught_up(self, head_rev: int) -> None:
        """Until the mirror has applied our own election, the store's incarnation, and the head. Raises: LostTerm.

        A revision alone proves nothing: a mirror that still shows a store from before its restore has seen higher ones.
        Only with our election and our incarnation in it are its revisions those of this store.
        """
        while True:
            changes = self._mirror.changes
            await self._judge()
            head = self._mirror.index.head
            if self._same_store and (0 if head is None else head.mod_revision) >= head_rev:
                return
            if self._has_our_election and self._mirror.revision >= self._meta_rev and not self._same_store:
                self._mirror.start_over()  # it followed two stores as if they were one
            await self._mirror.wait_changed(changes)

    @property
    def _has_our_election(self) -> bool:
        row = self._mirror.index.leader
        return row is not None and row.create_revision == self._term.number

    @property
    def _same_store(self) -> bool:
        """Revisions of two stores may be the same by chance; the incarnation's name is not."""
        meta = self._mirror.index.meta
        return (
            self._has_our_election
            and meta is not None
            and meta.mod_revision == self._meta_rev
            and self._mirror.incarnation == self._high_water.incarnation
        )

    async def _judge(self) -> None:
        """Whether this is still the store that the term began with. Raises: LostTerm.

        A mirror that had to list again may have met a restored store; only a linearizable read can tell.
        """
        if self._mirror.resets != self._resets:
            _, went_back = await self._read()
            self._resets = dict(self._mirror.resets)
            if went_back:
                raise LostTerm("the store went back in time")
        meta = self._mirror.index.meta
        if self._has_our_election and (meta is None or meta.mod_revision > self._meta_rev):
            raise LostTerm("the store's incarnation was changed")
        if self._same_store:
            self._high_water.reached(self._mirror.revision)

    # --- one pass ---

    async def _due(self) -> str:
        """Until a pass is due; returns its cause. Changes are gathered for at least the pass interval."""
        while True:
            await self._judge()
            moment = anyio.current_time()
            cause, due_s = self._next()
            due_s = max(due_s, self._earliest_s)
            if due_s <= moment:
                return cause
            with anyio.CancelScope(deadline=due_s):
                await self._mirror.wait_changed(self._mirror.changes)

    def _next(self) -> tuple[str, float]:
        """Why and when the next pass is due, as things stand."""
        if self._full_s == 0.0:
            return "won", 0.0
        if self._more:
            return "more", 0.0
        if self._mirror.index.dirty or self._dirty:
            return "change", 0.0
        if self._wake_next_s < self._full_s:
            return "timer", self._wake_next_s
        return "full", self._full_s

    async def _pass(self, committer: Committer, cause: str) -> None:
        """Decide, commit, and note what came of it."""
        index, moment = self._mirror.index, now(self._wall)
        dirty = self._take(moment)
        failed_s = self._term.failed_mono_s
        if failed_s is not None and failed_s > (self._view.write_failed_mono_s or 0.0):
            self._view = msgspec.structs.replace(self._view, write_failed_mono_s=failed_s)
        self._view = observe(self._view, index, moment)
        plan = self._decide(index, dirty, now=moment, view=self._view, ids=self._ids, settings=self._settings)
        self._status.pass_s += anyio.current_time() - moment.mono_s
        self._earliest_s = anyio.current_time() + self._config.pass_interval_s
        revision = index.revision
        try:
            done = await committer.commit(plan.groups)
        except LostTerm:
            raise
        except WentBack as error:
            raise LostTerm(str(error)) from error
        except Conflict as error:
            self._back(dirty)
            self._status.commits["conflict"] += 1
            log.warning("the plan's head moved, deciding again", extra={"fields": {"why": str(error)}})
            return
        except StoreError as error:
            self._back(dirty)
            self._status.commits["failed"] += 1
            self._view = msgspec.structs.replace(self._view, write_failed_mono_s=anyio.current_time())
            self._earliest_s = anyio.current_time() + RETRY_S
            log.warning("a commit failed, deciding again", extra={"fields": {"why": str(error)}})
            return
        self._settle(plan, dirty)
        self._tell(plan, done, revision=revision, cause=cause)

    def _take(self, moment: Now) -> Dirty:
        """What this pass must look at: changes, what was left, what time has made due."""
        dirty, self._dirty = self._dirty, Dirty()
        _add(dirty, self._mirror.index.take_dirty())
        _add(dirty, due(self._wake_mono_s, now=moment))
        stepped = self._moment is not None and abs(stepped_s(self._moment, moment)) > STEP_S
        self._moment = moment
        if moment.mono_s >= self._full_s or stepped:
            dirty.everything = True
        return dirty

    def _back(self, dirty: Dirty) -> None:
        """Nothing of this pass is certain: all of it is due again, also what had only a timer."""
        _add(self._dirty, dirty)
        self._more = True

    def _settle(self, plan: Plan, dirty: Dirty) -> None:
        """The pass succeeded: what it looked at is clean, and has the timers that the plan says."""
        _add(self._dirty, plan.left)
        self._more = plan.more
        wake = self._wake_mono_s
        if dirty.everything:  # what it did not get to is in plan.left
            self._full_s = anyio.current_time() + self._config.full_pass_s
            wake.clear()
        for kind, names in (("fleet", ("",)), ("model", dirty.models), ("node", dirty.nodes)):
            for name in names:
                wake.pop((kind, name), None)
        wake.update(plan.wake_mono_s)
        self._wake_next_s = min(wake.values(), default=float("inf"))

    def _tell(self, plan: Plan, done: Committed, *, revision: int, cause: str) -> None:
        """Count the pass; if it did something, one line in the log."""
        status = self._status
        status.passes["wrote" if done.txns else "idle"] += 1
        status.rejected += len(done.rejected)
        for one in done.rejected:
            log.error(
                "this can never be committed, skipped",
                extra={"fields": {"cause": one.group.cause, "why": str(one.error), "term": self._term.number}},
            )
        if done.rejected:
            self._earliest_s = anyio.current_time() + REJECTED_PAUSE_S
        if not done.txns:
            return
        status.commits["landed"] += 1
        counts = plan.counts()
        for one in done.rejected:
            counts[one.group.cause] -= 1
        for name, count in counts.items():
            status.writes[name] = status.writes.get(name, 0) + count
        fields = {"revision": revision, "term": self._term.number, **counts, "txns": done.txns, "cause": cause}
        log.info("pass", extra={"fields": fields})


def _add(dirty: Dirty, other: Dirty) -> None:
    dirty.models |= other.models
    dirty.nodes |= other.nodes
    dirty.everything = dirty.everything or other.everything
