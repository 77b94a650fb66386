#!/usr/bin/env python3
"""Plays the properties of the core (tests/property/test_reconcile.py) on many more random clusters than CI does.

Each job is a pytest of its own with a seed of its own, so that both cores work and a run can be repeated: the seeds are
printed first, and `--seed` takes the first of them. A failing job ends by itself with the scene it failed on, and the
command that repeats it is printed.

    scripts/soak_property.py [--clusters 20000] [--jobs 2] [--seed N]
"""

import argparse
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/property/test_reconcile.py"

SHARES = 6
"""How many clusters the tests of that file play together for each example of the profile: the sum of their `times`."""

PLAYED = re.compile(r"during generate phase .*?(\d+) passing, ", re.DOTALL)
"""How Hypothesis tells, of each test, what it has really played."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Play the properties of the core on many random clusters.")
    parser.add_argument("--clusters", type=int, default=20_000, help="how many, over all jobs (default 20000)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default 2)")
    parser.add_argument("--seed", type=int, default=None, help="of the first job; the others count up (default: drawn)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 0: everything held; 1: something did not."""
    args = arguments(argv)
    jobs = max(1, args.jobs)
    first = secrets.randbelow(10**6) * 100 if args.seed is None else args.seed
    examples = max(2, -(-args.clusters // (SHARES * jobs)))
    seeds = [first + job for job in range(jobs)]
    print(f"{jobs} jobs with {examples} examples each, seeds {', '.join(map(str, seeds))}", flush=True)
    environment = os.environ | {"HYPOTHESIS_PROFILE": "soak", "HYPOTHESIS_EXAMPLES": str(examples)}
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-show-statistics"]
    began, failed, played = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory(prefix="soak-property-") as directory:
        running: list[tuple[int, Path, subprocess.Popen[bytes]]] = []
        for seed in seeds:
            said = Path(directory) / str(seed)
            command = [sys.executable, "-m", "pytest", *options, f"--hypothesis-seed={seed}", TESTS]
            with said.open("wb") as file:
                process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
            running.append((seed, said, process))
        try:
            for seed, said, process in running:
                status, text = process.wait(), said.read_text(errors="replace")
                played += sum(int(count) for count in PLAYED.findall(text))
                if status != 0:
                    failed += 1
                    print(text)
                    print(
                        f"seed {seed} FAILED; again: HYPOTHESIS_PROFILE=soak HYPOTHESIS_EXAMPLES={examples} "
                        f"python -m pytest --hypothesis-seed={seed} {TESTS}",
                        flush=True,
                    )
        finally:
            for _, _, process in running:
                process.kill()
                process.wait()
    took_s = time.monotonic() - began
    print(f"clusters={played} seeds={seeds[0]}-{seeds[-1]} failed_jobs={failed} seconds={took_s:.0f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
