"""`make soak-sim`: what it says of seeds that break a promise, and where their stories are."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from llmgw.testing.simulation import Broken, Outcome
from llmgw.testing.storm_kinds import KINDS

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "soak_sim.py"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with storms that take no time: odd seeds break a promise."""
    spec = importlib.util.spec_from_file_location("soak_sim", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak_sim", module)  # so that the pool's processes find what they are handed
    spec.loader.exec_module(module)

    def storm(seed: int) -> Outcome:
        if seed % 2:
            raise Broken(seed, "invariant 1: said twice", "first\nlast")
        totals = Counter({f"fault {kind.__name__}": 1 for kind in KINDS})
        return Outcome(seed=seed, totals=totals, virtual_s=900.0, settled_s=20.0 + seed)

    monkeypatch.setattr(module, "simulate", storm)
    return module


def run(soak: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["soak_sim.py", *arguments])
    code: int = soak.main()
    return code


def test_a_broken_seed_is_told_with_its_story_and_how_to_repeat_it(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(soak, monkeypatch, "--from", "4", "--seeds", "3", "--jobs", "2", "--stories", str(tmp_path)) == 1
    told = capsys.readouterr().out
    assert "seed 5: invariant 1: said twice" in told
    assert "make soak-sim FROM=5 SEEDS=1" in told
    assert "failed: 5" in told
    last = told.splitlines()[-1]
    assert last.startswith("seeds=3 failed=1 ")
    assert "settled_max_s=26" in last
    assert (tmp_path / "seed-5.log").read_text().startswith("first\nlast\n\ninvariant 1: said twice")


def test_without_a_broken_seed_it_ends_well(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(soak, monkeypatch, "--from", "4", "--seeds", "1", "--jobs", "1", "--stories", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("seeds=1 failed=0 ")
    assert list(tmp_path.iterdir()) == []
