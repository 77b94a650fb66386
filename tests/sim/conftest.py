"""Which seeds are run, and what they saw in all."""

from __future__ import annotations

from collections import Counter

import pytest

from llmgw.testing.simulation import Outcome

SEEDS = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, action="append", help="run this seed of the simulation; may be repeated")
    parser.addoption("--sim-seeds", type=int, default=SEEDS, help=f"run so many seeds, from 0 on (default {SEEDS})")


class Tally:
    """What all runs of this session saw together."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.wanted: list[int] = []
        self.cpu_s = 0.0

    @property
    def totals(self) -> Counter[str]:
        return sum((outcome.totals for outcome in self.outcomes), Counter[str]())

    def lines(self) -> list[str]:
        totals, virtual_s = self.totals, sum(outcome.virtual_s for outcome in self.outcomes)
        settled_s = sorted(outcome.settled_s for outcome in self.outcomes)
        faults = sum(count for name, count in totals.items() if name.startswith("fault "))
        speed = virtual_s / self.cpu_s
        return [
            f"{len(self.outcomes)} seeds, {virtual_s:.0f} virtual seconds, {speed:.0f} of them a processor second",
            f"{faults} faults, {totals['term'] - len(self.outcomes)} changes of leader",
            f"settled after {settled_s[len(settled_s) // 2]:.0f} s (median), {settled_s[-1]:.0f} s (longest)",
            ", ".join(f"{name} {count}" for name, count in sorted(totals.items())),
        ]


TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        seeds = metafunc.config.getoption("--sim-seed", default=None)
        seeds = seeds or list(range(metafunc.config.getoption("--sim-seeds", default=SEEDS)))
        metafunc.config.stash[TALLY].wanted = seeds
        metafunc.parametrize("seed", seeds)


@pytest.fixture
def tally(pytestconfig: pytest.Config) -> Tally:
    return pytestconfig.stash[TALLY]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tally = config.stash[TALLY]
    if tally.outcomes:
        terminalreporter.section("simulation")
        for line in tally.lines():
            terminalreporter.write_line(line)
