"""Sizes, durations and tables as people read them."""

import pytest

from tinsmith.formatting import columns, duration_text, size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (20 * 10**9, "20.0 GB"),
        (3.25e15, "3250.0 TB"),
    ],
)
def test_sizes_have_units_of_a_thousand(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "1 s"),
        (1.4, "1 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (30 * 86400, "30 d"),
    ],
)
def test_a_duration_has_the_largest_unit_of_which_it_has_two(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_columns_are_aligned_and_lines_end_with_text() -> None:
    assert columns([["a", "bb", ""], ["ccc", "d", "e"]]).split("\n") == ["a    bb", "ccc  d   e"]
