"""What one reign stands on: its election, the store it began with, and the head that its next plan must see.

Invariant: nothing that a mirror shows is acted on before it has applied our own election, the store's incarnation and
our last commit; a store that went back in time ends the term, or becomes another one before anything is decided.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio

from llmgw.controller.commit import ELECTION, HEAD, META, Committer
from llmgw.core.ids import Ids
from llmgw.errors import LostTerm, StoreError, WentBack
from llmgw.store import incarnation
from llmgw.store.election import Term
from llmgw.store.incarnation import HighWater
from llmgw.store.mirror import Mirror
from llmgw.store.port import KeyValue, Store

RETRY_S: Final = 1.0
"""Pause after a commit or a read of the leader failed, and before standing again after a lost term."""

LOST_S: Final = 2.0
"""For so long our last commit may be missing from a mirror that has seen later revisions; then its watch has lost it.
Word of progress that was asked for may overtake events (etcd before 3.4.25 and 3.5.8, etcd-io/etcd#15220)."""

log = logging.getLogger(__name__)


class Footing:
    """One term, the mirror it looks through, and whether the two speak of the same store."""

    def __init__(self, store: Store, *, term: Term, mirror: Mirror, high_water: HighWater, ids: Ids) -> None:
        self._store, self._term, self._mirror = store, term, mirror
        self._high_water, self._ids = high_water, ids
        self._resets = dict(mirror.resets)
        self._meta_rev = 0

    async def begin(self) -> Committer:
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

    async def look_afresh(self) -> None:
        """List everything once at the beginning of a reign. Raises: LostTerm.

        The mirror of one who stood by may lack what its watch lost (some etcd releases do), or have followed two stores
        as if they were one, and no revision would tell. While leading, all of plan/ is our own writing.
        """
        listed = sum(self._mirror.resets.values())
        while sum(self._mirror.resets.values()) == listed:
            changes = self._mirror.changes
            self._mirror.start_over()
            await self._mirror.wait_changed(changes)

    async def caught_up(self, head_rev: int) -> None:
        """Until the mirror has applied our own election, the store's incarnation, and the head. Raises: LostTerm.

        A revision alone proves nothing: a mirror that still shows a store from before its restore has seen higher ones.
        Only with our election and our incarnation in it are its revisions those of this store. One that is past the
        head's revision and still has not seen it has a watch that lost it, and lists afresh.
        """
        past_s: float | None = None
        while True:
            await self.judge()
            head = self._mirror.index.head
            if self._same_store and (0 if head is None else head.mod_revision) >= head_rev:
                return
            now_s, past = anyio.current_time(), self._mirror.revision >= head_rev
            if self._has_our_election and self._mirror.revision >= self._meta_rev and not self._same_store:
                self._mirror.start_over()  # it followed two stores as if they were one
            elif self._same_store and past and past_s is not None and now_s >= past_s + LOST_S:
                self._mirror.start_over()
            past_s = (now_s if past_s is None else past_s) if past else None
            with anyio.move_on_after(LOST_S):
                await self._mirror.wait_heard()

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

    async def judge(self) -> None:
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
