"""The trials of a search as a table in the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from boltcutter.config.errors import one_line
from boltcutter.formatting import aligned
from boltcutter.report.template import format_duration
from boltcutter_search.ranking import Metrics, has_objectives, pareto_front, rank
from boltcutter_search.results import Result

STATES = ("complete", "pruned", "failed", "running")
MAX_ERROR = 160  # characters


def format_value(value: Any) -> str:
    """Format a sampled value or a metric with at most five significant digits, without trailing zeros."""
    if isinstance(value, bool) or not isinstance(value, float):
        return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if not math.isfinite(value):
        return str(value)
    text = f"{value:.5g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}{e}{int(exponent)}" if e else text  # 1e-05 becomes 1e-5


def count_states(results: Sequence[Result]) -> dict[str, int]:
    """Number of trials in each state, without the states that no trial has."""
    counts = Counter(result.state for result in results)
    return {state: counts[state] for state in (*STATES, *sorted(counts.keys() - set(STATES))) if counts[state]}


def shown_error(result: Result) -> str:
    """Why a trial failed: the first line of its error, shortened."""
    return one_line(result.error.strip().partition("\n")[0] or "unknown error", MAX_ERROR)


def format_trials(results: Sequence[Result], metrics: Metrics, limit: int = 10) -> str:
    """Format the best trials, their metrics and sampled values; then count states and list the failed trials.

    Args:
        results: All trials.
        metrics: Name and mode of each metric of the search. With several, the Pareto front is marked by ``*``.
        limit: Number of trials, and of failed trials, that are listed.
    """
    shown = rank(results, metrics)
    if not shown:  # nothing is complete yet
        shown = [result for result in results if result.state != "failed" and has_objectives(result, metrics)]
    front = {result.number for result in pareto_front(results, metrics)} if len(metrics) > 1 else set()
    lines = []
    if shown:
        keys = list(dict.fromkeys(key for result in shown for key in result.values))
        rows = [["trial", *(name for name, _ in metrics), *keys, "time"]]
        for result in shown[:limit]:
            number = f"{result.number:04d}" + ("*" if result.number in front else "")
            objectives = [format_value(result.objectives.get(name)) for name, _ in metrics]
            values = [format_value(result.values.get(key)) for key in keys]
            rows.append([number, *objectives, *values, format_duration(result.seconds)])
        lines += aligned(rows)
        lines += [f"… and {len(shown) - limit} more"] * (len(shown) > limit)
        lines += ["* not dominated by any other trial"] * bool(front)
    counts = ", ".join(f"{count} {state}" for state, count in count_states(results).items())
    lines.append(f"{len(results)} {'trial' if len(results) == 1 else 'trials'}" + (f": {counts}" if counts else ""))
    failed = [result for result in results if result.state == "failed"]
    lines += [f"trial {result.number:04d} failed: {shown_error(result)}" for result in failed[:limit]]
    lines += [f"… and {len(failed) - limit} more failed"] * (len(failed) > limit)
    return "\n".join(lines)
