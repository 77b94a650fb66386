"""Refusals as sentences, bounded and ordered."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.core.explain import (
    DETAIL_LEN_MAX,
    HOLDERS_MAX,
    NEAREST_MAX,
    RECEIPT_BYTES_MAX,
    Constraint,
    Receipt,
    Refusal,
    Score,
    Unplaced,
    bounded_holders,
    clip,
    counted,
    nearest,
    same_but_numbers,
)
from llmgw.core.ids import NAME_LEN_MAX
from llmgw.core.placement import rejected
from llmgw.core.refusal_words import remedy, render, render_at, summarise
from llmgw.core.units import GB

C = Constraint


def refusal(constraint: Constraint, **fields: object) -> Refusal:
    return msgspec.structs.replace(Refusal(constraint=constraint, profile="cpu", node="n1"), **fields)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (refusal(C.MEMORY_TOTAL, total=8 * GB, needed=24 * GB), "has 8 GB of memory, needs 24"),
        (refusal(C.MEMORY_TOTAL, total=8 * GB, needed=24 * GB + GB // 2), "has 8 GB of memory, needs 24.5"),
        (refusal(C.MEMORY_TOTAL, total=50 * 10**6, needed=2 * GB), "has 50 MB of memory, needs 2 GB"),
        (
            refusal(C.MEMORY, needed=15 * GB, total=31 * GB, free=15 * GB - 1, holders=(("qwen-7b-ab12c", 16 * GB),)),
            "needs 15 GB; 31 GB in all, 16 GB promised to qwen-7b-ab12c",
        ),
        (
            refusal(C.MEMORY, needed=GB, total=3 * GB, holders=(("a-1", 2 * GB), ("b-1", GB), ("", 5 * 10**6))),
            "needs 1 GB; 3 GB in all, 2 GB promised to a-1, 1 GB to b-1, 5 MB to others",
        ),
        (
            refusal(C.MEMORY, needed=GB, total=GB, detail="1 GB used without a claim by x-1"),
            "needs 1 GB; 1 GB in all, 1 GB used without a claim by x-1",
        ),
        (refusal(C.NOT_READY, detail="unreachable"), "is unreachable"),
        (refusal(C.CORDONED, detail="is cordoned"), "is cordoned"),
        (refusal(C.SELECTOR, detail="has no label zone, needs zone=x"), "has no label zone, needs zone=x"),
        (refusal(C.ENGINE_UNCHECKED), "engines not checked yet"),
        (refusal(C.ENGINE_UNCHECKED, detail="installing"), "engines not checked yet: installing"),
        (refusal(C.ENGINE_MISSING, detail="has no vllm"), "has no vllm"),
        (refusal(C.ENGINE_VERSION, detail="has vllm 1, needs 2"), "has vllm 1, needs 2"),
        (refusal(C.UNACCOUNTED, detail="x-1"), "runs x-1, and what that holds is not known yet"),
        (refusal(C.SHARDS_MAX, total=60), "holds 60 shards, and no node takes more"),
        (refusal(C.NO_NODES), "there is no node yet"),
        (refusal(C.NO_PROFILES), "the model has no profile"),
        (refusal(C.RESTORING), "the store was restored: waiting until every node has reported"),
        (refusal(C.GPU_CLAIMED, detail="GPU 0 is claimed by x-1"), "GPU 0 is claimed by x-1"),
        (refusal(C.FABRIC), "fabric"),
    ],
)
def test_each_refusal_is_one_plain_sentence(given: Refusal, said: str) -> None:
    assert render(given) == said


def test_a_constraint_that_only_a_newer_leader_knows_is_read_and_said_in_its_words() -> None:
    written = msgspec.json.encode({"constraint": "too_hot", "profile": "cpu", "node": "n1", "detail": "runs at 95 °C"})
    read = msgspec.json.decode(written, type=Refusal)
    assert read.constraint is C.OTHER
    assert render_at(read) == "n1 (cpu): runs at 95 °C"


def test_every_constraint_can_be_said() -> None:
    for constraint in Constraint:
        assert render(refusal(constraint, detail="words", needed=1, total=1)).strip()


def test_a_sentence_names_its_node_and_profile() -> None:
    full = refusal(C.CORDONED, detail="is cordoned")
    assert render_at(full) == "n1 (cpu): is cordoned"
    assert render_at(msgspec.structs.replace(full, profile="")) == "n1: is cordoned"
    assert render_at(msgspec.structs.replace(full, node="")) == "cpu: is cordoned"
    assert render_at(Refusal(constraint=C.NO_PROFILES, profile="")) == "the model has no profile"


def test_the_nearest_misses_come_first_and_few() -> None:
    small = refusal(C.MEMORY, node="n9", needed=10, free=9)
    large = refusal(C.MEMORY, node="n2", needed=10, free=1)
    never = refusal(C.MEMORY_TOTAL, node="n0", needed=10, total=5)
    off = refusal(C.SELECTOR, node="n3")
    assert nearest([off, never, large, small]) == (small, large, never, off)
    assert len(nearest([large] * 9)) == NEAREST_MAX
    assert nearest([]) == ()


def test_refusals_are_counted_by_constraint() -> None:
    assert counted([refusal(C.MEMORY), refusal(C.CORDONED), refusal(C.MEMORY)]) == {"cordoned": 1, "memory": 2}


def test_holders_beyond_the_largest_are_summed_up() -> None:
    holders = [(f"r{i}", i) for i in range(1, 9)]
    assert bounded_holders(holders) == (("r8", 8), ("r7", 7), ("r6", 6), ("r5", 5), ("r4", 4), ("", 6))
    assert bounded_holders(holders[:2]) == (("r2", 2), ("r1", 1))


def test_words_of_nodes_are_cut_and_put_on_one_line() -> None:
    assert clip(" a\n\tb ") == "a b"
    assert len(clip("x" * 1000)) == DETAIL_LEN_MAX
    assert clip("x" * DETAIL_LEN_MAX) == "x" * DETAIL_LEN_MAX


def test_only_a_change_beyond_numbers_rewrites_what_is_stored() -> None:
    old = Unplaced(revision=1, refused={"memory": 3}, nearest=(refusal(C.MEMORY, needed=5),))
    assert same_but_numbers(old, Unplaced(revision=9, refused={"memory": 7}))
    assert not same_but_numbers(old, Unplaced(revision=9, refused={"memory": 3, "cordoned": 1}))
    assert not same_but_numbers(None, old)
    assert not same_but_numbers(old, None)


def test_a_summary_holds_the_counts_and_the_nearest_miss() -> None:
    near = refusal(C.MEMORY_TOTAL, total=8 * GB, needed=24 * GB)
    unplaced = Unplaced(revision=1, nodes=3, refused={"cordoned": 1, "memory_total": 2}, nearest=(near,))
    assert summarise(unplaced) == (
        "fits on none of 3 nodes: 1 is cordoned, 2 have too little memory (n1 (cpu): has 8 GB of memory, needs 24)"
    )
    one = Unplaced(revision=1, nodes=1, refused={"memory_total": 1}, nearest=(near,))
    assert summarise(one) == "does not fit on the only node: n1 (cpu): has 8 GB of memory, needs 24"
    none = Unplaced(revision=1, refused={"no_nodes": 1}, nearest=(refusal(C.NO_NODES, node=""),))
    assert summarise(none) == "there is no node yet"
    wish = refusal(C.RECORD_CORRUPT, node="", detail="the wished version of vllm can't be read")
    unreadable = Unplaced(revision=1, refused={"record_corrupt": 1}, nearest=(wish,))
    assert summarise(unreadable) == "fits nowhere: cpu: the wished version of vllm can't be read"
    assert summarise(Unplaced(revision=1, nodes=2, refused={"later": 2})) == "fits on none of 2 nodes: 2 × later"


def test_a_node_is_counted_once_whatever_the_profiles() -> None:
    twice = [refusal(C.MEMORY), refusal(C.MEMORY, profile="big"), refusal(C.MEMORY, node="n2")]
    unplaced = rejected(twice).unplaced(7)
    assert (unplaced.nodes, unplaced.refused) == (2, {"memory": 2})


def test_inv11_the_largest_receipt_stays_within_its_bound() -> None:
    name, wide = "n" * NAME_LEN_MAX, clip("\x01" * 1000)  # six bytes a character in JSON, the most there is
    holders = bounded_holders(("r" * NAME_LEN_MAX, 10**15) for _ in range(60))
    assert len(holders) == HOLDERS_MAX + 1
    worst = Refusal(constraint=C.ENGINE_UNCHECKED, profile="p" * NAME_LEN_MAX, node=name, needed=10**15, total=10**15,
                    free=10**15, holders=holders, detail=wide)  # fmt: skip
    score = Score(failed_lately=False, weights_missing=False, replicas_of_model=60, node_empty=False,
                  free_bytes=10**15, node=name)  # fmt: skip
    receipt = Receipt(
        revision=2**63,
        profile="p" * NAME_LEN_MAX,
        winner=(score,),
        runner_up=score,
        refused={each.value: 10**6 for each in Constraint},
        nearest=nearest([worst] * 60),
    )
    assert len(msgspec.json.encode(receipt)) <= RECEIPT_BYTES_MAX


@pytest.mark.parametrize(
    ("given", "todo"),
    [
        (refusal(C.MEMORY, needed=15 * GB, total=31 * GB, free=11 * GB), "free 4 GB there, or ask for at most 11 GB"),
        (refusal(C.MEMORY, needed=15 * GB, total=31 * GB, free=0), "free 15 GB there"),
        (refusal(C.MEMORY_TOTAL, needed=24 * GB, total=8 * GB), "ask for at most 8 GB"),
        (refusal(C.GPU_COUNT, needed=8, total=4), "ask for at most 4 a node"),
        (refusal(C.GPU_COUNT, needed=8, total=0), "a GPU, or a profile that needs none"),
        (refusal(C.GPU_CLAIMED, needed=8, total=8, free=0, gpu_class="h100"), "8 more free h100 there"),
        (refusal(C.GPU_FAULT, needed=2, total=8, free=1), "1 more free GPU there"),
        (refusal(C.GPU_IN_USE, needed=3, total=8, free=1), "2 more free GPUs there"),
        (refusal(C.GANG, needed=4, free=2), "2 more such nodes on the same fabric"),
        (refusal(C.GANG, needed=4, free=3), "1 more such node on the same fabric"),
    ],
)
def test_what_would_have_to_change(given: Refusal, todo: str) -> None:
    assert remedy(given) == todo


@pytest.mark.parametrize("constraint", [each for each in Constraint if each is not Constraint.OTHER])
def test_every_refusal_says_what_would_have_to_change(constraint: Constraint) -> None:
    assert remedy(refusal(constraint, needed=2, total=4, free=1))
