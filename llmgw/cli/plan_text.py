"""A forecast for people: model by model what would become of it, then what that rests on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from llmgw.cli.refusal_text import counted, refused, some
from llmgw.core.forecast import Forecast, ModelForecast, Step, StepAction
from llmgw.core.refusal_words import summarise

Line = tuple[str, str]
"""What stands before, and the text, which may be broken where it does not fit."""


def head(word: str) -> str:
    """What stands before the text of one line about a model."""
    return f"  {word:<9} "


def lines(told: Forecast) -> Iterator[Line]:
    """What is due to the change, what happens anyway, and what the forecast rests on."""
    concerned = [model for model in told.models if model.changes or not model.whole]
    anyway = [model for model in concerned if model.under_way]
    for model in concerned:
        if not model.under_way:
            yield from _model(model, told.without)
    if anyway:
        yield "", "already so, or under way:"
        for model in anyway:
            yield from _model(model, told.without)
    if dark := [model.name for model in told.models if model.gap]:
        yield "", f"would serve nothing for a while: {some(dark, most=len(dark))}"
    for note in _rests_on(told):
        yield "note: ", note
    if concerned or dark:
        yield "", ""


def _model(model: ModelForecast, without: tuple[str, ...]) -> Iterator[Line]:
    yield "", model.name
    new: dict[tuple[str, str], list[str]] = {}
    for step in model.changes:
        if step.action is StepAction.PLACE:
            new.setdefault((step.profile, _later(step)), []).append(" + ".join(step.nodes))
        else:
            yield head(step.action.value), _step(step)
    for (profile, later), places in new.items():
        count = f"{len(places)} replicas " if len(places) > 1 else ""
        yield head("place"), f"{count}on {some(counted(places))} ({profile}){later}"
    if model.unplaced is not None:
        yield head("no room"), summarise(msgspec.structs.replace(model.unplaced, nearest=()))
        for text, todo in refused(each for each in model.unplaced.nearest if each.node not in without):
            yield head("") + "- ", text
            if todo:
                yield head("") + "    ", f"to change: {todo}"
    elif not model.whole:
        yield head("short"), model.reason or f"{model.ready[1]} of {_number(model.wanted[1])} replicas would be ready"


def _step(step: Step) -> str:
    """What becomes of a replica that is there: `m-abcde n1 → n2 (cpu): why`."""
    was, then = " + ".join(step.was), " + ".join(step.nodes)
    match step.action:
        case StepAction.REMOVE:
            text = f"{step.replica} from {was}"
        case StepAction.STRAND:
            text = f"{step.replica} on {was}"
        case _:
            text = f"{step.replica} {f'on {was}' if was == then else f'{was} → {then}'} ({step.profile})"
    if step.old_first:
        text += ", the old one first: there is no room for both"
    return f"{text}{_later(step)}" + (f": {step.why}" if step.why else "")


def _later(step: Step) -> str:
    """When, as far as waiting tells: a backoff, or a node that is to be given up first."""
    if step.in_s < 1.0:
        return ""
    return f", in {math.ceil(step.in_s)} s" if step.in_s < 120.0 else f", in {math.ceil(step.in_s / 60)} min"


def _rests_on(told: Forecast) -> Iterator[str]:
    """What has to be known to take the forecast for what it is."""
    if not told.settled:
        yield f"it did not come to rest within {told.rounds} rounds; this is how far it had come"
    if not told.set_up:
        yield "no controller has been here yet, and before one has nothing can be judged"
    elif not told.led:
        yield "nobody leads now; nothing of this happens before somebody does"
    if told.waiting_for:
        yield (
            f"the store was restored, and nothing is placed or stopped before these nodes have reported: "
            f"{some(told.waiting_for)} (`llmgw recover` does not wait for them)"
        )
    if told.guard_then.on:
        yield (
            f"were they to go at once, the guard would hold: {told.guard_then.unreachable} of {told.guard_then.nodes} "
            f"nodes. Nothing is moved then before some are back, or `llmgw guard release {' '.join(told.without)}`"
        )
    if told.guard.on:
        yield f"the guard is on: {told.guard.reason}. Nobody is given up meanwhile"
    if told.away:
        yield f"not there now, and taken to stay away: {some(told.away)}"
    if told.unreadable:
        yield f"can't be read, and so is left as it is: {some(told.unreadable)}"


_TALLY: Final = (
    (StepAction.PLACE, "placed"),
    (StepAction.MOVE, "moved"),
    (StepAction.RESTART, "restarted"),
    (StepAction.REMOVE, "removed"),
    (StepAction.STRAND, "stranded"),
    (StepAction.KEEP, "kept"),
)


def tally(told: Forecast) -> str:
    """The last line: how many replicas of what, and how many models are not as they are wanted."""
    counts = Counter(step.action for model in told.models for step in model.steps)
    words = [f"{counts[action]} {word}" for action, word in _TALLY if counts[action] or action is not StepAction.STRAND]
    short = sum(not model.whole for model in told.models)
    end = f"; not as wanted: {short} of {len(told.models)} models" if short else ""
    return f"replicas: {', '.join(words)}{end}. Nothing was written."


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
