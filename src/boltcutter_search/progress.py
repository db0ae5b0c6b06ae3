"""The progress of a search in the terminal: a line for each trial that ended."""

from __future__ import annotations

from collections.abc import Iterable

from boltcutter_search.results import Metrics, Result, format_value


class Progress:
    """Shows trials as they end.

    Attributes:
        best: Best value of the first metric; None before the first complete trial.
    """

    def __init__(self, metrics: Metrics, total: int, earlier: Iterable[Result] = ()) -> None:
        self.metrics, self.total = metrics, total
        self.best: float | None = None
        self._count = 0
        for result in earlier:
            if result.state != "running":
                self._add(result)

    def ended(self, result: Result) -> None:
        """Show a trial that ended."""
        self._add(result)
        scores = " ".join(f"{name}={format_value(value)}" for name, value in result.objectives.items())
        values = " ".join(f"{key}={format_value(value)}" for key, value in result.values.items())
        text = f"trial {result.number} {result.state}: {result.error or scores}  {values}"
        print(f"[{self._count}/{self.total}] {text}", flush=True)

    def _add(self, result: Result) -> None:
        self._count += 1
        name, mode = self.metrics[0]
        if result.state == "complete" and name in result.objectives:
            value = result.objectives[name]
            self.best = value if self.best is None else (max if mode == "max" else min)(self.best, value)
