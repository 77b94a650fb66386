"""The kinds of records below `/llmgw/`: where each lives, its type, and what one place of the tree is.

Types only; `llmgw.core.snapshot` folds them into an index, and everybody takes them from there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from llmgw.core.catalog import Alias, EngineSpec, ModelSpec, NodeSpec
from llmgw.core.node import Facts, Fleet, NodeState, Session
from llmgw.core.record import Generation, Head, Leader, Record, Recover, StoreMeta
from llmgw.core.replica import Assignment, EngineSecret, ModelState, Replica, ShardReport


class Kind(enum.Enum):
    """Every kind of record below `/llmgw/`; the value is where it lives. `/` at the end: one key per name."""

    META = "meta/store"
    LEADER = "election/controller"
    GENERATION = "spec/generation"
    MODEL = "spec/models/"
    ALIAS = "spec/aliases/"
    ENGINE = "spec/engines/"
    NODE_SPEC = "spec/nodes/"
    RECOVER = "spec/recover"
    HEAD = "plan/head"
    REPLICA = "plan/replicas/"
    ASSIGNMENT = "plan/assignments/"
    SECRET = "plan/secrets/"  # noqa: S105  # a place, not a password
    FLEET = "plan/fleet"
    NODE_STATE = "plan/nodes/"
    MODEL_STATE = "plan/models/"
    SESSION = "node/session/"
    FACTS = "node/facts/"
    SHARD = "node/shards/"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is written in Python, and asked often

    @property
    def many(self) -> bool:
        """Whether there is one key per name, rather than a single key."""
        return self.value.endswith("/")


RECORDS: Mapping[Kind, type[Record]] = {
    Kind.META: StoreMeta,
    Kind.LEADER: Leader,
    Kind.GENERATION: Generation,
    Kind.MODEL: ModelSpec,
    Kind.ALIAS: Alias,
    Kind.ENGINE: EngineSpec,
    Kind.NODE_SPEC: NodeSpec,
    Kind.RECOVER: Recover,
    Kind.HEAD: Head,
    Kind.REPLICA: Replica,
    Kind.ASSIGNMENT: Assignment,
    Kind.SECRET: EngineSecret,
    Kind.FLEET: Fleet,
    Kind.NODE_STATE: NodeState,
    Kind.MODEL_STATE: ModelState,
    Kind.SESSION: Session,
    Kind.FACTS: Facts,
    Kind.SHARD: ShardReport,
}
"""The record type of each kind."""


class Ref(msgspec.Struct, frozen=True, gc=False):
    """One place in the tree: a kind and, where there are many, the unescaped name (`""` otherwise).

    Assignments and shards are named `<node>/<replica>.<rank>` (`llmgw.core.ids.shard_name`).
    """

    kind: Kind
    name: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One change of one place, as the mirror decoded it. A deletion has neither record nor `corrupt`."""

    ref: Ref
    mod_revision: int
    create_revision: int = 0
    record: Record | None = None
    corrupt: str | None = None

    @property
    def deleted(self) -> bool:
        """Whether the key is gone."""
        return self.record is None and self.corrupt is None


R = TypeVar("R", bound=Record)


class Row(msgspec.Struct, Generic[R], frozen=True, kw_only=True, gc=False):
    """A record and where it stands in history. `record` None: the key is there, but never held a readable value."""

    record: R | None
    mod_revision: int
    create_revision: int
    corrupt: str | None = None


class Table(dict[str, Row[R]], Generic[R]):
    """Rows of one kind by name. `names()` and `records()` are in sorted order, so that input order can't matter."""

    def record(self, name: str) -> R | None:
        """The readable record of `name`; None when the key is absent or never was readable."""
        row = self.get(name)
        return None if row is None else row.record

    def names(self) -> list[str]:
        """All names that have a key, sorted."""
        return sorted(self)

    def records(self) -> Iterator[R]:
        """All readable records, by name."""
        return (row.record for _, row in sorted(self.items()) if row.record is not None)
