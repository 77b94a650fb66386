"""How many replicas a model should have, between its `scaling.min` and `scaling.max`, by sampled load.

Load is what all gateways have in flight and queued. Replicas are added at the first sample that asks for them, at most
twice as many at a time; they are taken away only down to what the highest load of a whole window needed, and only when
every sample of it was complete. Where `min` is 0, the last ones go after `idle_s` without any request, counted from the
end of the last one; a request that waits for a model without any brings the first at once.

Two halves, both pure. `observe` folds a sample into the leader's view, where its advice for each model stands;
`decide`, in a pass, takes the advice within the bounds of the catalog. So a pass that is repeated on the same view
decides the same, and time alone never changes a decision: only the next sample does.

Invariants: never outside `min` … `max`; nothing is taken away on missing data; a constant load leads to one number and
stays there; what is written changes only when the number does.

Source: the shape, the tolerance and the window are those of Kubernetes' HorizontalPodAutoscaler (its tolerance of 0.1,
its downscale stabilisation of 5 minutes that takes the highest recommendation, its doubling in each period of 15 s).
That a model with `min: 0` begins at zero is KEDA's way with `minReplicaCount: 0`; Knative's, one replica to begin with
so as to see that it starts, would cost GPUs for models that nobody asked for.
"""

from __future__ import annotations

import math
from typing import Final

from llmgw.core.catalog import START_S, ModelSpec, Scaling
from llmgw.core.live import NOTHING, GatewayLoad, LoadView, Sample, Seen, Total
from llmgw.core.reading import is_live, replicas_of
from llmgw.core.replica import ModelState, ScaleCause, ScaleState
from llmgw.core.snapshot import Index
from llmgw.core.units import Now

TOLERANCE: Final = 0.1
"""Load within this share of what the replicas are to have changes nothing."""

WINDOW_S: Final = 300.0
"""Replicas go only when the load of so long would have done without them."""

STEP: Final = 2
"""At most so many times the replicas wanted before, in one step up."""


def has_range(scaling: Scaling) -> bool:
    """Whether the catalog leaves anything to decide."""
    return scaling.min < scaling.max


def wanted_replicas(spec: ModelSpec, state: ModelState | None) -> int:
    """How many replicas are wanted, as was last decided, within the bounds of the catalog."""
    if state is None or not has_range(spec.scaling):
        return spec.scaling.min
    return _within(spec.scaling, state.wanted if state.scale is None else state.scale.wanted)


def decide(spec: ModelSpec, state: ModelState, load: LoadView, *, now: Now) -> ScaleState | None:
    """What load has led to now; `state.scale` itself where nothing changes, None where the catalog leaves no range.

    Without a word on the model in `load` the number stays as it is: what there was, for a range that is new.
    """
    if not has_range(spec.scaling):
        return None
    seen, before = load.models.get(spec.name), state.scale
    number = state.wanted if before is None else before.wanted
    asked = number if seen is None else seen.wanted
    wanted = _within(spec.scaling, asked)
    if before is not None and before.wanted == wanted:
        return before
    if wanted != asked or seen is None:
        cause = ScaleCause.START if before is None else ScaleCause.BOUNDS
        return ScaleState(wanted=wanted, since_at=now.wall_s, cause=cause)
    return ScaleState(wanted=wanted, since_at=now.wall_s, cause=seen.cause, load=seen.load, target=seen.target)


def at_least(spec: ModelSpec, state: ModelState, live: int, *, now: Now) -> ScaleState | None:
    """What stands written after a restore of the store, or as many as run: what was decided since then is forgotten."""
    if not has_range(spec.scaling) or _within(spec.scaling, live) <= wanted_replicas(spec, state):
        return state.scale
    return ScaleState(wanted=_within(spec.scaling, live), since_at=now.wall_s, cause=ScaleCause.START)


def moved(index: Index, load: LoadView, *, now: Now) -> set[str]:
    """The models for which a pass would now decide another number than is written."""
    found: set[str] = set()
    for name in load.models:
        spec, state = index.models.record(name), index.model_states.record(name)
        if spec is not None and state is not None and decide(spec, state, load, now=now) is not state.scale:
            found.add(name)
    return found


def observe(load: LoadView, sample: Sample, *, index: Index, now: Now, only: frozenset[str] | None = None) -> LoadView:
    """`load` with one sample more, taken at `now`; `only`: of these models, the others stay as they were."""
    models = {} if only is None else dict(load.models)
    for name in index.models if only is None else only:
        spec = index.models.record(name)
        if spec is None or not has_range(spec.scaling):
            models.pop(name, None)
            continue
        models[name] = _see(
            load.models.get(name),
            spec,
            index.model_states.record(name),
            sample.totals.get(name, NOTHING),
            complete=sample.complete,
            target=target_load(index, spec),
            mono_s=now.mono_s,
        )
    return LoadView(models=models, missing=sample.missing)


def waiting(index: Index, load: LoadView, told: GatewayLoad) -> frozenset[str]:
    """The models that can't wait for the next sample, by what one gateway has just told.

    Those without replicas for which requests wait; and those with requests that are about to lose their last replica.
    """
    found: set[str] = set()
    for name, each in told.models.items():
        spec, seen = index.models.record(name), load.models.get(name)
        if spec is None or spec.scaling.min > 0 or not has_range(spec.scaling) or not each.requests:
            continue
        if wanted_replicas(spec, index.model_states.record(name)) == 0:
            wakes = each.queued > 0 and (seen is None or seen.wanted == 0)
        else:
            wakes = seen is not None and seen.wanted == 0
        if wakes:
            found.add(name)
    return frozenset(found)


def target_load(index: Index, spec: ModelSpec) -> float:
    """Requests that each replica of a model is to have: as the catalog says, else what a replica serves at once.

    Of several profiles that of the smallest replica there is counts, else a small one would queue while the number
    looks right; and since one more replica can then only make the target smaller, adding it never calls for its own
    removal. Without replicas it is the profile that placement tries first.
    """
    if spec.scaling.target_load is not None:
        return spec.scaling.target_load
    slots = {profile.name: profile.slots for profile in spec.profiles}
    there = [slots[each.profile] for each in replicas_of(index, spec.name) if is_live(each) and each.profile in slots]
    if there:
        return float(min(there))
    return float(spec.by_priority[0].slots) if spec.profiles else 1.0


def _within(scaling: Scaling, number: int) -> int:
    return max(scaling.min, min(max(scaling.min, scaling.max), number))


def _see(
    before: Seen | None,
    spec: ModelSpec,
    state: ModelState | None,
    total: Total,
    *,
    complete: bool,
    target: float,
    mono_s: float,
) -> Seen:
    """One model, one sample further."""
    present, load = wanted_replicas(spec, state), total.requests
    since_s = unready_s = idle_s = None
    if complete:
        since_s = mono_s if before is None or before.since_mono_s is None else before.since_mono_s
    if present > 0 and (state is None or state.ready == 0):
        unready_s = mono_s if before is None or before.unready_since_mono_s is None else before.unready_since_mono_s
    if present > 0 and complete:
        # What starts has not been idle yet: nobody could have been answered. But a start that fails is not demand.
        starts = unready_s is not None and mono_s - unready_s < _start_s(spec)
        known_s = None if load or starts or before is None else before.idle_since_mono_s
        idle_s = mono_s if known_s is None else min(mono_s, max(known_s, total.ended_mono_s))
    peaks = _peaks(() if before is None else before.peaks, load, mono_s)
    wanted, cause = present, ScaleCause.START if state is None or state.scale is None else ScaleCause.BOUNDS
    if present == 0:
        if total.queued:
            wanted, cause = 1, ScaleCause.WAKE
    elif load > present * target * (1 + TOLERANCE):
        wanted, cause = min(math.ceil(load / target), STEP * present), ScaleCause.LOAD
    elif spec.scaling.min == 0 and idle_s is not None and not load and mono_s - idle_s >= spec.scaling.idle_s:
        wanted, cause = 0, ScaleCause.IDLE
    elif since_s is not None and mono_s - since_s >= WINDOW_S:
        peak = peaks[0][1] if peaks else 0
        if peak < present * target * (1 - TOLERANCE):
            wanted, cause = max(1, math.ceil(peak / target)), ScaleCause.LOAD
    return Seen(
        wanted=_within(spec.scaling, wanted),
        cause=cause,
        load=load,
        target=target,
        peaks=peaks,
        since_mono_s=since_s,
        idle_since_mono_s=idle_s,
        unready_since_mono_s=unready_s,
    )


def _start_s(spec: ModelSpec) -> float:
    return max((profile.start_s for profile in spec.profiles), default=START_S)


def _peaks(peaks: tuple[tuple[float, int], ...], load: int, mono_s: float) -> tuple[tuple[float, int], ...]:
    """The window moved on to `mono_s`: what is too old, and what `load` has overtaken, is forgotten."""
    kept = tuple(each for each in peaks if each[1] > load and mono_s - each[0] < WINDOW_S)
    return (*kept, (mono_s, load)) if load else kept
