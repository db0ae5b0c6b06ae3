"""What a search leaves in its folder: a table of trials, the best as an experiment, statistics and a report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from boltcutter import run_files
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter.formatting import csv_text
from boltcutter.project import display_path
from boltcutter.run.folder import read_record
from boltcutter.search.export import write_best
from boltcutter.search.plan import REPEATED, Plan
from boltcutter.search.repeats import format_runs, format_statistics, summarize_runs
from boltcutter.search.report import Average, Importances, write_report
from boltcutter.search.results import Metrics, Result, format_trials, format_value, rank

NOT_SEARCHED = (*REPEATED, "data.num_folds")
NOT_AVERAGED = ("train/", "throughput/", "lr-", "epoch")  # prefixes of metrics


def write_outcome(plan: Plan, results: Sequence[Result], importances: Importances = ()) -> None:
    """Write ``trials.csv``, ``best.yaml`` and ``report.html``, and print a summary."""
    folder, folds, statistics = plan.folder, num_folds(plan, results), None
    averages = bool(plan.repeats)
    write_trials(folder / run_files.TRIALS, results, plan.metrics)
    if averages:
        statistics = summarize_groups(results, folds)
    print(statistics or format_trials(results, plan.metrics))
    best = best_on_average(results, plan.metrics) if averages else next(iter(rank(results, plan.metrics)), None)
    if best and averages and any(parameter.key not in NOT_SEARCHED for parameter in plan.space.parameters):
        means = ", ".join(f"mean {name} {format_value(mean)}" for name, mean in best.objectives.items())
        print(f"best    {write_best(plan, best, means)}")
    elif best and not averages:
        print(f"best    {write_best(plan, best)}")
    repeated = average(plan, results, best) if averages else None
    report = write_report(plan, results, average=repeated, statistics=statistics, importances=importances)
    print(f"report  {display_path(report)}")


def num_folds(plan: Plan, results: Sequence[Result]) -> int | None:
    """Number of folds of a cross-validation of which the trials are all or, in a grid, some."""
    count = plan.count("data.fold")
    for result in results if count and not plan.search.folds else ():
        with suppress(ConfigError, KeyError, TypeError):
            return int(read_record(result.folder)["config"]["data"]["num_folds"])
    return count


def best_on_average(results: Sequence[Result], metrics: Metrics, repeats: int | None = None) -> Result | None:
    """The best values by the means over seeds and folds, as a trial without these; None if no such group is complete.

    A group of which a trial has failed or is missing is left out: its mean is over other seeds and folds.

    Args:
        results: All trials.
        metrics: Of the search.
        repeats: Number of trials of a complete group; by default that of the largest.
    """
    groups = group_repeated(results)
    size = repeats or max(map(len, groups.values()), default=0)
    averages = [
        replace(group[0], objectives={name: fmean(r.objectives[name] for r in group) for name, _ in metrics})
        for group in groups.values()
        if len(rank(group, metrics)) == size
    ]
    return next(iter(rank(averages, metrics)), None)


def group_repeated(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs that differ in seed or fold only, without these values."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        values = {key: value for key, value in result.values.items() if key not in NOT_SEARCHED}
        groups.setdefault(repr(values), []).append(replace(result, values=values))
    return groups


def average(plan: Plan, results: Sequence[Result], best: Result | None) -> Average:
    """The means over seeds and folds of the values that are best on average, or of the only ones that there are."""
    groups = group_repeated(results)
    group = groups[repr(best.values)] if best else next(iter(groups.values()), []) if len(groups) == 1 else []
    scores = {str(run.number): run.objectives if run.state == "complete" else {} for run in group}
    counts = {name: plan.count(key) for key, name in sorted(REPEATED.items())}
    over = " × ".join(f"{count} {name}s" for name, count in counts.items() if count)
    return Average(summarize_runs(scores, num_folds(plan, results)), over, len(group), group[0].values if group else {})


def write_trials(path: Path, results: Sequence[Result], metrics: Metrics) -> None:
    """Write a CSV file with one row for each trial."""
    keys = list(dict.fromkeys(key for result in results for key in result.values))
    names = [name for name, _ in metrics]
    names += sorted({name for result in results for name in result.metrics} - set(names))
    rows: list[list[Any]] = [["trial", "state", *keys, *names, "seconds", "folder", "error"]]
    for result in results:
        scores = {**result.metrics, **result.objectives}
        values = [result.values.get(key, "") for key in keys]
        row = [result.number, result.state, *values, *(scores.get(name, "") for name in names)]
        rows.append([*row, result.seconds, result.folder.name, result.error])
    write_text(path, csv_text(rows))


def summarize_groups(results: Sequence[Result], num_folds: int | None) -> str:
    """Tables of the metrics, averaged over the runs that differ in seed or fold only."""
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for result in results:
        compared = {k: v for k, v in result.values.items() if k not in NOT_SEARCHED}
        title = " ".join(f"{key}={value}" for key, value in compared.items())
        name = " ".join(f"{REPEATED[k]} {v}" for k, v in result.values.items() if k in REPEATED)
        scores = {**result.metrics, **result.objectives, **test_metrics(result.folder)}
        complete = result.state == "complete"
        groups.setdefault(title, {})[name if complete else f"{name} ({result.state})"] = {
            metric: value for metric, value in scores.items() if complete and not metric.startswith(NOT_AVERAGED)
        }
    lines = []
    for title, runs in groups.items():
        statistics = format_statistics(summarize_runs(runs, num_folds))
        lines += [*([title] if title else []), format_runs(runs), "", statistics, ""]
    return "\n".join(lines).rstrip()


def test_metrics(folder: Path) -> dict[str, float]:
    """Metrics of the test split, if the run was tested."""
    with suppress(ConfigError):
        return {str(name): float(value) for name, value in (read_record(folder).get("test") or {}).items()}
    return {}
