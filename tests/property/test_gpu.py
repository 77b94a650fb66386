"""Any GPUs in any state: what is free is free of everything, and what is chosen goes together."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core.catalog import Profile
from llmgw.core.explain import Constraint
from llmgw.core.gpu import GpuSlot, choose, flaws, lost_gpus, slots
from llmgw.core.inventory import Inventory
from llmgw.core.node import Fabric, Facts, Gpu, GpuHealth
from llmgw.core.replica import Claim, GpuClaim
from llmgw.testing.cluster import Cluster, cpu_profile, gpu

UUIDS = [f"GPU-{i}" for i in range(10)]

GPUS = st.builds(
    Gpu,
    uuid=st.sampled_from(UUIDS),
    index=st.integers(0, 9),
    gpu_class=st.sampled_from(["A", "B"]),
    memory_bytes=st.sampled_from([None, -1, 24, 80]),
    nvlink_domain=st.sampled_from([None, 0, 1, 2]),
    health=st.sampled_from(GpuHealth),
    fault=st.sampled_from(["", "row remap failed"]),
    foreign=st.sampled_from([None, 0, 0, 0, 1]),
    foreign_bytes=st.sampled_from([None, 0, 0, 0, 5]),
)
FREE = st.lists(
    st.builds(
        GpuSlot,
        uuid=st.uuids().map(str),
        index=st.integers(0, 15),
        gpu_class=st.just("A"),
        memory_bytes=st.none(),
        nvlink_domain=st.sampled_from([None, 0, 1, 2]),
    ),
    max_size=12,
    unique_by=lambda slot: slot.index,
)


@given(
    st.lists(GPUS, max_size=8),
    st.dictionaries(st.sampled_from(UUIDS), st.just("x-aaaaa")),
    st.sampled_from([(), ("y-bbbbb",)]),
    st.data(),
)
def test_a_free_gpu_is_listed_once_healthy_unused_and_nobodys(
    gpus: list[Gpu], claims: dict[str, str], unaccounted: tuple[str, ...], data: st.DataObject
) -> None:
    facts = Facts(node="n", boot_id="b", gpus=tuple(gpus))
    made = slots(facts, claims=claims, unaccounted=unaccounted)
    assert made is not None
    assert len(made) == len(gpus)
    assert [slot.index for slot in made] == sorted(gpu.index for gpu in gpus)
    for slot in made:
        same = [gpu for gpu in gpus if gpu.uuid == slot.uuid or gpu.index == slot.index]
        assert (slot.taken is None) == (not slot.why)
        assert (slot.taken is Constraint.GPU_CLAIMED) == bool(slot.holder) == (slot.uuid in claims)
        assert slot.memory_bytes is None or slot.memory_bytes >= 0
        if slot.taken is None:
            (only,) = same
            assert (only.health, only.foreign, only.foreign_bytes or 0) == (GpuHealth.OK, 0, 0)
            assert not unaccounted
    other = data.draw(st.permutations(gpus))
    if not flaws(facts):
        assert slots(Facts(node="n", boot_id="b", gpus=tuple(other)), claims=claims, unaccounted=unaccounted) == made


@given(FREE, st.integers(1, 9), st.data())
def test_chosen_gpus_are_in_one_domain_wherever_one_has_room(
    free: list[GpuSlot], count: int, data: st.DataObject
) -> None:
    made = choose(free, count)
    assert (made is None) == (len(free) < count)
    if made is None:
        return
    assert len({slot.uuid for slot in made}) == count
    assert set(made) <= set(free)
    assert [slot.index for slot in made] == sorted(slot.index for slot in made)
    sizes = {domain: sum(slot.nvlink_domain == domain for slot in free) for domain in (0, 1, 2)}
    roomy = {domain: size for domain, size in sizes.items() if size >= count}
    if roomy:
        (domain,) = {slot.nvlink_domain for slot in made}
        assert roomy[domain or 0] == min(roomy.values()), "the domain that is left with fewest"
        assert domain is not None
    else:
        assert [slot.index for slot in made] == sorted(slot.index for slot in free)[:count]
    assert choose(data.draw(st.permutations(free)), count) == made


@given(st.lists(GPUS, max_size=8), st.lists(st.sampled_from(UUIDS), unique=True, max_size=4))
def test_only_a_list_without_contradiction_proves_a_gpu_lost(gpus: list[Gpu], held: list[str]) -> None:
    facts = Facts(node="n", boot_id="b", gpus=tuple(gpus))
    lost = lost_gpus(facts, Claim(gpus=tuple(GpuClaim(uuid=uuid) for uuid in held)))
    there = {gpu.uuid for gpu in gpus if gpu.health is not GpuHealth.LOST}
    said = [sentence.split()[1] for sentence in lost]
    sound = not any("twice" in flaw for flaw in flaws(facts))
    assert said == ([uuid for uuid in held if uuid not in there] if sound else [])


SOUND = st.lists(st.sampled_from("AAB"), min_size=2, max_size=4).map(
    lambda classes: tuple(gpu(i, kind, memory_bytes=80, nvlink_domain=0) for i, kind in enumerate(classes))
)
BROKEN_GPUS = st.lists(GPUS, max_size=5).map(tuple)
IB0 = (Fabric(name="ib0", hcas=("h0", "h1")),)
BROKEN_FABRICS = st.sampled_from(
    [
        (),
        (*IB0, *IB0),
        (*IB0, Fabric(name="ib1", hcas=("h1",))),
        (Fabric(name="ib0", rate_gbps=-1.0),),
    ]
)
SAID = st.fixed_dictionaries(
    {
        "memory_gb": st.sampled_from([16.0] * 6 + [None, -1.0]),
        "gpus": st.one_of(*[SOUND] * 5, BROKEN_GPUS, st.none()),
        "fabrics": st.one_of(*[st.just(IB0)] * 6, BROKEN_FABRICS),
        "gang_ports": st.sampled_from([(21000, 21999)] * 6 + [None, (5, 1)]),
    }
)
"""What a node may say: mostly what can be true."""

PROFILES = [
    Profile(name="gang", engine="llama.cpp", nodes=2, gpus_per_node=1, tensor_parallel=2),
    Profile(name="gpu", engine="llama.cpp", gpus_per_node=1, min_gpu_memory_gb=24e-9),
    Profile(name="pair", engine="llama.cpp", gpus_per_node=2, tensor_parallel=2, gpu_class="A"),
    cpu_profile(4.0),
]


@settings(max_examples=60, deadline=None)
@given(st.tuples(SAID, SAID, SAID), st.lists(st.tuples(st.sampled_from(["n1", "n2", "n3"]), SAID), max_size=5))
def test_whatever_nodes_say_of_themselves_the_loop_goes_on_and_what_cannot_be_true_takes_nothing(
    first: tuple[dict[str, Any], ...], later: list[tuple[str, dict[str, Any]]]
) -> None:
    c = Cluster()
    for i, what in enumerate(first, start=1):
        c.node(f"n{i}", **what)
    c.settle()
    for i, profile in enumerate(PROFILES):
        c.model(f"m{i}", profile, replicas=1 + i % 2)
    for name, what in [("n1", first[0]), *later]:
        before = set(c.index.replicas)
        c.node(name, **what)
        c.settle()
        c.advance(400.0)
        c.settle()
        for replica in c.index.replicas.records():
            for shard in () if replica.id in before else replica.shards:
                assert not Inventory(c.index).node(shard.node).flaws, replica
