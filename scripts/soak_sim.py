"""Storms of the simulation from many seeds, on all cores: `make soak`, or `python scripts/soak_sim.py --help`.

Each seed that breaks a promise is printed with the command that repeats it, and its whole story is written to a file.
Ends with 1 when there was one, or when some kind of fault never struck; the last line is figures, `name=value`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from pathlib import Path

import msgspec

from llmgw.testing.simulation import Broken, Outcome, simulate
from llmgw.testing.storm_kinds import KINDS

SEEDS = 5000
STORIES = Path("build/soak")
SAY_EVERY_S = 60.0
KINDS_SEEN_IN = 200
"""In so many seeds every kind of fault must have struck."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One seed: its outcome, or what broke. `cpu_s`: processor seconds it took."""

    seed: int
    cpu_s: float
    outcome: Outcome | None = None
    broken: str = ""


def run(seed: int, stories: Path) -> Result:
    """Run one seed, in a process of the pool; a failed one's story goes into a file."""
    began_s = time.process_time()
    try:
        outcome = simulate(seed)
    except Broken as error:
        stories.mkdir(parents=True, exist_ok=True)
        causes = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ is not None else ""
        (stories / f"seed-{seed}.log").write_text(f"{error.story}\n\n{error.what}\n\n{causes}")
        return Result(seed=seed, cpu_s=time.process_time() - began_s, broken=error.what)
    return Result(seed=seed, cpu_s=time.process_time() - began_s, outcome=outcome)


def results(seeds: range, *, jobs: int, stories: Path) -> Iterator[Result]:
    """The results as they come; at most a few seeds are handed out ahead."""
    left = iter(seeds)
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        out: set[Future[Result]] = {pool.submit(run, seed, stories) for seed in islice(left, 2 * jobs)}
        while out:
            done, out = wait(out, return_when=FIRST_COMPLETED)
            out |= {pool.submit(run, seed, stories) for seed in islice(left, len(done))}
            yield from (future.result() for future in done)


def main() -> int:
    """The program."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=SEEDS, help=f"how many [{SEEDS}]")
    options.add_argument("--from", type=int, default=0, dest="first", help="the first one [0]")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes [one a core]")
    options.add_argument("--stories", type=Path, default=STORIES, help=f"where failed seeds tell theirs [{STORIES}]")
    asked = options.parse_args()
    seeds = range(asked.first, asked.first + asked.seeds)
    totals, failed, virtual_s, cpu_s, settled_s = Counter[str](), list[int](), 0.0, 0.0, 0.0
    began_s = said_s = time.monotonic()
    for count, result in enumerate(results(seeds, jobs=asked.jobs, stories=asked.stories), start=1):
        cpu_s += result.cpu_s
        if result.outcome is None:
            failed.append(result.seed)
            print(
                f"seed {result.seed}: {result.broken}\n  story: {asked.stories}/seed-{result.seed}.log"
                f"\n  again: make soak-sim FROM={result.seed} SEEDS=1",
                flush=True,
            )
        else:
            totals += result.outcome.totals
            virtual_s += result.outcome.virtual_s
            settled_s = max(settled_s, result.outcome.settled_s)
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            print(f"{count} of {len(seeds)} seeds, {len(failed)} failed, {said_s - began_s:.0f} s", flush=True)
    print("\n" + ", ".join(f"{name} {count}" for name, count in sorted(totals.items())))
    unseen = [kind.__name__ for kind in KINDS if not totals[f"fault {kind.__name__}"]]
    unseen = unseen if len(seeds) >= KINDS_SEEN_IN else []
    if unseen:
        print(f"never struck: {', '.join(unseen)}")
    if failed:
        print(f"failed: {' '.join(map(str, sorted(failed)))}")
    faults = sum(count for name, count in totals.items() if name.startswith("fault "))
    print(
        f"seeds={len(seeds)} failed={len(failed)} faults={faults} terms={totals['term']}"
        f" revisions={totals['revisions']} virtual_s={virtual_s:.0f} cpu_s={cpu_s:.0f}"
        f" virtual_s_per_s={virtual_s / max(cpu_s, 1e-9):.0f} settled_max_s={settled_s:.0f}"
    )
    return 1 if failed or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
