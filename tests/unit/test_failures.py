"""docs/failures.md and the tests speak of the same failures."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "failures.md"


def documented() -> list[str]:
    return re.findall(r"^\| ([A-Z]-\d\d) \|", TABLE.read_text(), re.MULTILINE)


def test_every_failure_has_a_test_and_every_test_its_failure() -> None:
    found = (re.findall(r"def test_([a-z])(\d\d)_", path.read_text()) for path in TESTS.rglob("test_*.py"))
    assert {f"{letter.upper()}-{number}" for names in found for letter, number in names} == set(documented())


def test_the_failures_stand_in_order_and_once() -> None:
    assert documented() == sorted(set(documented()))
