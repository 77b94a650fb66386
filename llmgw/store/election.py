"""Leading: one leased key, and a cancel scope that ends before the lease can.

Nobody leads because they believe so. The key `election/controller` is created by a transaction that demands its
absence, and it hangs on a lease; its create revision is the term, and every write of a leader compares it. What this
module adds to that fence is politeness: the scope is cancelled at (send time of the last good keepalive + TTL - margin)
on this process's own monotonic clock, so a leader that can't renew stops before another can begin.

What it does not promise: that no two processes ever run the body at once. A frozen process wakes up in the middle of
it. The fence alone makes that harmless.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, cast

import anyio

from llmgw.core.record import FORMAT, Leader, StoreMeta
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import CorruptRecord, Denied, Invalid, LeaseLost, LostTerm, OutcomeUnknown, Problem, StoreError
from llmgw.store import codec, keys
from llmgw.store.follow import ungrouped
from llmgw.store.incarnation import HighWater
from llmgw.store.port import PutOp, Store, absent

KEY: Final = keys.key(Ref(Kind.LEADER))
META: Final = keys.key(Ref(Kind.META))

RETRY_S: Final = 0.5
"""Pause after a failed call. A call that is refused at once must not become a hot loop."""

RENEW_AGAIN_S: Final = 0.2
"""Pause after a failed keepalive. Shorter: after one that timed out there is little time left for the next."""

SAY_AGAIN_S: Final = 60.0
"""A standby that can only wait repeats its one log line this often."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Term:
    """One reign. `number` is the create revision of the election key, which fences every write.

    Moments are on this process's monotonic clock. `renewed_mono_s`: when the last good keepalive was sent;
    `until_mono_s`: when the scope ends unless another one succeeds; `failed_mono_s`: when one last failed.
    """

    number: int
    lease: int
    renewed_mono_s: float
    until_mono_s: float
    failed_mono_s: float | None = None


def check_durations(*, ttl_s: float, keepalive_s: float, margin_s: float, call_timeout_s: float) -> None:
    """Refuse durations under which a leader could outlive its lease, or lose it to one slow call.

    The margin covers a call in flight when the scope ends; two keepalives must fit before that moment.

    Raises:
        Invalid: naming every rule broken, with its values.
    """
    problems = []
    if min(ttl_s, keepalive_s, margin_s, call_timeout_s) <= 0:
        problems.append(
            f"ttl_s ({ttl_s:g}), keepalive_s ({keepalive_s:g}), margin_s ({margin_s:g}) and the call time-out"
            f" ({call_timeout_s:g}) must all be above 0"
        )
    if margin_s < call_timeout_s:
        problems.append(
            f"margin_s is {margin_s:g}, it must be at least the call time-out,"
            f" etcd.connect_timeout_s + etcd.read_timeout_s = {call_timeout_s:g}"
        )
    if 2 * keepalive_s > ttl_s - margin_s:
        problems.append(
            f"2 × keepalive_s is {2 * keepalive_s:g}, it must be at most ttl_s - margin_s ="
            f" {ttl_s:g} - {margin_s:g} = {ttl_s - margin_s:g}"
        )
    if problems:
        raise Invalid(tuple(Problem(message=text) for text in problems))


@asynccontextmanager
async def lead(
    store: Store,
    leader: Leader,
    *,
    ttl_s: float,
    keepalive_s: float,
    margin_s: float,
    call_timeout_s: float,
    high_water: HighWater | None = None,
) -> AsyncIterator[Term]:
    """Stand for election until won, then run the body as leader.

    The body is cancelled as soon as leadership may be over. However it ends, the lease is revoked if that is still
    possible, so that the next leader acts within half a second. It does not stand while `meta/store` is absent,
    unreadable or of a newer format than this program knows. `high_water` is told what is read while standing.

    Raises:
        Invalid: the durations don't fit (`check_durations`), before anything is sent.
        LostTerm: leadership ended before the body did.
        Denied: the store refuses us. Anything the body raises passes through as it is.
    """
    check_durations(ttl_s=ttl_s, keepalive_s=keepalive_s, margin_s=margin_s, call_timeout_s=call_timeout_s)
    campaign = _Campaign(
        store,
        leader,
        ttl_s=ttl_s,
        margin_s=margin_s,
        call_timeout_s=call_timeout_s,
        high_water=high_water or HighWater(),
    )
    term = await campaign.win()
    log.info("leading", extra={"fields": {"term": term.number, "id": leader.id}})
    reign = _Reign(store, term, ttl_s=ttl_s, keepalive_s=keepalive_s, margin_s=margin_s)
    finished = False
    try:
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                reign.scope = tasks.cancel_scope
                tasks.cancel_scope.deadline = term.until_mono_s
                tasks.start_soon(reign.renew)
                tasks.start_soon(reign.watch)
                yield term
                finished = True
                tasks.cancel_scope.cancel()
    finally:
        if not reign.lease_lost:
            await _revoke(store, term.lease, within_s=call_timeout_s)
    if not finished:
        raise LostTerm(reign.why or f"no keepalive succeeded for {ttl_s - margin_s:g} s")


class _Campaign:
    """Standing for election."""

    def __init__(
        self,
        store: Store,
        leader: Leader,
        *,
        ttl_s: float,
        margin_s: float,
        call_timeout_s: float,
        high_water: HighWater,
    ) -> None:
        self._store = store
        self._high_water = high_water
        self._value = codec.encode_stored(leader)
        self._ttl_s, self._margin_s, self._call_timeout_s = ttl_s, margin_s, call_timeout_s
        self._said: tuple[str, dict[str, object]] = ("", {})
        self._said_mono_s = 0.0

    async def win(self) -> Term:
        """Wait until the key is free, take it. Store trouble is waited out. Raises: Denied."""
        while True:
            try:
                if await self._may_stand() and await self._vacant() and (term := await self._claim()) is not None:
                    return term
            except Denied:
                raise
            except StoreError as error:
                self._say(logging.WARNING, "can't stand for election", why=str(error))
                await anyio.sleep(RETRY_S)

    def _say(self, level: int, text: str, **fields: object) -> None:
        """Log this unless it is what was said last, less than `SAY_AGAIN_S` ago."""
        said, now = (text, fields), anyio.current_time()
        if said != self._said or now >= self._said_mono_s + SAY_AGAIN_S:
            self._said, self._said_mono_s = said, now
            log.log(level, text, extra={"fields": fields})

    async def _may_stand(self) -> bool:
        """Whether this program may write the store's format. If not, comes back when that may have changed."""
        listing = await self._store.list([META])
        why = "the store has no meta/store yet"
        if listing.items:
            try:
                meta = cast("StoreMeta", codec.decode(Ref(Kind.META), listing.items[0].value))
            except CorruptRecord as error:
                why = str(error)
            else:
                self._high_water.note(meta.incarnation, listing.revision)
                if meta.format <= FORMAT:
                    return True
                why = f"the store's format is {meta.format}, this controller knows up to {FORMAT}: upgrade it"
        self._say(logging.WARNING, "not standing for election", why=why)
        await _change(self._store, META, listing.revision, within_s=self._ttl_s)
        return False

    async def _vacant(self) -> bool:
        """Whether nobody leads. If somebody does, comes back when that may have changed."""
        listing = await self._store.list([KEY])
        if not listing.items:
            return True
        holder = listing.items[0]
        leader = _holder(holder.value)
        if holder.lease == 0:
            why = f"it has no lease, so it never lapses: delete {KEY} once nobody leads"
            self._say(logging.WARNING, "somebody wrote the election key by hand", leader=leader, why=why)
        else:
            self._say(logging.INFO, "standing by", term=holder.create_revision, leader=leader)
        await _change(self._store, KEY, listing.revision, within_s=self._ttl_s)
        return False

    async def _claim(self) -> Term | None:
        """Try to create the key, then make sure that it and its lease are ours. None: another was faster."""
        lease = await self._store.grant(math.ceil(self._ttl_s))
        term = None
        try:
            try:
                result = await self._store.txn([absent(KEY)], [PutOp(key=KEY, value=self._value, lease=lease.id)])
                if not result.ok:
                    return None
            except OutcomeUnknown:
                # The lease is this attempt's own, so reading the key below tells whether it landed; if it did not,
                # revoking the lease keeps it from landing later.
                log.warning("the outcome of the election is unknown, reading it back")
            sent_s = anyio.current_time()
            ttl_s = min(self._ttl_s, await self._store.keepalive(lease.id))
            held = await self._store.get(KEY)
            if held is not None and held.lease == lease.id and held.value == self._value:
                term = Term(
                    number=held.create_revision,
                    lease=lease.id,
                    renewed_mono_s=sent_s,
                    until_mono_s=sent_s + ttl_s - self._margin_s,
                )
            return term
        finally:
            if term is None:
                await _revoke(self._store, lease.id, within_s=self._call_timeout_s)


class _Reign:
    """What runs beside the body: renewing, and noticing that the key is no longer ours."""

    def __init__(self, store: Store, term: Term, *, ttl_s: float, keepalive_s: float, margin_s: float) -> None:
        self._store, self._term = store, term
        self._ttl_s, self._keepalive_s, self._margin_s = ttl_s, keepalive_s, margin_s
        self.scope = anyio.CancelScope()
        self.why = ""
        self.lease_lost = False

    async def renew(self) -> None:
        """Keep the lease alive; each success moves the scope's dead-line. Failures are retried until it is reached."""
        term = self._term
        await anyio.sleep_until(term.renewed_mono_s + self._keepalive_s)
        while True:
            sent_s = anyio.current_time()
            try:
                ttl_s = min(self._ttl_s, await self._store.keepalive(term.lease))
            except LeaseLost as error:
                self.lease_lost = True
                self._end(str(error))
                return
            except StoreError as error:
                if term.failed_mono_s is None or term.failed_mono_s < term.renewed_mono_s:
                    left_s = round(term.until_mono_s - anyio.current_time(), 1)
                    log.warning("a keepalive failed", extra={"fields": {"why": str(error), "left_s": left_s}})
                term.failed_mono_s = anyio.current_time()
                await anyio.sleep(RENEW_AGAIN_S)
                continue
            term.renewed_mono_s = sent_s
            term.until_mono_s = self.scope.deadline = sent_s + ttl_s - self._margin_s
            await anyio.sleep_until(sent_s + self._keepalive_s)

    async def watch(self) -> None:
        """End the scope when the key is gone or another's, which keepalives alone would never show."""
        while True:
            try:
                listing = await self._store.list([KEY])
                if not listing.items or listing.items[0].create_revision != self._term.number:
                    self._end("the election key is another's" if listing.items else "the election key is gone")
                    return
                await _change(self._store, KEY, listing.revision, within_s=self._ttl_s)
            except StoreError as error:
                log.debug("can't watch the election key", extra={"fields": {"why": str(error)}})
                await anyio.sleep(RETRY_S)

    def _end(self, why: str) -> None:
        self.why = self.why or why
        self.scope.cancel()


async def _change(store: Store, key: str, revision: int, *, within_s: float) -> None:
    """Wait for a change of `key` after `revision`, at most `within_s`: a watch that died unnoticed costs only that."""
    with anyio.move_on_after(within_s):
        async with store.watch([key], from_revision=revision + 1) as batches:
            async for batch in batches:
                if batch.events:
                    return


async def _revoke(store: Store, lease: int, *, within_s: float) -> None:
    """End a lease if the store can be reached, also while being cancelled. Otherwise it lapses by itself."""
    with anyio.move_on_after(within_s, shield=True):
        try:
            await store.revoke(lease)
        except StoreError as error:
            log.warning("can't revoke the lease; it will lapse", extra={"fields": {"lease": lease, "why": str(error)}})


def _holder(value: bytes) -> str:
    """Who holds the key, for a log line."""
    try:
        held = cast("Leader", codec.decode(Ref(Kind.LEADER), value))
    except CorruptRecord:
        return "somebody unreadable"
    return f"{held.id} ({held.address})"
