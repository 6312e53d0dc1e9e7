"""Percentiles, and tables of text."""

from __future__ import annotations

from collections.abc import Sequence

SHARES = (50, 90, 99)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def aligned(lines: Sequence[Sequence[str]], left: set[int]) -> str:
    """The first line is the titles; columns in `left` hold words, the others numbers."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    made = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([made[0], "─" * max(map(len, made)), *made[1:]])
