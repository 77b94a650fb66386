"""What was so until lately: remembered for some commits; deleted reports go on proving what they said."""

from __future__ import annotations

from llmgw.core.lately import SPAN_COMMITS, Lately
from llmgw.core.record import Head
from llmgw.core.replica import ShardPhase, ShardReport
from llmgw.core.snapshot import Change, Index, Kind, Ref

NAME = "n1/m-aaaaa.0"


def report(phase: ShardPhase) -> ShardReport:
    return ShardReport(node="n1", replica="m-aaaaa", rank=0, model="m", phase=phase, phase_at=0.0, assignment_rev=3)


def tell(lately: Lately, index: Index, record: ShardReport | None) -> None:
    revision = index.revision + 1
    change = Change(ref=Ref(Kind.SHARD, NAME), mod_revision=revision, create_revision=revision, record=record)
    lately.note(index, [change])
    index.apply([change], revision=revision)


def commit(lately: Lately, index: Index) -> None:
    revision = index.revision + 1
    head = index.head
    commits = 0 if head is None or head.record is None else head.record.commits
    record = Head(commits=commits + 1, term=1)
    change = Change(ref=Ref(Kind.HEAD), mod_revision=revision, create_revision=1, record=record)
    lately.note(index, [change])
    index.apply([change], revision=revision)


def test_a_report_that_somebody_deleted_still_counts_for_a_while() -> None:
    lately, index = Lately(), Index()
    tell(lately, index, report(ShardPhase.STOPPED))
    tell(lately, index, None)
    assert [each.phase for each in lately.reports(index, NAME)] == [ShardPhase.STOPPED]
    for _ in range(SPAN_COMMITS + 2):
        commit(lately, index)
    assert lately.reports(index, NAME) == []


def test_a_report_that_its_node_has_overtaken_counts_no_more() -> None:
    lately, index = Lately(), Index()
    tell(lately, index, report(ShardPhase.READY))
    tell(lately, index, report(ShardPhase.DRAINING))
    assert [each.phase for each in lately.reports(index, NAME)] == [ShardPhase.DRAINING]


def test_where_plans_are_applied_to_the_tree_they_were_made_from_only_the_present_counts() -> None:
    lately, index = Lately(late=False), Index()
    tell(lately, index, report(ShardPhase.STOPPED))
    tell(lately, index, None)
    assert lately.reports(index, NAME) == []
