"""Statistics over repeated runs: the folds of a cross-validation, or several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, stdev

from boltcutter.formatting import aligned
from boltcutter.search.results import format_value

Runs = Mapping[str, Mapping[str, float | None]]  # values of metrics, by run and metric
STUDENT, CORRECTED = "95% interval (Student's t)", "95% interval (corrected for folds)"
NO_SPREAD = (
    "exactly equal in all runs, which is suspicious; check that the data module uses num_folds and fold, and that "
    "weights and order depend on the seed"
)
OVERLAP = (
    "Student's t assumes independent runs, but folds share training samples, so its interval is too narrow; the "
    "corrected one is by Nadeau and Bengio (2003)"
)


@dataclass(frozen=True)
class Statistics:
    """Statistics of one metric over runs."""

    count: int  # runs with a finite value
    mean: float | None = None  # None without values
    std: float | None = None  # of the sample, divided by ``count`` - 1; None for fewer than two values
    interval: tuple[float, float] | None = None  # 95%, of the mean, by Student's t, which assumes independent runs
    corrected: tuple[float, float] | None = None  # for the overlap of folds; None without folds
    excluded: dict[str, str] = field(default_factory=dict)  # runs: ``missing``, ``nan``, ``inf`` …


def summarize(values: Mapping[str, float | None], num_folds: int | None = None) -> Statistics:
    """Compute the statistics of a metric.

    Args:
        values: Value of each run, by its name; None if it has none.
        num_folds: Number of folds if the runs are folds of a cross-validation, also of a repeated one.
    """
    excluded = {
        name: "missing" if value is None else str(float(value))
        for name, value in values.items()
        if value is None or not math.isfinite(value)
    }
    finite = [float(value) for value in values.values() if value is not None and math.isfinite(value)]
    if len(finite) < 2:
        return Statistics(len(finite), finite[0] if finite else None, excluded=excluded)
    count, mean, std = len(finite), fmean(finite), stdev(finite)
    halves = half_width(std, count), half_width(std, count, num_folds)
    plain, corrected = ((mean - half, mean + half) for half in halves)
    return Statistics(count, mean, std, plain, corrected if num_folds else None, excluded)


def summarize_runs(runs: Runs, num_folds: int | None = None) -> dict[str, Statistics]:
    """Compute the statistics of each metric."""
    names = metric_names(runs)
    return {name: summarize({run: values.get(name) for run, values in runs.items()}, num_folds) for name in names}


def metric_names(runs: Runs) -> list[str]:
    """The metrics of all runs, sorted by name."""
    return sorted({name for values in runs.values() for name in values})


def half_width(std: float, count: int, num_folds: int | None = None) -> float:
    """Half the width of the 95% confidence interval of the mean of independent values, or of folds.

    The training samples of any two folds overlap, so that their values are correlated, and the variance of the mean is
    larger than std² / count. It is estimated as (1 / count + n_val / n_train) std², where n_val / n_train is
    1 / (num_folds - 1). With repeated cross-validation, ``count`` is the number of all values.

    Args:
        std: Sample standard deviation.
        count: Number of values, at least 2.
        num_folds: Number of folds; None: the values are independent.

    Source: Student, The Probable Error of a Mean, Biometrika 6, 1908; for folds: Nadeau and Bengio, Inference for the
    Generalization Error, Machine Learning 52, 2003; for repeated cross-validation: Bouckaert and Frank, Evaluating the
    Replicability of Significance Tests for Comparing Learning Algorithms, PAKDD 2004.
    """
    from scipy.special import stdtrit  # imported here: scipy.stats, which has it too, takes longer to import

    overlap = 0.0 if num_folds is None else 1 / (num_folds - 1)
    return float(stdtrit(count - 1, 0.975)) * std * math.sqrt(1 / count + overlap)


def format_statistics(statistics: Mapping[str, Statistics]) -> str:
    """Format a table of all metrics, and list what is excluded from it."""
    has_folds = any(summary.corrected for summary in statistics.values())
    rows = [["metric", "n", "mean ± std", STUDENT, *[CORRECTED] * has_folds]]
    for name, summary in statistics.items():
        mean = " ± ".join(map(format_value, [summary.mean, *[summary.std] * (summary.std is not None)]))
        intervals = [summary.interval, *[summary.corrected] * has_folds]
        ends = [" … ".join(map(format_value, interval or [None])) for interval in intervals]
        rows.append([name, str(summary.count), mean, *ends])
    lines = aligned(rows)
    for name, summary in statistics.items():
        if summary.excluded:
            listed = ", ".join(f"{run} ({reason})" for run, reason in summary.excluded.items())
            lines.append(f"{name} excludes {listed}")
    if equal := [name for name, summary in statistics.items() if summary.std == 0]:
        lines.append(f"{', '.join(equal)}: {NO_SPREAD}")
    lines += [OVERLAP] * has_folds
    return "\n".join(lines)


def format_runs(runs: Runs) -> str:
    """Format a table with one row for each run, and the metrics of each, by its name."""
    names = metric_names(runs)
    rows = [[run, *(format_value(values.get(name)) for name in names)] for run, values in runs.items()]
    return "\n".join(aligned([["run", *names], *rows]))
