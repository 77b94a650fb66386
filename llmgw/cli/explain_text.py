"""An explanation for people: the model, its replicas, and where one more would go or why it can't."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from llmgw.cli.refusal_text import counted, refused, scored, some
from llmgw.core.autoscale import has_range
from llmgw.core.catalog import ModelSpec
from llmgw.core.explain import Receipt
from llmgw.core.explanation import Explanation, ReplicaExplanation, Verdicts
from llmgw.core.model_text import asleep
from llmgw.core.refusal_words import turned_down
from llmgw.core.replica import Claim, ModelState, Rollout, ScaleState
from llmgw.core.units import format_bytes, format_number

Line = tuple[str, str]
"""What stands before, and the text, which may be broken where it does not fit."""

FITS_MAX: Final = 10
"""Nodes that fit and are told of one profile; the others are counted."""


def lines(told: Explanation, wall_s: float, *, every: bool) -> Iterator[Line]:
    """Everything, as of `wall_s`. `every`: no node is only counted."""
    yield from ((f"{label:<10}", text) for label, text in _model(told, wall_s))
    for each in told.replicas:
        yield "", ""
        yield from _replica(each, wall_s)
    if told.spec is None:
        return
    yield "", ""
    if told.next is not None:
        claims = [text for claim in told.next.claims if (text := _claim(claim, ()))]
        what = f", claiming {'; '.join(counted(claims))}" if claims else ""
        yield "", f"one more replica would go to {' + '.join(told.next.nodes)} ({told.next.profile}){what}"
    else:
        yield "", "one more replica fits nowhere"
    for text, todo in refused(told.refused, every=every):
        yield from _refused(text, todo)
    for verdicts in told.profiles:
        yield from _profile(verdicts, every=every)


# --- the model ------------------------------------------------------------------------------------------------------


def _model(told: Explanation, wall_s: float) -> Iterator[Line]:
    spec, state = told.spec, told.state
    alias = f" ({told.asked} is an alias)" if told.asked != told.name else ""
    yield "model", told.name + alias
    for place in told.unreadable:
        yield "unreadable", f"/llmgw/{place}: nothing is decided about the model before that is written anew"
    if spec is None and not told.unreadable:
        yield "catalog", "it is not in the catalog any more"
    if state is None:
        yield "ready", "no controller has looked at it yet"
    else:
        yield "ready", f"{state.ready} of {state.wanted} wanted, {state.placed} placed"
    if spec is not None and state is not None and has_range(spec.scaling):
        yield "scale", _scale(spec, state, wall_s)
    if told.why:
        yield "why", told.why
    if state is not None and state.retry_at is not None and state.retry_at > wall_s:
        times = f"{state.attempt} failed {'replica' if state.attempt == 1 else 'replicas'} in a row"
        yield "backoff", f"after {times} the next is placed in {_time(state.retry_at - wall_s)}"
    if state is not None and (lately := {n: at for n, at in state.failed_nodes.items() if at > wall_s}):
        where = [f"{node} for {_time(at - wall_s)} more" for node, at in sorted(lately.items())]
        yield "avoids", f"{some(where)}: it failed there lately, so they come last"
    if state is not None and state.rollout is not Rollout.NONE:
        old = sum(bool(each.rolls) for each in told.replicas)
        stopped = "stopped, since the new launch failed" if state.rollout is Rollout.STOPPED else "under way"
        yield "rollout", f"{stopped}: {old} {'replica runs' if old == 1 else 'replicas run'} an older launch"
    if told.waiting_for is not None:
        nodes = some(told.waiting_for) or "none any more"
        yield "restored", f"nothing is placed or stopped before these nodes have reported to the store: {nodes}"
    if told.guard is not None:
        yield "guard", f"on: {told.guard.reason}; no node is given up meanwhile"
    if not told.led:
        yield "leader", "none: what runs goes on running, and nothing new is decided"


def _scale(spec: ModelSpec, state: ModelState, wall_s: float) -> str:
    bounds = f"{spec.scaling.min} to {spec.scaling.max} by load"
    if state.scale is None:
        return f"{bounds}; no load is known yet"
    sleeps = f"{said}, the next one wakes it; " if (said := asleep(state)) else ""
    return f"{bounds}; {sleeps}{state.scale.wanted} for {_time(wall_s - state.scale.since_at)}: {_cause(state.scale)}"


def _cause(scale: ScaleState) -> str:
    words = scale.cause.value
    if scale.load is None:
        return words
    target = "" if scale.target is None else f", {format_number(scale.target)} a replica"
    return f"{words} ({scale.load} requests{target})"


# --- a replica ------------------------------------------------------------------------------------------------------


def _replica(each: ReplicaExplanation, wall_s: float) -> Iterator[Line]:
    replica = each.replica
    nodes = " + ".join(shard.node for shard in replica.shards)
    since = f" for {_time(wall_s - replica.phase_at)}"
    yield "", f"{replica.id} is {replica.phase.value} on {nodes} ({replica.profile}){since}"
    if replica.retire is not None:
        yield _under("leaves"), f"{replica.retire.value.replace('_', ' ')}: {replica.reason}"
    if each.waits_for:
        yield _under("waits for"), each.waits_for
    if each.rolls:
        yield _under("rolls"), each.rolls
    if replica.replaces is not None:
        yield _under("replaces"), replica.replaces
    fabric = "" if replica.fabric is None else f", over the fabric {replica.fabric}"
    yield _under("runs"), (replica.build or f"{replica.engine}, whichever build its node has") + fabric
    for shard, gpus in zip(replica.shards, each.gpus, strict=True):
        given_back = ", given back" if shard.released else ""
        yield _under("claims"), f"{_claim(shard.claim, gpus) or 'nothing'} on {shard.node}{given_back}"
    if replica.receipt is None:
        yield _under("why there"), replica.reason or "it has no receipt"
    else:
        yield from _receipt(replica.receipt)


def _under(label: str) -> str:
    return f"  {label:<10}"


def _receipt(receipt: Receipt) -> Iterator[Line]:
    for i, score in enumerate(receipt.winner):
        yield _under("" if i else "why there"), f"{score.node}: {scored(score)}"
    if receipt.runner_up is not None:
        yield _under("second"), f"{receipt.runner_up.node}: {scored(receipt.runner_up)}"
    else:
        yield _under("second"), "none: nothing else would have fitted"
    if receipt.refused:
        counts = ", ".join(turned_down(name, count) for name, count in receipt.refused.items())
        yield _under("refused"), f"at revision {receipt.revision}: {counts}; the nearest misses:"
        for text, _ in refused(receipt.nearest):
            yield _under(""), text


def _claim(claim: Claim, gpus: tuple[int, ...]) -> str:
    """What a shard holds, empty for nothing."""
    parts = [] if claim.memory_bytes is None else [f"{format_bytes(claim.memory_bytes)} of memory"]
    if claim.gpus:
        count, word = len(claim.gpus), "GPU" if len(claim.gpus) == 1 else "GPUs"
        parts.append(f"{word} {', '.join(map(str, gpus))}" if len(gpus) == count else f"{count} {word}")
    return ", ".join([*parts, *claim.hcas])


# --- one more -------------------------------------------------------------------------------------------------------


def _profile(verdicts: Verdicts, *, every: bool) -> Iterator[Line]:
    yield "", ""
    fits, count = verdicts.fits, sum(1 for refusal in verdicts.refused if refusal.node)
    nodes = (
        f"{len(fits)} {'node fits' if len(fits) == 1 else 'nodes fit'}, {count} {'does' if count == 1 else 'do'} not"
    )
    if not fits and not count:
        nodes = "no node comes into question"
    yield "", f"profile {verdicts.profile} (priority {verdicts.priority}): {nodes}"
    told = fits if every else fits[:FITS_MAX]
    for i, fit in enumerate(told, start=1):
        build = "" if fit.build is None else f"; {fit.build}"
        fabric = "" if fit.fabric is None else f"; fabric {fit.fabric}"
        yield f"  {i:>3}. ", f"{fit.node}: {scored(fit.score)}{build}{fabric}"
    if len(fits) > len(told):
        yield "       ", f"and {len(fits) - len(told)} more (--all shows each)"
    for text, todo in refused(verdicts.refused, every=every):
        yield from _refused(text, todo)


def _refused(text: str, todo: str) -> Iterator[Line]:
    yield "    - ", text
    if todo:
        yield "        ", f"to change: {todo}"


def _time(seconds: float) -> str:
    """A span for people, `-` where clocks disagree about which end comes first."""
    if seconds < 0:
        return "-"
    for unit_s, word in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {word}"
    return f"{math.ceil(seconds)} s"
