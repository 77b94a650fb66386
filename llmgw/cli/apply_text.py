"""What an apply would change or has changed, in the words that `apply` and `plan` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from llmgw.core.apply import Action, ApplyPlan
from llmgw.core.catalog_load import Loaded
from llmgw.core.snapshot import Kind, Ref

_PAST = {Action.CREATE: "created", Action.UPDATE: "updated", Action.DELETE: "deleted"}
_NOUN = {Kind.MODEL: "model", Kind.ALIAS: "alias", Kind.ENGINE: "engine"}


def shown(ref: Ref) -> str:
    """A record of the catalog, for people."""
    return f"{_NOUN[ref.kind]} {ref.name}"


def left_alone(plan: ApplyPlan, *, prune: bool) -> Iterator[str]:
    """What is stored and stays though the files do not have it, and how it would go."""
    if plan.left:
        yield f"not in the files, left as it is (--prune deletes): {', '.join(shown(ref) for ref in plan.left)}"
    for section, count in plan.untouched.items() if prune else ():
        yield f"no file has {section}: {count} stored left as they are (to delete them: '{section}: {{}}')"


def summary(plan: ApplyPlan, wanted: Loaded, *, would: bool) -> str:
    """How many records are created, updated, deleted, and how many stay as they are."""
    counts = Counter(edit.action for edit in plan.edits)
    size = len(wanted.catalog.models) + len(wanted.catalog.aliases) + len(wanted.catalog.engines)
    same = size - counts[Action.CREATE] - counts[Action.UPDATE]
    words = [f"{counts[action]} {past}" for action, past in _PAST.items()]
    return f"{'would be ' if would else ''}{', '.join(words)}, {same} unchanged"
