"""The fence: turns a plan's groups into transactions that only the present leader, at the present head, can land.

Invariant: every transaction compares the election key's create revision, `meta/store` and `plan/head`, and puts
`plan/head`. The first keeps leaders apart, the last orders one leader's own writes: of all transactions ever made on
one head, at most one lands. A group is never split, so that a process killed between two transactions leaves whole
replicas behind. Nobody is declared Lost who has a session: that is compared as well, because a watch may have lost the
word of its return.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import anyio
import msgspec

from llmgw.core.node import Liveness, NodeState
from llmgw.core.plan import Group, Put, Write
from llmgw.core.record import Head
from llmgw.core.snapshot import Kind, Ref
from llmgw.errors import (
    Conflict,
    CorruptRecord,
    InvariantError,
    LostTerm,
    OutcomeUnknown,
    Outdated,
    TooLarge,
    Unavailable,
)
from llmgw.store import codec, keys
from llmgw.store.incarnation import HighWater
from llmgw.store.limits import PART_OVERHEAD_BYTES
from llmgw.store.port import (
    REQUEST_BYTES_MAX,
    TXN_COMPARES_MAX,
    TXN_OPS_MAX,
    Compare,
    DeleteOp,
    GetOp,
    KeyValue,
    PutOp,
    Store,
    TxnResult,
    absent,
    created_at,
    unchanged,
)

ELECTION: Final = keys.key(Ref(Kind.LEADER))
META: Final = keys.key(Ref(Kind.META))
HEAD: Final = keys.key(Ref(Kind.HEAD))

RETRY_S: Final = 0.5
"""Pause between attempts to settle an unknown outcome."""

FENCE: Final = 3
"""Compares of the fence."""

FENCE_BYTES: Final = 1024
"""Room for the fence in each request: three compares, one put and three reads of keys shorter than 40 bytes."""

PLAN: Final = frozenset(kind for kind in Kind if kind.value.startswith("plan/")) - {Kind.HEAD}
"""What a plan may write. The head is the committer's own."""

log = logging.getLogger(__name__)


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A group that can never be committed, and why; it was skipped."""

    group: Group
    error: TooLarge | InvariantError


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a plan: how many transactions landed, and which groups could not be part of any."""

    txns: int
    rejected: tuple[Rejected, ...] = ()


@dataclass(kw_only=True)
class Bundle:
    """Whole groups that go into one transaction. `size_bytes` counts what they add to the request.

    `gone`: keys that must not be there.
    """

    ops: list[PutOp | DeleteOp] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    size_bytes: int = 0
    keys: set[str] = field(default_factory=set)

    def takes(self, other: Bundle) -> bool:
        """Whether `other` fits in as well. A key can be written once in a transaction, so sharing one does not fit."""
        return (
            len(self.ops) + len(other.ops) < TXN_OPS_MAX  # one is the head's
            and len(self.gone) + len(other.gone) + FENCE <= TXN_COMPARES_MAX
            and self.size_bytes + other.size_bytes + FENCE_BYTES <= REQUEST_BYTES_MAX
            and self.keys.isdisjoint(other.keys)
        )

    def add(self, other: Bundle) -> None:
        """Take `other` in, after what is there."""
        self.ops += other.ops
        self.gone += other.gone
        self.size_bytes += other.size_bytes
        self.keys |= other.keys


def bundle(group: Group) -> Bundle:
    """One group, encoded.

    Raises:
        TooLarge: no transaction can hold it.
        InvariantError: it writes a key twice, or one that is not the leader's to write.
    """
    made = Bundle()
    for write in group.writes:
        key = keys.key(write.ref)
        if write.ref.kind not in PLAN:
            raise InvariantError(4, f"a plan ({group.cause}) writes {key}")
        if key in made.keys:
            raise InvariantError(4, f"a plan ({group.cause}) writes {key} twice in one group")
        value = codec.encode_stored(write.record) if isinstance(write, Put) else None
        made.ops.append(DeleteOp(key=key) if value is None else PutOp(key=key, value=value))
        made.size_bytes += PART_OVERHEAD_BYTES + len(key) + len(value or b"")
        made.keys.add(key)
        if (gone := _gone(write)) is not None:
            made.gone.append(gone)
            made.size_bytes += PART_OVERHEAD_BYTES + len(gone)
    what = f"{group.cause} of {group.writes[0].ref.name!r}" if group.writes else group.cause
    if len(made.ops) >= TXN_OPS_MAX:
        raise TooLarge(what=what, size=len(made.ops), limit=TXN_OPS_MAX - 1, unit="operations")
    if made.size_bytes + FENCE_BYTES > REQUEST_BYTES_MAX:
        raise TooLarge(what=what, size=made.size_bytes, limit=REQUEST_BYTES_MAX - FENCE_BYTES, unit="bytes")
    return made


def _gone(write: Write) -> str | None:
    """What must not be there for `write` to be right: the session of a node that is declared Lost."""
    if not isinstance(write, Put) or not isinstance(write.record, NodeState):
        return None
    return keys.key(Ref(Kind.SESSION, write.ref.name)) if write.record.liveness is Liveness.LOST else None


def pack(groups: Iterable[Group]) -> tuple[list[Bundle], list[Rejected]]:
    """Groups in their order, as few bundles as that order allows; those that fit nowhere apart, with the reason."""
    bundles: list[Bundle] = []
    rejected: list[Rejected] = []
    for group in groups:
        try:
            made = bundle(group)
        except (TooLarge, InvariantError) as error:
            rejected.append(Rejected(group=group, error=error))
            continue
        if bundles and bundles[-1].takes(made):
            bundles[-1].add(made)
        else:
            bundles.append(made)
    return bundles, rejected


class Committer:
    """The one writer below `plan/` in this process, for one term. Not for two tasks at once.

    Args:
        store: where to.
        term: create revision of our election key.
        meta_rev: mod revision of the `meta/store` this term began with; another one ends the term.
        head: `plan/head` as a linearizable read gave it, None when absent.
        high_water: checked with every reply.
    """

    def __init__(self, store: Store, *, term: int, meta_rev: int, head: KeyValue | None, high_water: HighWater) -> None:
        self._store, self._term, self._meta_rev, self._high_water = store, term, meta_rev, high_water
        self._commits = 0
        self.head_rev = 0
        """Mod revision of the newest `plan/head` known; the next plan must be made from a mirror that has it."""
        self._take(head)

    async def commit(self, groups: Sequence[Group]) -> Committed:
        """Land `groups` in order. On any error the transactions before it have landed and none after it has.

        Raises:
            LostTerm: another leads, or the store is another one.
            Conflict: the head was moved by somebody else; `head_rev` is where it is now.
            Outdated: a node that was to be declared Lost is there.
            OutcomeUnknown: a write timed out. That is settled: whether it landed shows at `head_rev`, and it can't any
                more once this is raised.
            NotApplied, Denied: nothing more happened. WentBack: the store was restored under us.
        """
        bundles, rejected = pack(groups)
        for one in bundles:
            try:
                await self._extend(one.ops, one.gone)
            except OutcomeUnknown:
                await self._settle()
                raise
        return Committed(txns=len(bundles), rejected=tuple(rejected))

    async def _settle(self) -> None:
        """After a write that timed out: move the head ourselves, so that either it has landed by now or never will."""
        while True:
            try:
                await self._extend(())
            except Conflict as error:
                if isinstance(error, LostTerm):
                    raise
                return  # the head has moved: the one that timed out has landed, or an earlier attempt at this
            except (Unavailable, OutcomeUnknown) as error:
                log.warning("an unknown outcome is not settled yet", extra={"fields": {"why": str(error)}})
                await anyio.sleep(RETRY_S)
            else:
                return

    async def _extend(self, ops: Sequence[PutOp | DeleteOp], gone: Sequence[str] = ()) -> None:
        """One fenced transaction on the head we know. Raises as `commit`, with OutcomeUnknown unsettled."""
        compares: list[Compare] = [
            created_at(ELECTION, self._term),
            unchanged(META, self._meta_rev),
            unchanged(HEAD, self.head_rev),
            *(absent(key) for key in gone),
        ]
        head = Head(commits=self._commits + 1, term=self._term)
        put = PutOp(key=HEAD, value=codec.encode_stored(head))
        mark = self._high_water.mark()
        result = await self._store.txn(compares, [*ops, put], [GetOp(key=key) for key in (ELECTION, META, HEAD)])
        self._high_water.check(result.revision, mark=mark)
        if not result.ok:
            self._refused(result)
        self.head_rev, self._commits = result.revision, head.commits

    def _refused(self, result: TxnResult) -> None:
        """Find out which compare failed. Raises: LostTerm, Conflict."""
        election, meta, head = (next(iter(found), None) for found in result.reads)
        if election is None or election.create_revision != self._term:
            raise LostTerm("the election key is gone" if election is None else "another controller leads")
        if meta is None or meta.mod_revision != self._meta_rev:
            raise LostTerm("the store's incarnation was changed")
        known = self.head_rev
        self._take(head)
        if self.head_rev == known:
            raise Outdated("a node that was to be declared Lost is there")
        raise Conflict(f"plan/head is at revision {self.head_rev}, not at {known}")

    def _take(self, head: KeyValue | None) -> None:
        """Note where the head is. The chain is its mod revision; the counter is only for people."""
        self.head_rev = 0 if head is None else head.mod_revision
        if head is None:
            self._commits = 0
            return
        try:
            self._commits = cast("Head", codec.decode(Ref(Kind.HEAD), head.value)).commits
        except CorruptRecord as error:
            log.error("corrupt record", extra={"fields": {"key": error.key, "why": error.why}})  # noqa: TRY400  # a value, not a fault
            self._commits = head.version
