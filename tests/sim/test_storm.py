"""Storms of faults from seeds: nothing promised may break in them, and after them everything must settle."""

from __future__ import annotations

import time
from typing import Any

import pytest

from llmgw.testing.simulation import STORM_S, simulate
from llmgw.testing.storm import FAULTS_MIN
from llmgw.testing.storm_kinds import KINDS

SEEDS = 200
"""So many seeds see everything."""

EVENTS = (
    "term",
    "replica placed",
    "replacement placed",
    "replica adopted",
    "replica ready",
    "replica ended",
    "node unreachable",
    "node lost",
    "node returning",
    "shard failed",
    "shard unassigned",
    "engine started",
    "engine ended",
    "engine killed",
    "retired scale_down",
    "retired model_removed",
    "retired rolled",
    "retired drained",
    "retired replaced",
    "retired cancelled",
    "retired failed",
    "gang placed",
    "gang ready",
    "gang failed",
    "gang adopted",
    "on GPUs ready",
    "on GPUs adopted",
    "start extended",
    "rollout stopped",
    "scaled load",
    "scaled idle",
    "scaled wake",
    "guard on",
    "command: forget",
    "command: release",
    "command: recover",
    "unplaced gpu_claimed",
    "unplaced gang",
    "unplaced facts",
    "listed again: compacted",
    "listed again: went_back",
    "listed again: relist",
)
"""What storms are for; each must have happened somewhere."""


def test_a_storm_breaks_nothing_and_after_it_everything_settles(seed: int, tally: Any) -> None:
    start_s = time.process_time()
    outcome = simulate(seed)
    tally.cpu_s += time.process_time() - start_s
    tally.outcomes.append(outcome)
    assert outcome.virtual_s >= STORM_S
    assert outcome.totals["term"] >= 2
    assert sum(count for name, count in outcome.totals.items() if name.startswith("fault ")) >= FAULTS_MIN


def test_all_storms_together_have_seen_everything(tally: Any) -> None:
    if len(tally.wanted) < SEEDS:
        pytest.skip("too few seeds to have seen everything")
    assert len(tally.outcomes) == len(tally.wanted)
    totals = tally.totals
    assert [name for name in (*(f"fault {kind.__name__}" for kind in KINDS), *EVENTS) if not totals[name]] == []


def test_a_seed_repeats_exactly() -> None:
    first, second = simulate(3), simulate(3)
    assert first.totals == second.totals
    assert first.virtual_s == second.virtual_s
