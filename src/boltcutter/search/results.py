"""The trials of a search: their order, the best first, and how they are shown."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boltcutter.config.errors import one_line
from boltcutter.formatting import aligned
from boltcutter.report.template import format_duration
from boltcutter.run.metrics import Mode

Metrics = Sequence[tuple[str, Mode]]
STATES = ("complete", "pruned", "failed", "running")
MAX_ERROR = 160  # characters


@dataclass(frozen=True)
class Result:
    """One trial of a search."""

    number: int  # from 0
    state: str  # one of ``STATES``; pruned: stopped early by the scheduler
    values: dict[str, Any]  # that were sampled, by key of the configuration
    objectives: dict[str, float]  # final value of each metric of the search; empty if there is none
    curve: list[tuple[int, float]]  # step and value of the first metric after each validation
    metrics: dict[str, float]  # all, of the best validation by a single objective; of several, of the last one
    seconds: float  # of training
    folder: Path  # of the run
    error: str = ""  # why it failed, on one line

    def costs(self, metrics: Metrics) -> tuple[float, ...]:
        """Final values, negated if larger is better; NaN where there is none."""
        return tuple(self.objectives.get(name, math.nan) * (-1 if mode == "max" else 1) for name, mode in metrics)


def rank(results: Sequence[Result], metrics: Metrics) -> list[Result]:
    """Sort the complete trials, the best first; with several metrics the Pareto front comes first, then the others.

    Within the front and behind it, trials are sorted by the first metric; of equal ones the earlier is first. Trials
    without a finite value of every metric are left out.
    """
    front, finite = pareto_front(results, metrics), _complete(results, metrics)
    return sorted(finite, key=lambda result: (result.number not in front, *result.costs(metrics), result.number))


def pareto_front(results: Sequence[Result], metrics: Metrics) -> set[int]:
    """Numbers of the complete trials that no other one dominates; none with a single metric."""
    front: dict[int, tuple[float, ...]] = {}
    if len(metrics) > 1:
        # In this order, a trial is dominated only by those before it, and if so by one of the front.
        for costs, number in sorted((result.costs(metrics), result.number) for result in _complete(results, metrics)):
            if not any(other != costs and all(map(float.__le__, other, costs)) for other in front.values()):
                front[number] = costs
    return set(front)


def _complete(results: Sequence[Result], metrics: Metrics) -> list[Result]:
    return [r for r in results if r.state == "complete" and all(map(math.isfinite, r.costs(metrics)))]


def format_value(value: Any) -> str:
    """Format a sampled value or a metric with at most five significant digits, without trailing zeros."""
    if isinstance(value, float):
        return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.5g}")  # 1e-05 becomes 1e-5
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def count_states(results: Sequence[Result]) -> dict[str, int]:
    """Number of trials in each state, without the states that no trial has."""
    counts = Counter(result.state for result in results)
    return {state: counts[state] for state in STATES if counts[state]}


def shown_error(result: Result) -> str:
    """Why a trial failed: the first line of its error, shortened."""
    return one_line(result.error.strip().partition("\n")[0] or "unknown error", MAX_ERROR)


def format_trials(results: Sequence[Result], metrics: Metrics, limit: int = 10) -> str:
    """Format the best trials, their metrics and sampled values; then count states and list the failed trials.

    With several metrics, the Pareto front is marked by ``*``.
    """
    ranked, front, lines = rank(results, metrics), pareto_front(results, metrics), list[str]()
    if ranked:
        keys = list(dict.fromkeys(key for result in ranked for key in result.values))
        rows = [["trial", *(name for name, _ in metrics), *keys, "time"]]
        for result in ranked[:limit]:
            shown = [*(result.objectives[name] for name, _ in metrics), *map(result.values.get, keys)]
            number = f"{result.number:04d}" + "*" * (result.number in front)
            rows.append([number, *map(format_value, shown), format_duration(result.seconds)])
        lines += aligned(rows)
        lines += [f"… and {len(ranked) - limit} more"] * (len(ranked) > limit)
        lines += ["* not dominated by any other trial"] * bool(front)
    counts = ", ".join(f"{count} {state}" for state, count in count_states(results).items())
    lines.append(f"{len(results)} {'trial' if len(results) == 1 else 'trials'}" + (f": {counts}" if counts else ""))
    failed = [result for result in results if result.state == "failed"]
    lines += [f"trial {result.number:04d} failed: {shown_error(result)}" for result in failed[:limit]]
    lines += [f"… and {len(failed) - limit} more failed"] * (len(failed) > limit)
    return "\n".join(lines)


class Progress:
    """Shows trials as they end.

    Attributes:
        best: Best value of the first metric; None before the first complete trial.
        results: Trials that have ended.
    """

    def __init__(self, metrics: Metrics, total: int, earlier: Iterable[Result] = ()) -> None:
        self.metrics, self.total = metrics, total
        self.best: float | None = None
        self.results: list[Result] = []
        for result in earlier:
            if result.state != "running":
                self._add(result)

    def ended(self, result: Result) -> None:
        """Show a trial that ended."""
        self._add(result)
        scores = " ".join(f"{name}={format_value(value)}" for name, value in result.objectives.items())
        values = " ".join(f"{key}={format_value(value)}" for key, value in result.values.items())
        text = f"trial {result.number} {result.state}: {result.error or scores}  {values}"
        print(f"[{len(self.results)}/{self.total}] {text}", flush=True)

    def _add(self, result: Result) -> None:
        self.results.append(result)
        name, mode = self.metrics[0]
        if result.state == "complete" and name in result.objectives:
            value = result.objectives[name]
            self.best = value if self.best is None else (max if mode == "max" else min)(self.best, value)
