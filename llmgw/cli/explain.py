"""`llmgw explain`: where a model runs and why there, what it waits for, and where one more replica would go."""

from __future__ import annotations

from typing import Any, Final

import click

from llmgw.cli.connection import Connection, read_index, store_options
from llmgw.cli.explain_text import lines
from llmgw.cli.output import emit_as, flow
from llmgw.core.explain import Refusal
from llmgw.core.explanation import Explanation, explain_model, known_models
from llmgw.core.refusal_words import remedy, render
from llmgw.core.snapshot import Index, Kind
from llmgw.core.yaml_tree import nearest
from llmgw.errors import NotFound
from llmgw.obs.clock import system_wall
from llmgw.store import codec

READ: Final = tuple(kind for kind in Kind if kind is not Kind.SECRET)
"""Everything but the engines' keys, which explain nothing."""


@click.command(name="explain", short_help="Print where a model runs and why, or why not.")
@click.argument("model")
@click.option("--all", "every", is_flag=True, help="Each node by itself, however many there are.")
@click.option("-o", "--output", "form", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
@store_options
def explain(*, connection: Connection, model: str, every: bool, form: str) -> None:
    """Print where MODEL runs and why there, what its replicas wait for, and where one more would go, or why it can't.

    Every node that could not take one more is told, with the reason, its numbers, and what would have to change; nodes
    with the same reason are told together, unless --all is given. MODEL may be an alias.
    """
    index = connection.run(lambda store: read_index(store, READ))
    wall_s = system_wall()
    told = find(index, model, wall_s=wall_s)
    if form == "text":
        for head, text in lines(told, wall_s, every=every):
            flow(head, text)
    else:
        emit_as(form, as_object(told))


def find(index: Index, asked: str, *, wall_s: float) -> Explanation:
    """What there is to say of a model, or of the one an alias stands for. Raises: NotFound, with the nearest name."""
    known, aliases = known_models(index), index.aliases.names()
    alias = None if asked in known else index.aliases.record(asked)
    name = asked if alias is None else alias.model
    if name not in known:
        raise NotFound("model", name, nearest(name, [*known, *aliases]))
    return explain_model(index, name, wall_s=wall_s, asked=asked)


def as_object(told: Explanation) -> dict[str, Any]:
    """The explanation for programs, each refusal in words as well, and what its numbers count."""
    return {
        **codec.to_public(told),
        "profiles": [
            {**codec.to_public(each), "refused": [_refusal(refusal) for refusal in each.refused]}
            for each in told.profiles
        ],
        "refused": [_refusal(refusal) for refusal in told.refused],
    }


def _refusal(refusal: Refusal) -> dict[str, Any]:
    said = {"unit": refusal.unit, "reason": render(refusal), "remedy": remedy(refusal)}
    return {**codec.to_public(refusal), **said}
