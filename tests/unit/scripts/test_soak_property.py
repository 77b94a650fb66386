"""The long run of the properties: it says what it played, and how to play it again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "soak_property.py"


def test_it_plays_what_it_is_told_and_says_so() -> None:
    argv = [sys.executable, str(SCRIPT), "--clusters", "10", "--jobs", "1", "--seed", "3"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "1 jobs with 2 examples each, seeds 3" in done.stdout
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(r"clusters=(\d+) seeds=3-3 failed_jobs=0 seconds=\d+", last)
    assert found is not None, last
    assert int(found[1]) >= 10
