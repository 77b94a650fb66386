"""What is said of a model to people, as of the moment they ask: a countdown is never stored."""

from __future__ import annotations

import math

from llmgw.core.autoscale import has_range
from llmgw.core.catalog import ModelSpec
from llmgw.core.replica import ModelState, ScaleCause


def why_now(state: ModelState, wall_s: float) -> str:
    """What keeps the model from being as it should; while it backs off after that, when it is tried again."""
    backs_off = state.reason == state.failure and state.retry_at is not None and state.retry_at > wall_s
    if not state.reason or not backs_off or state.retry_at is None:
        return state.reason
    times = f"failed {state.attempt} times in a row, " if state.attempt > 1 else ""
    return f"{state.reason}; {times}next try in {math.ceil(state.retry_at - wall_s)} s"


def range_text(spec: ModelSpec | None) -> str:
    """Between which numbers of replicas load decides, as ` (0-4)`; empty where it decides nothing."""
    if spec is None or not has_range(spec.scaling):
        return ""
    return f" ({spec.scaling.min}-{spec.scaling.max})"


def asleep(state: ModelState | None) -> str:
    """Why a model has no replica and wants none, where that follows from its load; empty for any other."""
    if state is None or state.scale is None or state.scale.wanted > 0:
        return ""
    idle = state.scale.cause is ScaleCause.IDLE
    return "asleep: no request for a while" if idle else "asleep: no request yet"
