"""The GPUs of a node as placement sees them: which are free, and what is the matter with each that is not.

Pure. Claims follow uuids: an index is what the driver counts today. A GPU is claimed whole, whatever the engine's
arguments say of its memory. What is not known to be healthy and unused is not free.

Invariant: a GPU that anybody may hold is never free, and what is chosen together is of one class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from llmgw.core.explain import Constraint
from llmgw.core.node import Facts, Gpu, GpuHealth, credible
from llmgw.core.replica import Claim
from llmgw.core.units import format_bytes
from llmgw.errors import InvariantError

T = TypeVar("T", int, str)

PORT_MAX: Final = 65535


class GpuSlot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU of a node. `taken` None: free; otherwise the constraint that keeps it, and `why` in words for people.

    `memory_bytes`, `nvlink_domain` None: not reported. `holder`: the replica that claims it, empty when none does.
    """

    uuid: str
    index: int
    gpu_class: str
    memory_bytes: int | None
    nvlink_domain: int | None
    taken: Constraint | None = None
    why: str = ""
    holder: str = ""


def slots(
    facts: Facts | None, *, claims: Mapping[str, str], unaccounted: Sequence[str] = ()
) -> tuple[GpuSlot, ...] | None:
    """A node's GPUs by index; None when it does not know them.

    Args:
        facts: what the node says of itself.
        claims: uuid -> the replica that holds it, by whichever record says so.
        unaccounted: replicas that run there without anybody knowing what they hold; any GPU may be theirs.
    """
    if facts is None or facts.gpus is None:
        return None
    doubtful = _twice(gpu.uuid for gpu in facts.gpus), _twice(gpu.index for gpu in facts.gpus)
    made: list[GpuSlot] = []
    for gpu in sorted(facts.gpus, key=lambda gpu: (gpu.index, gpu.uuid)):
        holder = claims.get(gpu.uuid, "")
        taken, why = _taken(gpu, holder, unaccounted)
        if taken is None and (gpu.uuid in doubtful[0] or gpu.index in doubtful[1]):
            taken, why = Constraint.GPU_UNKNOWN, "its node lists it twice"
        slot = GpuSlot(
            uuid=gpu.uuid,
            index=gpu.index,
            gpu_class=gpu.gpu_class,
            memory_bytes=credible(gpu.memory_bytes),
            nvlink_domain=gpu.nvlink_domain,
            taken=taken,
            why=why,
            holder=holder,
        )
        made.append(slot)
    return tuple(made)


def _taken(gpu: Gpu, holder: str, unaccounted: Sequence[str]) -> tuple[Constraint | None, str]:
    """What keeps a GPU, the reason that helps people most first: who holds it, what is broken, what is not known.

    `foreign` and `foreign_bytes` leave our own engines out, so that what is claimed is never counted again as used.
    """
    if holder:
        return Constraint.GPU_CLAIMED, f"claimed by {holder}"
    if gpu.health is GpuHealth.LOST:
        return Constraint.GPU_FAULT, gpu.fault or "the driver does not see it any more"
    if gpu.health is GpuHealth.FAULT:
        return Constraint.GPU_FAULT, gpu.fault or "has a fault"
    if (gpu.foreign_bytes or 0) > 0:
        return Constraint.GPU_IN_USE, f"{format_bytes(gpu.foreign_bytes)} used outside llmgw"
    if (gpu.foreign or 0) > 0:
        return Constraint.GPU_IN_USE, "in use by another process"
    if gpu.health is not GpuHealth.OK:
        return Constraint.GPU_UNKNOWN, gpu.fault or "its state is not known"
    if credible(gpu.foreign) is None:
        return Constraint.GPU_UNKNOWN, "whether another process uses it is not known"
    if unaccounted:
        return Constraint.UNACCOUNTED, f"{unaccounted[0]} runs here, and what that holds is not known yet"
    return None, ""


def choose(free: Sequence[GpuSlot], count: int) -> tuple[GpuSlot, ...] | None:
    """The GPUs that one shard takes, by index; None when there are too few.

    All in one NVLink domain where one has room: the one it leaves fewest of, then the lowest. Otherwise, and where the
    topology is not known, those of the lowest indices.

    Args:
        free: free GPUs of one node and one class.
        count: how many.

    Raises:
        InvariantError: a GPU that is taken, or a second class, is among them.
    """
    if any(slot.taken is not None for slot in free) or len({slot.gpu_class for slot in free}) > 1:
        raise InvariantError(2, f"GPUs that do not go together: {', '.join(slot.uuid for slot in free)}")
    ranked = sorted(free, key=lambda slot: (slot.index, slot.uuid))
    domains: dict[int, list[GpuSlot]] = {}
    for slot in ranked:
        if slot.nvlink_domain is not None:
            domains.setdefault(slot.nvlink_domain, []).append(slot)
    fitting = [(len(members), domain) for domain, members in domains.items() if len(members) >= count]
    chosen = domains[min(fitting)[1]] if fitting else ranked
    return tuple(chosen[:count]) if len(chosen) >= count else None


def lost_gpus(facts: Facts | None, claim: Claim) -> tuple[str, ...]:
    """What of a claim its node does not have any more, a sentence for each GPU: lost to the driver, or not listed.

    A node that does not know its GPUs, or lists one twice, proves nothing.
    """
    if not claim.gpus or facts is None or facts.gpus is None:
        return ()
    if bool(_twice(gpu.uuid for gpu in facts.gpus)) or bool(_twice(gpu.index for gpu in facts.gpus)):
        return ()
    listed = {gpu.uuid for gpu in facts.gpus if gpu.health is not GpuHealth.LOST}
    said = {gpu.uuid: gpu.fault for gpu in facts.gpus}
    gone = (gpu.uuid for gpu in claim.gpus if gpu.uuid not in listed)
    return tuple(f"GPU {uuid} is gone: {said.get(uuid) or 'the driver does not see it any more'}" for uuid in gone)


def flaws(facts: Facts) -> tuple[str, ...]:
    """What a node's facts say that can't be true, as short sentences about the node; empty when they may be true."""
    return tuple(_flaws(facts))


def _flaws(facts: Facts) -> Iterator[str]:
    gpus, fabrics = facts.gpus or (), facts.fabrics
    for index in sorted(_twice(gpu.index for gpu in gpus)):
        yield f"lists GPU {index} twice"
    for uuid in sorted(_twice(gpu.uuid for gpu in gpus)):
        yield f"lists the GPU {uuid!r} twice"
    for gpu in gpus:
        if gpu.index < 0 or not gpu.uuid:
            yield f"lists a GPU of index {gpu.index} and uuid {gpu.uuid!r}"
    for name in sorted(_twice(fabric.name for fabric in fabrics)):
        yield f"lists the fabric {name} twice"
    for hca in sorted(_twice(hca for fabric in fabrics for hca in fabric.hcas)):
        yield f"lists the HCA {hca} twice"
    if facts.gang_ports is not None and not 0 < facts.gang_ports[0] <= facts.gang_ports[1] <= PORT_MAX:
        yield f"has the gang ports {facts.gang_ports[0]} to {facts.gang_ports[1]}"
    for number, what, of in _amounts(facts):
        if number is not None and number < 0:
            yield f"has {number} {what} {of}".rstrip()


def _amounts(facts: Facts) -> Iterator[tuple[float | None, str, object]]:
    """Every number that can't be below zero, of what it is, and of which one."""
    yield facts.memory_bytes, "bytes of memory", ""
    yield facts.cpus, "CPUs", ""
    for gpu in facts.gpus or ():
        yield gpu.memory_bytes, "bytes of memory on GPU", gpu.index
        yield gpu.foreign, "processes of others on GPU", gpu.index
        yield gpu.foreign_bytes, "bytes used outside llmgw on GPU", gpu.index
    for fabric in facts.fabrics:
        yield fabric.rate_gbps, "Gbit/s on the fabric", fabric.name
    for each in facts.weights or ():
        yield each.bytes, "bytes of the weights", each.source


def _twice(values: Iterable[T]) -> set[T]:
    """The values that occur more than once."""
    everything = list(values)
    once: set[T] = set(everything)
    if len(once) == len(everything):
        return set()
    return {value for value in once if everything.count(value) > 1}
