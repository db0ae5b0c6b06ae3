"""The order of a search's trials: best first, or by Pareto dominance for several metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from boltcutter.run.metrics import Mode
from boltcutter_search.results import Result

Metrics = Sequence[tuple[str, Mode]]


def has_objectives(result: Result, metrics: Metrics) -> bool:
    """Whether a trial has a finite final value of every metric."""
    return all(math.isfinite(result.objectives.get(name, math.nan)) for name, _ in metrics)


def rank(results: Sequence[Result], metrics: Metrics) -> list[Result]:
    """Sort the complete trials, the best first; with several metrics the Pareto front comes first, then the others.

    Within the front and behind it, trials are sorted by the first metric; of equal ones the earlier is first.
    """
    complete = [result for result in results if result.state == "complete" and has_objectives(result, metrics)]
    front = {result.number for result in pareto_front(complete, metrics)} if len(metrics) > 1 else set()
    return sorted(complete, key=lambda result: (result.number not in front, *_costs(result, metrics), result.number))


def pareto_front(results: Sequence[Result], metrics: Metrics) -> list[Result]:
    """The complete trials that no other one dominates, sorted by the first metric."""
    complete = [result for result in results if result.state == "complete" and has_objectives(result, metrics)]
    front: list[tuple[tuple[float, ...], Result]] = []
    # In this order, a trial is dominated only by those before it, and if so by one of the front.
    for costs, result in sorted(((_costs(result, metrics), result) for result in complete), key=lambda found: found[0]):
        if not any(other != costs and all(map(float.__le__, other, costs)) for other, _ in front):
            front.append((costs, result))
    return [result for _, result in front]


def _costs(result: Result, metrics: Metrics) -> tuple[float, ...]:
    """Final values, negated if larger is better."""
    return tuple(float(result.objectives[name]) * (-1 if mode == "max" else 1) for name, mode in metrics)
