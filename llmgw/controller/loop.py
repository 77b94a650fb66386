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
from llmgw.controller.commit import Committed, Committer
from llmgw.controller.footing import RETRY_S, Footing
from llmgw.controller.load import Sampler
from llmgw.core.ids import Ids
from llmgw.core.live import LoadView
from llmgw.core.liveness import observe
from llmgw.core.plan import Plan, Settings, View, Wake, WakeKey
from llmgw.core.reconcile import due, reconcile
from llmgw.core.record import Leader
from llmgw.core.snapshot import Dirty, Index
from llmgw.core.units import Now, stepped_s
from llmgw.errors import Conflict, LostTerm, Outdated, StoreError, WentBack
from llmgw.obs.clock import WallClock, now
from llmgw.obs.status import ControllerStatus
from llmgw.store import incarnation, keys
from llmgw.store.election import Term, check_durations, lead
from llmgw.store.follow import Jitter, ungrouped
from llmgw.store.incarnation import HighWater
from llmgw.store.mirror import Mirror, mirror
from llmgw.store.port import Store

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
                                jitter=jitter,
                                status=status,
                                decide=decide,
                            )
                            try:
                                await reign.run()
                            finally:
                                status.term, status.load = None, None
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
        jitter: Jitter,
        status: ControllerStatus,
        decide: Decide,
    ) -> None:
        self._config, self._term, self._mirror = config, term, mirror
        self._wall, self._ids, self._status = wall, ids, status
        self._decide, self._settings = decide, settings(config)
        self._view = View()
        self._dirty = Dirty(everything=True)
        self._more = False
        self._wake_mono_s: dict[WakeKey, float] = {}
        self._wake_next_s = self._full_s = 0.0
        self._earliest_s = 0.0
        self._moment: Now | None = None
        self._ttls_s: set[int] = set()
        self._pause: anyio.CancelScope | None = None
        self._footing = Footing(store, term=term, mirror=mirror, high_water=high_water, ids=ids)
        self._sampler = Sampler(
            store,
            mirror.index,
            every_s=config.scale_every_s,
            relist_s=config.etcd.relist_s,
            lost_after_s=config.lost_after_s,
            wall=wall,
            jitter=jitter,
            sampled=self._sampled,
        )

    async def run(self) -> None:
        """Passes until cancelled. Raises: LostTerm; StoreError when a restored store could not be marked as one."""
        committer = await self._footing.begin()
        await self._footing.look_afresh()
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sampler.run)
                while True:
                    await anyio.lowlevel.checkpoint()
                    await self._footing.caught_up(committer.head_rev)
                    cause = await self._due()
                    await self._pass(committer, cause)

    # --- one pass ---

    async def _due(self) -> str:
        """Until a pass is due; returns its cause. Changes are gathered for at least the pass interval."""
        while True:
            await self._footing.judge()
            moment = anyio.current_time()
            cause, due_s = self._next()
            due_s = max(due_s, self._earliest_s)
            if due_s <= moment:
                return cause
            with anyio.CancelScope(deadline=due_s) as self._pause:
                await self._mirror.wait_changed(self._mirror.changes)
            self._pause = None

    def _sampled(self, load: LoadView, models: set[str]) -> None:
        """Load was sampled. What it moves is due at once; a sample that moves nothing wakes nobody."""
        self._view = msgspec.structs.replace(self._view, load=load)
        self._status.load = load
        self._dirty.models |= models
        if models and self._pause is not None:
            self._pause.cancel()

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
        self._compare_ttls(dirty)
        failed_s = self._term.failed_mono_s
        if failed_s is not None and failed_s > (self._view.write_failed_mono_s or 0.0):
            self._view = msgspec.structs.replace(self._view, write_failed_mono_s=failed_s)
        self._view = observe(self._view, index, now=moment)
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
            log.warning("not committed, deciding again", extra={"fields": {"why": str(error)}})
            if isinstance(error, Outdated):
                self._mirror.start_over()
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
        dirty.add(self._mirror.index.take_dirty())
        dirty.add(due(self._wake_mono_s, now=moment))
        stepped = self._moment is not None and abs(stepped_s(self._moment, moment)) > STEP_S
        self._moment = moment
        if moment.mono_s >= self._full_s or stepped:
            dirty.everything = True
            self._full_s = moment.mono_s + self._config.full_pass_s
        return dirty

    def _compare_ttls(self, dirty: Dirty) -> None:
        """Say once of each session TTL that agents have that it is not the one that their absence is judged by."""
        sessions, ours_s = self._mirror.index.sessions, self._settings.session_ttl_s
        for name in sessions.names() if dirty.everything else dirty.nodes:
            session = sessions.record(name)
            ttl_s = None if session is None else session.ttl_s
            if ttl_s is None or ttl_s in self._ttls_s or abs(ttl_s - ours_s) < 1:  # etcd counts whole seconds
                continue
            self._ttls_s.add(ttl_s)
            log.warning(
                "an agent's session_ttl_s is not the controllers'",
                extra={"fields": {"node": name, "ttl_s": ttl_s, "session_ttl_s": ours_s}},
            )

    def _back(self, dirty: Dirty) -> None:
        """Nothing of this pass is certain: all of it is due again, also what had only a timer."""
        self._dirty.add(dirty)
        self._more = True

    def _settle(self, plan: Plan, dirty: Dirty) -> None:
        """The pass succeeded: what it looked at is clean, and has the timers that the plan says.

        A look at everything, which may take many passes, sets timers anew but takes none away: one that has become
        pointless costs a pass.
        """
        self._dirty.add(plan.left)
        self._more = plan.more
        wake = self._wake_mono_s
        for kind, names in ((Wake.MODEL, dirty.models - plan.left.models), (Wake.NODE, dirty.nodes - plan.left.nodes)):
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
