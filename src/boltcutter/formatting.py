"""Numbers, durations and tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def format_number(value: Any) -> str:
    """Format a number with four decimals, or with six significant digits if it is very small or large."""
    number = float(value)
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e4 else f"{number:g}"


def format_duration(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Lines of a table: the first ``left`` columns are aligned to the left, by default all; the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if left is None or column < left else ">" for column in range(len(widths))]
    return [
        "  ".join(f"{text:{sign}{width}}" for text, sign, width in zip(row, signs, widths, strict=True)).rstrip()
        for row in rows
    ]
