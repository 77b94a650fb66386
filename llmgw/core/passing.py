"""What one pass of reconcile carries from step to step. See `llmgw.core.reconcile`."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmgw.core.draft import Draft
from llmgw.core.ids import Ids
from llmgw.core.node import Guard
from llmgw.core.plan import Plan, Settings, View
from llmgw.core.snapshot import Index
from llmgw.core.units import Now


@dataclass(kw_only=True)
class Pass:
    """One pass at work.

    `tries`: placements that may still be tried. `restoring`: the store was restored and not every node has reported, so
    nothing is stopped, placed or pruned.
    """

    draft: Draft
    now: Now
    view: View
    ids: Ids
    settings: Settings
    incarnation: str
    plan: Plan = field(default_factory=Plan)
    guard: Guard = field(default_factory=Guard)
    restoring: bool = False
    tries: int = 0

    @property
    def index(self) -> Index:
        """The tree, with what this pass has decided so far."""
        return self.draft.index

    def wake_at(self, kind: str, name: str, wall_s: float) -> None:
        """Look at that again when the wall clock says so."""
        self.wake_in(kind, name, wall_s - self.now.wall_s)

    def wake_in(self, kind: str, name: str, delay_s: float) -> None:
        """Look at that again after so long, or earlier if somebody said so already."""
        at = self.now.mono_s + max(0.0, delay_s)
        key = (kind, name)
        self.plan.wake_mono_s[key] = min(at, self.plan.wake_mono_s.get(key, at))
