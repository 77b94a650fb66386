"""Whether a shard may start beside what is still on its way out.

The leader promises memory and GPUs once; this is the node's own second look, for the moment in which the old holder is
told to go and the new one to come, and for a restored store, whose orders do not know of what runs unassigned. Only
what is certain to end, or to get the leader's word, is waited for, so nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.core.units import format_bytes
from llmgw_agent.shard import ALIVE, GOING, Shard, Stage


def room_problem(shard: Shard, shards: Iterable[Shard], *, memory_bytes: int | None, confirmed: bool) -> str | None:
    """Why `shard` has to wait, in words; None when it may start.

    `memory_bytes` None: unknown, no reason to wait. `confirmed`: the store's orders were read since the agent came up;
    before that, saved orders may contradict one another, so nothing starts beyond what there is.
    """
    if shard.order is None:
        return None
    claim = shard.order.claim
    alive = [o for o in shards if o is not shard and (o.stage in ALIVE or o.stage is Stage.LAUNCHING)]
    unsure = not confirmed or not shard.assigned
    going = [o for o in alive if unsure or not o.assigned or (o.stage in GOING and o.after is not Stage.WAITING)]
    wanted = {gpu.uuid for gpu in claim.gpus}
    for other in going:
        held = wanted & {gpu.uuid for gpu in other.order.claim.gpus} if other.order is not None else set()
        if held:
            return f"waits for GPU {min(held)}, which {other.name} still holds"
    if memory_bytes is None or claim.memory_bytes is None or not going:
        return None
    taken = sum(o.order.claim.memory_bytes or 0 for o in alive if o.order is not None)
    if taken + claim.memory_bytes <= memory_bytes:
        return None
    return (
        f"needs {format_bytes(claim.memory_bytes)} of {format_bytes(memory_bytes)}; {format_bytes(taken)} still held, "
        f"waits for {', '.join(sorted(o.name for o in going))} to end"
    )
