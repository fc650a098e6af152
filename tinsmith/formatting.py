"""Sizes, durations and tables as text for people."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(num_bytes: float) -> str:
    """A number of bytes in units of 1,000, as the dashboard shows them: "512 B", "1.5 kB", "20.0 GB"."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.95:  # a larger number would be rounded to 1000.0
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} TB"


def duration_text(seconds: float) -> str:
    """A duration in whole units: "90 s", "3 h". The unit is the largest one of which the duration has at least two. A
    duration below 1 s becomes "1 s"."""
    for unit, seconds_each in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * seconds_each:
            return f"{seconds / seconds_each:.0f} {unit}"
    return f"{max(1.0, seconds):.0f} s"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines. Each column is as wide as its widest text, columns are two spaces apart, and no line ends with
    a space."""
    widths = [max(map(len, texts)) for texts in zip(*rows, strict=True)]
    lines = ("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
