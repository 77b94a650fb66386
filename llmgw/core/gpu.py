"""The GPUs of a node as placement sees them: which are free, and what is the matter with each that is not.

Pure. Claims follow uuids: an index is what the driver counts today. A GPU is claimed whole. What is not known to be
healthy and unused is not free.
"""

from __future__ import annotations

import msgspec

from llmgw.core.explain import Constraint


class GpuSlot(msgspec.Struct, frozen=True, kw_only=True):
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
