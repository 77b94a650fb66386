"""A look at everything in slices, however thin: it ends, whatever happens meanwhile, and leaves nothing to a whole one.

And what the index keeps up by itself, change by change, is what its tables say.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.core.history import Checker
from llmgw.core.invariants import Violation
from llmgw.core.plan import Settings
from llmgw.core.snapshot import Change
from llmgw.testing.apply import copy_of
from llmgw.testing.cluster import Cluster
from llmgw.testing.clusters import Scene, build, scenes
from llmgw.testing.happenings import EVERYTHING, often, play

SLICES_MAX = 500
"""More than any history here can leave to do; it only ends what would go on for ever."""


class Unjudged(Checker):
    """For what holds of any tree, well or badly come by."""

    def advance(self, changes: Iterable[Change], *, revision: int) -> list[Violation]:
        return []


def times(factor: float) -> settings:
    """So many clusters as the profile says, times `factor`."""
    assert settings.default is not None
    calm = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=int(factor * settings.default.max_examples), suppress_health_check=calm)


def one(c: Cluster) -> bool:
    """One pass over what is dirty; whether another is due at once."""
    dirty, before = c.dirty(), dict(c.index.rows())
    plan = c.plan(dirty)
    assert dict(c.index.rows()) == before
    assert not c.index.dirty
    c.apply(plan)
    return plan.more


def turn(c: Cluster) -> None:
    """One pass; when it left nothing, that is put to the test."""
    if not one(c):
        finish(c)


def finish(c: Cluster) -> None:
    """Passes until nothing is left; then a whole one, without bounds, finds nothing to do."""
    for _ in range(SLICES_MAX):
        if not one(c):
            break
    else:
        raise AssertionError(f"not done after {SLICES_MAX} passes, left is {c.index.dirty}")
    thin, c.settings = c.settings, Settings()
    whole = c.plan()
    c.settings = thin
    assert not whole.groups, whole.groups


@given(scenes(often(EVERYTHING), events_min=5), st.integers(1, 8), st.integers(1, 3))
@times(2)
def test_slices_leave_nothing_to_a_whole_pass(scene: Scene, looks: int, tries: int) -> None:
    c = build(scene)
    c.settings = Settings(looks_max=looks, placements_max=tries)
    play(c, scene.events, turn)
    finish(c)


@given(scenes(often(EVERYTHING), events_min=5))
@times(0.5)
def test_what_the_index_keeps_up_is_what_its_tables_say(scene: Scene) -> None:
    c = build(scene)
    c.checker = Unjudged(fenced=False)
    play(c, scene.events, turn)
    kept = c.index.standing
    assert copy_of(c.index).standing == kept
    plan = c.plan()
    assert c.index.standing == kept, "a pass leaves it as it was"
    c.apply(plan)
    assert copy_of(c.index).standing == kept
