"""Groups of runs to compare: the runs that a filter or a folder stands for, and which of them are pairs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.analysis.query import equals, select, value_of
from boltcutter.analysis.record import Run, find_runs, mean_metrics, repetitions
from boltcutter.analysis.references import find
from boltcutter.config.errors import ConfigError, hint
from boltcutter.config.redaction import MAX_COMMAND
from boltcutter.config.values import format_value
from boltcutter.project import display_path
from boltcutter.run.folder import read_record
from boltcutter.run.remote.store import run_store

# Settings in which repetitions may differ, and those without effect on the result.
REPEATED = ("seed", "data.fold", "data.num_folds")
NOT_COMPARED = (
    *("folder", "checkpoints", "resume", "reproduce", "runs", "name", "tags", "report", "test", "timeout", "ckpt"),
    *("resume_exact", "data.num_workers", "trainer.enable_progress_bar", "trainer.log_every_n_steps"),
)
NOT_COMPARED_BELOW = ("logger.", "launch.", "choices.", "callback.progress.", "callback.throughput.", "checkpoint_io.")
LISTED = 3  # runs or settings that a message names


@dataclass(frozen=True)
class Result:
    """A run, its value of the metric, its local folder, and its record, of which nothing is executed."""

    run: Run
    value: float
    folder: Path
    record: dict[str, Any]

    @property
    def key(self) -> tuple[int, int, int]:
        """What the runs of a pair have in common: seed, number of folds and fold."""
        settings = self.run.settings
        return _whole(settings.get("seed")), self.num_folds or 0, _whole(settings.get("data.fold"))

    @property
    def num_folds(self) -> int | None:
        """Number of folds of the cross-validation that the run is part of."""
        return _whole(self.run.settings.get("data.num_folds")) or None

    @property
    def data(self) -> str | None:
        """Fingerprint of the data; None if it was not recorded."""
        found = self.record.get("data")
        return found if isinstance(found, str) else None


@dataclass(frozen=True)
class Group:
    """Runs of one method by seed and fold, with the number of trials of the search for its settings, and its metric."""

    label: str
    results: list[Result]
    warnings: list[str]
    trials: int
    searched: str
    is_filter: bool = False  # the label, which otherwise is a folder

    @property
    def values(self) -> list[float]:
        """The metric of each run."""
        return [result.value for result in self.results]


def read_group(text: str, known: Sequence[Run], metric: str) -> Group:
    """Find the runs of a group.

    Args:
        text: A filter of ``known``; or the name or folder of a run, of runs, of repeated seeds or folds, or of a
            search, which stands for its best trial, or the runs of the best values over seeds and folds.
        known: All runs.
        metric: Metric that is compared.
    """
    folder = Path(text).expanduser()
    if not folder.is_dir() and not any(sign in text for sign in "=<>~"):
        folder = Path(find(known, text, "group").folder)
    is_folder = folder.is_dir()
    found = find_runs(folder) if is_folder else known
    chosen = [run for run in (found if is_folder else select(found, text)) if run.kind not in ("search", "job")]
    label, warnings = display_path(folder.absolute()) if is_folder else text, list[str]()
    tuned, trials, searched = [run for run in chosen if run.kind == "trial"], 0, ""
    if tuned and is_folder and (folder / run_files.SEARCH).is_file():
        search = next(run for run in found if run.id == tuned[0].parent)
        searched = str(search.settings.get("search.metric"))
        groups = [*([run] for run in tuned), *repetitions(tuned)]
        chosen, trials = next((some for some in groups if mean_metrics(some) == search.metrics), []), len(tuned)
    elif tuned:
        chosen = [run for run in chosen if run not in tuned]
        warnings.append(f"{label}: {len(tuned)} trials of searches are no repetitions of one training, and left out")
    results = list(_with_values(label, chosen, metric, warnings))
    if not results:
        names = sorted({name for run in chosen for name in run.metrics})
        if names and metric not in names:
            raise ConfigError(f"--metric={metric}: no run of {label} has it{hint(metric, names)} ({', '.join(names)})")
        raise ConfigError("; ".join([*warnings, f"{label}: no completed runs are left; train some, or correct it"]))
    results = _without_repetitions(label, results, warnings)
    return Group(
        label, results, warnings, trials or max(_num_trials(result) for result in results), searched, not is_folder
    )


def pair(first: Group, second: Group) -> list[tuple[Result, Result]]:
    """The runs with the same seed and fold; none if they are too few of the smaller group."""
    others = {result.key: result for result in second.results}
    found = [(result, others[result.key]) for result in first.results if result.key in others]
    smaller = min(len(first.results), len(second.results))
    return found if 2 * len(found) >= smaller and (len(found) > 1 or smaller == 1) else []


def settings_of(results: Iterable[Result], prefix: str = "") -> dict[str, set[str]]:
    """The values of each setting that may affect the results, as text, except those in which repetitions differ."""
    found: dict[str, set[str]] = {}
    for run in (result.run for result in results):
        for key, value in run.settings.items():
            if key.startswith(prefix) and is_compared(key):
                found.setdefault(key, set()).add("${…}" if key in run.references else format_value(value))
    return found


def method_of(run: Run, prefix: str = "", without: Sequence[str] = ()) -> frozenset[tuple[str, str]]:
    """The settings of a run that may affect the results, except those in which repetitions differ."""
    own = run.settings.keys() - {*run.references, *without}
    return frozenset((key, repr(run.settings[key])) for key in own if key.startswith(prefix) and is_compared(key))


@cache
def is_compared(key: str) -> bool:
    """Whether a setting may affect the results, and does not tell repetitions apart."""
    return key not in (*REPEATED, *NOT_COMPARED) and not key.startswith(NOT_COMPARED_BELOW)


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _with_values(label: str, runs: Sequence[Run], metric: str, warnings: list[str]) -> Iterator[Result]:
    """The completed runs that have a finite value; adds to the warnings what the others have."""
    left_out: dict[str, list[str]] = {}
    for run in runs:
        value = run.metrics.get(metric)
        if run.status != "completed":
            left_out.setdefault(run.status, []).append(run.id)
        elif value is None:
            left_out.setdefault(f"without {metric}", []).append(run.id)
        elif not math.isfinite(value):
            left_out.setdefault(f"with {metric}={value}, so the others look too good", []).append(run.id)
        else:
            folder = run_store().pull(run.folder, "run")
            yield Result(run, value, folder, read_record(folder))
    warnings += [f"{label}: {len(ids)} left out, {reason}: {listed(ids)}" for reason, ids in left_out.items()]


def _without_repetitions(label: str, results: list[Result], warnings: list[str]) -> list[Result]:
    """The newest run of each seed and fold, in their order; raises ConfigError if two have different settings."""
    found: dict[tuple[int, int, int], Result] = {}
    for result in results:  # the oldest first
        if earlier := found.get(result.key):
            if different := [key for key, values in settings_of((earlier, result)).items() if len(values) > 1]:
                names = (different[0].partition(".")[0], different[0])  # rather a config group than a setting
                key = next(k for k in names if value_of(earlier.run, k) != value_of(result.run, k))
                both = f"{earlier.run.id} and {result.run.id} have the same seed, but differ in {key}"
                ends = [shlex.quote(f"and {equals(r.run, key)}") for r in (earlier, result)]
                raise ConfigError(f"{label}: {both}; add {' or '.join(ends)} to the filter")
            warnings.append(f"{label}: {earlier.run.id} is left out, as {result.run.id} repeats it")
        found[result.key] = result
    return [found[key] for key in sorted(found)]


def _num_trials(result: Result) -> int:
    """Number of trials of the search whose best one the experiment of a run is; 0 if it is of none."""
    with suppress(OSError, ValueError):
        words = shlex.split(str(result.record.get("command") or "")[:MAX_COMMAND])
        experiment = Path(next((w.partition("=")[2] for w in words if w.startswith("experiment=")), ""))
        if experiment.name == "best.yaml" and (experiment.parent / run_files.SEARCH).is_file():
            return sum(entry.is_dir() for entry in (experiment.parent / "trials").iterdir())
    return 0


def _whole(value: Any) -> int:
    """A whole number of a record, which may be from somebody else; 0 in place of anything else."""
    return value if isinstance(value, int) else 0
