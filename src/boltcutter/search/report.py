"""HTML report of a search: one self-contained file with the trials, charts and the importance of the values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from boltcutter import run_files
from boltcutter.checkpoint.atomic import write_text
from boltcutter.report.page import downsample
from boltcutter.report.template import load_template, redact_command
from boltcutter.search.plan import Plan
from boltcutter.search.repeats import Statistics
from boltcutter.search.results import Result, count_states, format_value, pareto_front, rank, shown_error

Importances = Sequence[tuple[str, dict[str, float]]]  # of each value, by metric

MAX_POINTS = 200_000  # of all learning curves together
MIN_CURVE_POINTS = 20


class Average(NamedTuple):
    """The metrics of a search over folds or seeds, of which none is chosen."""

    statistics: Mapping[str, Statistics]
    over: str  # such as "5 folds"
    runs: int  # also those without a value
    values: Mapping[str, Any]  # that all these runs have, by key of the configuration


def write_report(
    plan: Plan,
    results: Sequence[Result],
    *,
    average: Average | None = None,
    statistics: str | None = None,
    importances: Importances = (),
) -> Path:
    """Write ``report.html`` in the folder of a search, to which its links to the trials are relative.

    Args:
        plan: The search.
        results: Its trials.
        average: Of a search over folds or seeds: what stands in place of the best trial.
        statistics: Text with the statistics of such a search.
        importances: How strongly values decide whether a trial is good, by metric.
    """
    path, data = plan.folder / run_files.REPORT, _collect(plan, results)
    best = None if average else next(iter(rank(results, plan.metrics)), None)
    chosen: Mapping[str, Any] = average.values if average else best.values if best else {}
    page = load_template(Path(__file__).with_name("report.html")).render(
        title=plan.folder.name,
        folder=plan.folder,
        metrics=plan.metrics,
        counts=count_states(results),
        total=len(results),
        best=best,
        best_link=_link(plan.folder, best) if best else None,
        best_values={key: format_value(value) for key, value in chosen.items()},
        average=average,
        front=sum(data["front"]) if len(plan.metrics) > 1 else None,
        duration=sum(result.seconds for result in results),
        command=_redacted(plan.command),
        statistics=statistics,
        importances=importances,
        keys=data["keys"],
        has_curves=any(data["curves"]),
        data=data | {"repeated": average is not None},
    )
    write_text(path, page.encode(errors="replace").decode())  # values may hold bytes of file names
    return path


def _collect(plan: Plan, results: Sequence[Result]) -> dict[str, Any]:
    """Everything that the charts and the table show; the trials as columns, as they may be thousands."""
    metrics, log_keys = plan.metrics, plan.space.log_keys
    keys = list(dict.fromkeys(key for result in results for key in result.values))
    axes = [_axis(key, results, log_keys) for key in keys]
    limit = max(MIN_CURVE_POINTS, MAX_POINTS // max(1, len(results)))
    front = pareto_front(results, metrics)
    ranked = {result.number: place for place, result in enumerate(rank(results, metrics))}
    return {
        "metrics": [{"name": name, "maximize": mode == "max"} for name, mode in metrics],
        "keys": axes,
        "number": [result.number for result in results],
        "state": [result.state for result in results],
        "rank": [ranked.get(result.number) for result in results],
        "front": [result.number in front for result in results],
        "values": [_column(axis, results) for axis in axes],
        "objectives": [[_number(result.objectives.get(name)) for result in results] for name, _ in metrics],
        "seconds": [round(result.seconds, 1) for result in results],
        "error": [shown_error(result) if result.error or result.state == "failed" else "" for result in results],
        "link": [_link(plan.folder, result) for result in results],
        "curves": [_curve(result, limit) for result in results],
    }


def _axis(key: str, results: Sequence[Result], log_keys: Collection[str]) -> dict[str, Any]:
    """Scale of a value's axis: linear, logarithmic, or the options of a choice."""
    values = [result.values[key] for result in results if key in result.values]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return {"name": key, "log": key in log_keys and all(value > 0 for value in values), "options": None}
    options = sorted(
        set(map(format_value, values)), key=lambda text: text.zfill(9) if re.fullmatch("[0-9]+", text) else text
    )
    return {"name": key, "log": False, "options": options}


def _column(axis: dict[str, Any], results: Sequence[Result]) -> list[Any]:
    """Values on an axis: numbers, or indices of options; None where a trial has no such value."""
    values = [result.values.get(axis["name"]) for result in results]
    if axis["options"] is None:
        return [value if isinstance(value, int) else _number(value, digits=7) for value in values]
    places = {option: place for place, option in enumerate(axis["options"])}
    return [None if value is None else places[format_value(value)] for value in values]


def _number(value: float | None, digits: int = 6) -> float | None:
    """A number for JSON, which has neither NaN nor infinity."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def _curve(result: Result, limit: int) -> list[list[float]]:
    """Steps and values of a learning curve, with at most ``limit`` points."""
    points = [(step, value) for step, value in result.curve if math.isfinite(value)]
    if not points:
        return []
    values = np.array([value for _, value in points], np.float64)
    chosen = downsample(values, limit)
    return [[points[index][0] for index in chosen], [float(f"{values[index]:.5g}") for index in chosen]]


def _link(folder: Path, result: Result) -> str | None:
    """URL of a trial's report relative to the search's, so that the folder can be moved."""
    report = result.folder / run_files.REPORT
    return quote(os.fsencode(os.path.relpath(report, folder))) if report.is_file() else None


def _redacted(command: str) -> str:
    try:
        return redact_command(command)
    except ValueError:  # quotes that are not closed
        return ""
