"""Numbers, durations and tables in the terminal."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

# A spreadsheet would compute text that begins so, as =HYPERLINK(…); the last four are full-width.
FORMULA = (*"=+-@\t\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def is_terminal(file: TextIO) -> bool:
    """Whether lines written to a file can be erased."""
    return file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def supports_color(file: TextIO) -> bool:
    """Whether text written to a file can be colored; see https://no-color.org."""
    return is_terminal(file) and not os.environ.get("NO_COLOR")


def to_json(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """JSON as RFC 8259 has it, which knows neither NaN nor Infinity: these are null."""
    return json.dumps(_finite(value), indent=indent, default=default, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_number(value: Any) -> str:
    """Format a number with four decimals, or with six significant digits if it is very small or large."""
    number = float(value)
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e4 else f"{number:g}"


def format_duration(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_limit(seconds: float) -> str:
    """Format seconds as ``DD:HH:MM:SS``, as Lightning takes time limits."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 1440:02}:{minutes // 60 % 24:02}:{minutes % 60:02}:{rest:02}"


def parse_duration(text: str) -> float | None:
    """Seconds of a duration such as ``30m``, ``8h``, ``8:00:00`` or, with days, ``01:12:00:00``; None otherwise."""
    if found := re.fullmatch(r"([1-9][0-9]{0,17})([smhd])", text):
        return float(int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]])
    if not (found := re.fullmatch(r"(?:([0-9]{1,9}):)?([0-9]{1,9}):([0-9]+):([0-9]+)", text.strip())):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_count(text: str | None) -> int | None:
    """A number of up to 18 digits, which are those of ASCII; None for any other text."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text or "") else None  # type: ignore[arg-type]


def as_cell(value: Any) -> Any:
    """A value of CSV: text that a spreadsheet would compute is preceded by an apostrophe."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r", "\n")  # which the writer quotes; after a carriage return, a row would begin
    return f"'{text}" if text.startswith(FORMULA) else text


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as the text of a CSV file, in which no text is a formula."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(map(as_cell, row) for row in rows)
    return file.getvalue()


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Lines of a table: the first ``left`` columns are aligned to the left, by default all; the others to the right.

    A line end in a cell, such as the name of a class, is shown escaped, as what follows would look like another row.
    """
    rows = [[text.replace("\n", "\\n") for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if left is None or column < left else ">" for column in range(len(widths))]
    return [
        "  ".join(f"{text:{sign}{width}}" for text, sign, width in zip(row, signs, widths, strict=True)).rstrip()
        for row in rows
    ]
