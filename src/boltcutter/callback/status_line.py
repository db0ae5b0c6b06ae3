"""A status line at the bottom of a terminal, below all other output."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
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
        console: Console of the terminal.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.drawn = False
        self.busy = False  # the last printed line is incomplete
        self.line = Text()
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
            self.line = layout(fields, progress, self.console.width - 1, ascii_only=self.console.options.ascii_only)
            self.console.control(ERASE)
            self._print()
            self.console.file.flush()
            self.drawn = True

    def clear(self, text: str) -> None:
        """Erase the line before ``text`` is printed."""
        if self.drawn and text:
            self.console.control(ERASE)
            self.console.file.flush()
            self.drawn = False
        if text:
            self.busy = not text.endswith("\n")

    def close(self) -> None:
        """Keep the last line on screen, and restore standard output and error."""
        if (sys.stdout, sys.stderr) == self.redirects:
            sys.stdout, sys.stderr = self.streams
        if self.drawn:
            self.console.print()
        elif self.line and not self.busy:
            self._print()
            self.console.print()
        self.drawn, self.line = False, Text()

    def _print(self) -> None:
        self.console.print(self.line, end="", no_wrap=True, overflow="crop", crop=True)


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


def layout(fields: Sequence[Field], progress: float | None, width: int, *, ascii_only: bool = False) -> Text:
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
    line = Text()
    for i, field in enumerate(kept):
        line.append("  " if i else "")
        line.append(f"{field.name} " if field.name else "", "bold" if i == 0 else "dim")
        line.append(field.value, "bold" if i == 0 else "")
        if i == 0 and progress is not None:
            columns = max(MIN_BAR_WIDTH, width - sum(len(f.text) + 2 for f in kept))
            line.append("  ")
            line.append(_bar(min(progress, 1.0), columns, ascii_only))
    return line


def _bar(progress: float, columns: int, ascii_only: bool) -> Text:
    halves = math.floor(progress * columns * 2)
    full, half = divmod(halves, 2)
    whole, part, rest = ("#", "-", "-") if ascii_only else ("━", "╸", "━")
    done = Text(whole * full + part * half, "green" if progress == 1 else "cyan")
    return done.append(rest * (columns - full - half), "bright_black")
