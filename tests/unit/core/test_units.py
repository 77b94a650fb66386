"""Sizes as people read them."""

from __future__ import annotations

import pytest

from llmgw.core.units import GB, Now, format_bytes, format_number, format_used, gb_to_bytes, stepped_s


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 MB"),
        (16_000_000, "16 MB"),
        (99_999_999, "100 MB"),
        (100_000_000, "0.1 GB"),
        (GB, "1 GB"),
        (15 * GB + GB // 2, "15.5 GB"),
        (-2 * GB, "-2 GB"),
    ],
)
def test_sizes_are_said_in_gb(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


def test_a_step_of_the_wall_clock_shows_against_the_monotonic_one() -> None:
    before = Now(wall_s=1000.0, mono_s=5.0)
    assert stepped_s(before, Now(wall_s=1010.0, mono_s=15.0)) == 0.0
    assert stepped_s(before, Now(wall_s=1910.0, mono_s=15.0)) == 900.0
    assert stepped_s(before, Now(wall_s=100.0, mono_s=5.0)) == -900.0


def test_gb_are_powers_of_ten() -> None:
    assert gb_to_bytes(1.5) == 1_500_000_000


def test_numbers_have_one_decimal_and_what_is_used_the_unit_of_the_whole() -> None:
    assert [format_number(each) for each in (None, 0.666666, 4.0)] == ["-", "0.7", "4"]
    sizes = [(0, 8_400_000_000), (GB, 8_400_000_000), (0, None), (10**6, 2 * 10**6)]
    assert [format_used(*each) for each in sizes] == ["0 of 8.4 GB", "1 of 8.4 GB", "0 MB of -", "1 MB of 2 MB"]
