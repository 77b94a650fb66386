"""Which store this is: `meta/store` is made once, and replaced when the store turns out to have gone back in time.

A store restored from a backup can have the same cluster id and serve the same keys with revisions that mean something
else. `deploy/etcd/restore` writes a new incarnation before it lets anybody in; `HighWater` catches the restores that
did not. Only a linearizable reply can show that: those of followers, watches and keepalives lag behind what was.
"""

from __future__ import annotations

import logging
from typing import Final, cast

from llmgw.core.ids import Ids
from llmgw.core.record import StoreMeta
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import CorruptRecord, OutcomeUnknown, WentBack
from llmgw.store import codec, keys
from llmgw.store.port import Compare, KeyValue, PutOp, Store, absent, created_at, unchanged

KEY: Final = keys.key(Ref(Kind.META))
ELECTION: Final = keys.key(Ref(Kind.LEADER))

log = logging.getLogger(__name__)


class HighWater:
    """The highest revision that the present incarnation of the store is known to have reached.

    Ask `mark()` before a call and check its reply against that: of two calls in flight at once the later reply may
    rightly carry the lower revision.
    """

    def __init__(self) -> None:
        self._incarnation = ""
        self._revision = 0

    @property
    def incarnation(self) -> str:
        """The store these revisions are of; empty while unknown."""
        return self._incarnation

    def mark(self) -> int:
        """What a call sent now can't answer less than."""
        return self._revision

    def check(self, revision: int, *, mark: int) -> None:
        """Take note of a reply. Raises WentBack: the store is not the one it was when the call was sent."""
        if revision < mark:
            raise WentBack(seen=mark, got=revision)
        self._revision = max(self._revision, revision)

    def see(self, meta: KeyValue | None, revision: int, *, mark: int) -> None:
        """As `check`, of a reply with `meta/store`; another incarnation begins anew, an unreadable one says nothing."""
        incarnation = "" if meta is None else _incarnation(meta.value)
        if incarnation and incarnation != self._incarnation:
            self.begin(incarnation, revision)
        elif incarnation:
            self.check(revision, mark=mark)

    def note(self, incarnation: str, revision: int) -> None:
        """As `see`, without judging: for those who do not lead."""
        if incarnation != self._incarnation:
            self.begin(incarnation, revision)
        self._revision = max(self._revision, revision)

    def reached(self, revision: int) -> None:
        """A revision this incarnation is known to have reached: a watch lags, but what it tells was committed."""
        self._revision = max(self._revision, revision)

    def begin(self, incarnation: str, revision: int) -> None:
        """From here on the store is `incarnation`: what earlier ones had reached means nothing."""
        self._incarnation, self._revision = incarnation, revision


def _incarnation(value: bytes) -> str:
    try:
        return cast("StoreMeta", codec.decode(Ref(Kind.META), value)).incarnation
    except CorruptRecord:
        return ""


async def ensure(store: Store, ids: Ids) -> None:
    """Create `meta/store` unless it is there. Raises: Unavailable, Denied."""
    while await store.get(KEY) is None:
        meta = StoreMeta(incarnation=ids.token())
        try:
            result = await store.txn([absent(KEY)], [PutOp(key=KEY, value=codec.encode_stored(meta))])
        except OutcomeUnknown:
            continue  # if it landed, the next read sees it; if it lands later, the compare lets only one of them
        if result.ok:
            log.info("a new store", extra={"fields": {"incarnation": meta.incarnation}})


async def replace(store: Store, ids: Ids, *, term: int, old: KeyValue, high_water: HighWater) -> int | None:
    """Say that this is another store than it was, as the leader of `term`; `old` is the `meta/store` that was read.

    Returns:
        The revision written at, None when somebody else was faster or the term is over.

    Raises:
        Unavailable, OutcomeUnknown, Denied. The same call again is harmless: it compares `old`.
    """
    compares: list[Compare] = [created_at(ELECTION, term), unchanged(KEY, old.mod_revision)]
    meta = StoreMeta(incarnation=ids.token())
    result = await store.txn(compares, [PutOp(key=KEY, value=codec.encode_stored(meta))])
    if not result.ok:
        return None
    high_water.begin(meta.incarnation, result.revision)
    log.warning("the store went back in time (a restore)", extra={"fields": {"incarnation": meta.incarnation}})
    return result.revision
