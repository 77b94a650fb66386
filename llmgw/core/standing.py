"""What of the tree concerns more than one node or model, kept up change by change so that no pass has to look for it.

Part of the `Index` and a fold as that is: it follows from the tables alone, in whatever order they were filled. It
holds names only and decides nothing; what each set means is said with it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from llmgw.core.catalog import NodeSpec
from llmgw.core.node import Liveness, NodeState
from llmgw.core.replica import GONE, ModelState, ShardReport


def _by_liveness() -> dict[Liveness, set[str]]:
    return {each: set() for each in Liveness}


@dataclass
class Standing:
    """Names by what their records say; of a record that can't be read now, by the last that could."""

    nodes: list[str] = field(default_factory=list)
    """Every node that has a session, facts or a state, sorted. A mere `spec/nodes` entry is not a node."""
    absent: set[str] = field(default_factory=set)
    """Nodes with facts or a state and without a session."""
    liveness: dict[Liveness, set[str]] = field(default_factory=_by_liveness)
    """Nodes by what `plan/nodes` says of them."""
    doubted: set[str] = field(default_factory=set)
    """Nodes of which people say that they are gone: their absence is real (`release`), or for good (`forget`)."""
    pending: set[str] = field(default_factory=set)
    """Models with something that fits nowhere: any change of any node may change that."""
    unassigned: set[str] = field(default_factory=set)
    """Shards that say of themselves that they run without an order."""
    orphans: set[str] = field(default_factory=set)
    """Orders that no replica speaks of: it is not there, or holds nothing there (any more)."""

    unread: set[str] = field(default_factory=set)
    """Replicas whose record was never readable here: only their orders and reports say of which model they are."""

    def node(self, name: str, *, known: bool, session: bool) -> None:
        """A node has facts or a state (`known`), has a session, or not."""
        at = bisect_left(self.nodes, name)
        there = at < len(self.nodes) and self.nodes[at] == name
        if (known or session) and not there:
            self.nodes.insert(at, name)
        elif there and not known and not session:
            del self.nodes[at]
        _put(self.absent, name, among=known and not session)

    def node_state(self, name: str, old: NodeState | None, new: NodeState | None) -> None:
        """What `plan/nodes` says of a node."""
        if old is not None:
            self.liveness[old.liveness].discard(name)
        if new is not None:
            self.liveness[new.liveness].add(name)

    def node_spec(self, name: str, spec: NodeSpec | None) -> None:
        """What people say of a node."""
        _put(self.doubted, name, among=spec is not None and (spec.release is not None or spec.forget is not None))

    def model_state(self, name: str, state: ModelState | None) -> None:
        """How the leader sees a model."""
        _put(self.pending, name, among=state is not None and state.unplaced is not None)

    def report(self, name: str, report: ShardReport | None) -> None:
        """What a node says of a shard."""
        _put(self.unassigned, name, among=report is not None and not report.assigned and report.phase not in GONE)

    def order(self, name: str, *, orphan: bool) -> None:
        """Whether an order is there that no replica speaks of."""
        _put(self.orphans, name, among=orphan)

    def replica(self, name: str, *, unread: bool) -> None:
        """Whether a replica is there of which nobody here has ever read what it is."""
        _put(self.unread, name, among=unread)

    @property
    def unanswered(self) -> set[str]:
        """Shards and orders that may need a word (`llmgw.core.adoption`). Usually none."""
        return self.unassigned | self.orphans


def _put(names: set[str], name: str, *, among: bool) -> None:
    if among:
        names.add(name)
    else:
        names.discard(name)
