"""What a search leaves in its folder: a table of trials, the best as an experiment, statistics and a report."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project, command, display_path
from boltcutter.run.folder import read_record
from boltcutter_search.export import write_best
from boltcutter_search.ranking import Metrics, rank
from boltcutter_search.report import write_report
from boltcutter_search.results import Result
from boltcutter_search.space import Space
from boltcutter_search.statistics import format_runs, format_statistics, summarize_runs, write_statistics
from boltcutter_search.table import format_trials

REPEATED = {"seed": "seed", "data.fold": "fold"}  # keys in which repeated runs differ
NOT_AVERAGED = ("train/", "throughput/", "lr-", "epoch")  # prefixes of metrics


def write_outcome(
    folder: Path,
    results: Sequence[Result],
    *,
    project: Project,
    overrides: Sequence[str],
    metrics: Metrics,
    space: Space,
    search_command: str,
    averages: bool,
    num_folds: int | None,
) -> None:
    """Write ``trials.csv``, ``best.yaml`` or ``statistics.csv``, and ``report.html``, and print a summary.

    Args:
        folder: Folder of the search.
        results: All trials.
        project: Project in which the search ran.
        overrides: Overrides of training of all trials.
        metrics: Name and mode of each metric.
        space: The search space.
        search_command: Command of the search.
        averages: Whether runs are repeated over seeds or folds, rather than compared.
        num_folds: Number of folds of cross-validation.
    """
    write_trials(folder / "trials.csv", results, metrics)
    best = next(iter(rank(results, metrics)), None)
    statistics = None
    if averages:
        statistics = summarize_groups(folder, results, num_folds)
        print(statistics)
    else:
        print(format_trials(results, metrics))
    if best and (not averages or space.parameters):
        path = folder / "best.yaml"
        values = {key: value for key, value in best.values.items() if key not in (*REPEATED, "data.num_folds")}
        kept = Result(**{**vars(best), "values": values})
        write_best(path, kept, project=project, overrides=overrides, metrics=metrics, search_command=search_command)
        print(f"best    {command('train', f'experiment={display_path(path)}')}")
    report = write_report(
        folder,
        results,
        title=folder.name,
        metrics=metrics,
        log_keys=space.log_keys,
        command=search_command,
        statistics=statistics,
    )
    print(f"report  {display_path(report)}")


def write_trials(path: Path, results: Sequence[Result], metrics: Metrics) -> None:
    """Write a CSV file with one row for each trial."""
    keys = list(dict.fromkeys(key for result in results for key in result.values))
    names = [name for name, _ in metrics]
    names += sorted({name for result in results for name in result.metrics} - set(names))
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["trial", "state", *keys, *names, "seconds", "folder", "error"])
    for result in results:
        scores = {**result.metrics, **result.objectives}
        values = [result.values.get(key, "") for key in keys]
        row = [result.number, result.state, *values, *(scores.get(name, "") for name in names)]
        writer.writerow([*row, result.seconds, result.folder.name, result.error])
    write_text(path, file.getvalue())


def summarize_groups(folder: Path, results: Sequence[Result], num_folds: int | None) -> str:
    """Average the metrics over the runs that differ in seed or fold only; writes ``statistics.csv``, or one for each.

    Returns:
        The tables as text.
    """
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for result in results:
        compared = {k: v for k, v in result.values.items() if k not in (*REPEATED, "data.num_folds")}
        title = " ".join(f"{key}={value}" for key, value in compared.items())
        name = " ".join(f"{REPEATED[k]} {v}" for k, v in result.values.items() if k in REPEATED)
        scores = {**result.metrics, **result.objectives, **test_metrics(result.folder)}
        complete = result.state == "complete"
        groups.setdefault(title, {})[name if complete else f"{name} ({result.state})"] = {
            metric: value for metric, value in scores.items() if complete and not metric.startswith(NOT_AVERAGED)
        }
    lines = []
    for index, (title, runs) in enumerate(groups.items()):
        statistics = summarize_runs(runs, num_folds)
        write_statistics(folder / (f"statistics-{index}.csv" if len(groups) > 1 else "statistics.csv"), statistics)
        lines += [*([title] if title else []), format_runs(runs), "", format_statistics(statistics), ""]
    return "\n".join(lines).rstrip()


def test_metrics(folder: Path) -> dict[str, float]:
    """Metrics of the test split, if the run was tested."""
    with suppress(ConfigError):
        found: Mapping[str, Any] = read_record(folder).get("test") or {}
        return {str(name): float(value) for name, value in found.items()}
    return {}
