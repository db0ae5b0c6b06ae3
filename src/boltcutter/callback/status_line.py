"""A status line at the bottom of a terminal, below all other output."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

from boltcutter.environment.output import ERASE

MIN_BAR_WIDTH = 10  # columns


class Field(NamedTuple):
    """A name and its value; fields of small ``weight`` are dropped first if the terminal is narrow."""

    name: str
    value: str
    weight: int

    @property
    def text(self) -> str:
        """Name and value."""
        return f"{self.name} {self.value}" if self.name else self.value


class StatusLine:
    """A line at the bottom of a terminal; text printed to standard output and error appears above it.

    Args:
        file: The terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.ascii_only = not (file.encoding or "utf-8").lower().startswith("utf")
        self.drawn = False
        self.busy = False  # the last printed line is incomplete
        self.line = ""
        self.streams: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
        self.redirects = tuple(StreamRedirect(f, self.clear) if f.isatty() else f for f in self.streams)
        sys.stdout, sys.stderr = self.redirects

    def show(self, fields: Sequence[Field], progress: float | None) -> None:
        """Draw the line.

        Args:
            fields: Fields in order.
            progress: Fraction done, in [0, 1]; None for no bar.
        """
        if not self.busy:
            width = shutil.get_terminal_size().columns - 1
            self.line = layout(fields, progress, width, ascii_only=self.ascii_only)
            self._write(ERASE + self.line)
            self.drawn = True

    def clear(self, text: str) -> None:
        """Erase the line before ``text`` is printed."""
        if self.drawn and text:
            self._write(ERASE)
            self.drawn = False
        if text:
            self.busy = not text.endswith("\n")

    def close(self) -> None:
        """Keep the last line on screen, and restore standard output and error."""
        if (sys.stdout, sys.stderr) == self.redirects:
            sys.stdout, sys.stderr = self.streams
        if self.drawn:
            self._write("\n")
        elif self.line and not self.busy:
            self._write(self.line + "\n")
        self.drawn, self.line = False, ""

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()


class StreamRedirect:
    """A stream that calls ``clear`` before each write."""

    def __init__(self, stream: TextIO, clear: Callable[[str], None]) -> None:
        self.stream, self.clear = stream, clear

    def write(self, text: str) -> int:
        """Write ``text`` above the status line."""
        self.clear(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def layout(fields: Sequence[Field], progress: float | None, width: int, *, ascii_only: bool = False) -> str:
    """Lay out the first field, a progress bar and the other fields, dropping fields that leave no space for the bar.

    Args:
        fields: Fields in order.
        progress: Fraction done, in [0, 1]; None for no bar.
        width: Columns of the terminal.
        ascii_only: Whether the terminal supports only ASCII.
    """
    kept = list(fields)
    bar = MIN_BAR_WIDTH + 2 if progress is not None else 0
    while len(kept) > 1 and sum(len(f.text) + 2 for f in kept) - 2 + bar > width:
        kept.remove(min(kept[1:], key=lambda f: f.weight))
    parts = [f.text for f in kept]
    if progress is not None:
        columns = max(MIN_BAR_WIDTH, width - sum(len(text) + 2 for text in parts))
        full, half = divmod(math.floor(min(progress, 1.0) * columns * 2), 2)
        whole, part, rest = ("#", "-", "-") if ascii_only else ("━", "╸", "─")
        parts.insert(1, whole * full + part * half + rest * (columns - full - half))
    return "  ".join(parts)[: max(0, width)]
