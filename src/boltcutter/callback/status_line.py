"""One line at the bottom of a terminal, below all that is printed."""

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
SHORTEST_BAR = 10  # columns


class Field(NamedTuple):
    """A name and its value; of little ``weight`` if it is left out first where room is scarce."""

    name: str
    value: str
    weight: int

    @property
    def text(self) -> str:
        """As it is shown."""
        return f"{self.name} {self.value}" if self.name else self.value


class StatusLine:
    """A line at the bottom of a terminal; the text that others print stays above it.

    Args:
        console: The terminal.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.drawn = False
        self.busy = False  # somebody has printed the beginning of a line
        self.line = Text()
        self.before: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
        self.above = tuple(StreamRedirect(f, self.make_way) if f.isatty() else f for f in self.before)
        sys.stdout, sys.stderr = self.above

    def show(self, fields: Sequence[Field], share: float | None) -> None:
        """Draw the line anew."""
        if not self.busy:
            self.line = layout(fields, share, self.console.width - 1, ascii_only=self.console.options.ascii_only)
            self.console.control(ERASE)
            self._print()
            self.console.file.flush()
            self.drawn = True

    def make_way(self, text: str) -> None:
        """Take the line away for ``text`` that is about to be printed."""
        if self.drawn and text:
            self.console.control(ERASE)
            self.console.file.flush()
            self.drawn = False
        if text:
            self.busy = not text.endswith("\n")

    def close(self) -> None:
        """Leave the line standing, and standard output as it was."""
        if (sys.stdout, sys.stderr) == self.above:
            sys.stdout, sys.stderr = self.before
        if self.drawn:
            self.console.print()
        elif self.line and not self.busy:
            self._print()
            self.console.print()
        self.drawn, self.line = False, Text()

    def _print(self) -> None:
        self.console.print(self.line, end="", no_wrap=True, overflow="crop", crop=True)


class StreamRedirect:
    """A stream that asks for room before it writes."""

    def __init__(self, stream: TextIO, make_way: Callable[[str], None]) -> None:
        self.stream, self.make_way = stream, make_way

    def write(self, text: str) -> int:
        """Write above the line."""
        self.make_way(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def layout(fields: Sequence[Field], share: float | None, width: int, *, ascii_only: bool = False) -> Text:
    """The first field, a bar, the other fields: as many of them as leave room for the bar.

    Args:
        fields: In order.
        share: How far the bar goes, in [0, 1]; None for no bar.
        width: Columns.
        ascii_only: Whether the terminal has no lines to draw with.
    """
    kept = list(fields)
    bar = SHORTEST_BAR + 2 if share is not None else 0
    while len(kept) > 1 and sum(len(f.text) + 2 for f in kept) - 2 + bar > width:
        kept.remove(min(kept[1:], key=lambda f: f.weight))
    line = Text()
    for place, field in enumerate(kept):
        line.append("  " if place else "")
        line.append(f"{field.name} " if field.name else "", "bold" if place == 0 else "dim")
        line.append(field.value, "bold" if place == 0 else "")
        if place == 0 and share is not None:
            columns = max(SHORTEST_BAR, width - sum(len(f.text) + 2 for f in kept))
            line.append("  ")
            line.append(_bar(min(share, 1.0), columns, ascii_only))
    return line


def _bar(share: float, columns: int, ascii_only: bool) -> Text:
    halves = math.floor(share * columns * 2)
    full, half = divmod(halves, 2)
    whole, part, rest = ("#", "-", "-") if ascii_only else ("━", "╸", "━")
    done = Text(whole * full + part * half, "green" if share == 1 else "cyan")
    return done.append(rest * (columns - full - half), "bright_black")
