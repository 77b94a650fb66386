"""Storms over leaders that come no further than a few looks a pass: a whole fleet's passes, on a small one."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.config import ControllerConfig
from llmgw.controller import loop
from llmgw.core.plan import Settings
from llmgw.testing.simulation import simulate

SEEDS = range(300, 306)


@pytest.mark.parametrize("number", SEEDS)
def test_a_storm_breaks_nothing_however_little_a_pass_comes_to(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, reigns = loop.settings, 0

    def thin(config: ControllerConfig) -> Settings:
        nonlocal reigns
        reigns += 1
        return msgspec.structs.replace(whole(config), looks_max=4, placements_max=2)

    monkeypatch.setattr(loop, "settings", thin)
    outcome = simulate(number)
    assert reigns > 0
    assert outcome.totals["term"] >= 2
