"""What the agents of this version can't start yet, though it can be described and placed. Goes when they can.

Pure. Said when a catalog is applied, and by the agent that is ordered to: so that both say the same.
"""

from __future__ import annotations

_ONLY = "agents of this version start engines on CPUs of one node only"


def unstartable(*, nodes: int, gpus_per_node: int) -> str | None:
    """Why an engine on so much is not started; None: it is."""
    wanted = [f"{nodes} nodes"] if nodes > 1 else []
    if gpus_per_node > 0:
        wanted.append(f"{gpus_per_node} GPU{'s' if gpus_per_node > 1 else ''} a node")
    return f"{_ONLY}, and this asks for {' and '.join(wanted)}" if wanted else None
