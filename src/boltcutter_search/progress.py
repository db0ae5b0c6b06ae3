"""The state of a search in the terminal: a table that is redrawn, or a line for each trial that ended."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from boltcutter.formatting import format_duration
from boltcutter_search.results import Result
from boltcutter_search.settings import Mode
from boltcutter_search.trial import Report

INTERVAL = 1.0  # seconds between two drawings of the table
BEST_SHOWN = 3  # of the trials that ended


class Progress:
    """Shows trials as they run and end.

    Args:
        metrics: Metrics and modes of the search.
        total: Number of trials.
        earlier: Trials that ended before this process.
    """

    def __init__(self, metrics: Sequence[tuple[str, Mode]], total: int, earlier: Iterable[Result] = ()) -> None:
        self.metrics, self.total = metrics, total
        self._counts: Counter[str] = Counter()
        self._best: list[tuple[float, str]] = []
        self._values: dict[int, Mapping[str, Any]] = {}
        self._drawn, self._lines = 0.0, 0
        self._start = time.monotonic()
        for result in earlier:
            if result.state != "running":
                self._count(result)

    @property
    def best(self) -> float | None:
        """The best value so far."""
        if not self._best:
            return None
        return -self._best[0][0] if self.metrics[0][1] == "max" else self._best[0][0]

    def began(self, number: int, values: Mapping[str, Any]) -> None:
        """Note the values of a trial."""
        self._values[number] = values

    def ended(self, result: Result) -> None:
        """Show a trial that ended."""
        line = self._count(result)
        self._values.pop(result.number, None)
        self._clear()
        print(f"[{sum(self._counts.values())}/{self.total}] {line}", flush=True)

    def refresh(self, running: Mapping[int, Sequence[Report]]) -> None:
        """Draw the table of running trials, if this is a terminal and the last drawing is old enough.

        Args:
            running: Validations of each trial, by number.
        """
        if not sys.stdout.isatty() or time.monotonic() < self._drawn + INTERVAL:
            return
        self._drawn = time.monotonic()
        counts = ", ".join(f"{count} {state}" for state, count in self._counts.items())
        elapsed = format_duration(self._drawn - self._start)
        lines = [f"{sum(self._counts.values())} of {self.total} trials ended{counts and f' ({counts})'}, {elapsed}"]
        lines += [f"  best  {text}" for _, text in self._best]
        for number, reports in running.items():
            name = self.metrics[0][0]
            scores = [report.metrics[name] for report in reports if name in report.metrics]
            shown = f"{name}={scores[-1]:.4g} after {len(scores)} validations" if scores else "starting"
            lines.append(f"  {number:4}  {shown}  {format_values(self._values.get(number, {}))}")
        columns, rows = shutil.get_terminal_size()
        lines = [line[: columns - 1] for line in lines[: rows - 1]]  # lines that wrap could not be erased
        self._clear()
        print("\n".join(lines), flush=True)
        self._lines = len(lines)

    def _count(self, result: Result) -> str:
        self._counts[result.state] += 1
        scores = " ".join(f"{name}={value:.4g}" for name, value in result.objectives.items())
        text = f"trial {result.number} {result.state}: {result.error or scores}  {format_values(result.values)}"
        name, mode = self.metrics[0]
        if result.state == "complete" and name in result.objectives:
            value = result.objectives[name]
            self._best.append((-value if mode == "max" else value, text))
            self._best = sorted(self._best)[:BEST_SHOWN]
        return text

    def _clear(self) -> None:
        if self._lines:
            print(f"\x1b[{self._lines}A\x1b[J", end="")  # up, and erase what is below
            self._lines = 0


def format_values(values: Mapping[str, Any]) -> str:
    """Format sampled values on one line, floats with four digits."""
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
