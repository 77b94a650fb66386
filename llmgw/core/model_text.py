"""What is said of a model to people, as of the moment they ask: a countdown is never stored."""

from __future__ import annotations

import math

from llmgw.core.replica import ModelState


def why_now(state: ModelState, wall_s: float) -> str:
    """What keeps the model from being as it should; while it backs off after that, when it is tried again."""
    backs_off = state.reason == state.failure and state.retry_at is not None and state.retry_at > wall_s
    if not state.reason or not backs_off or state.retry_at is None:
        return state.reason
    return f"{state.reason}; next try in {math.ceil(state.retry_at - wall_s)} s"
