"""The runs and searches below a folder."""

from __future__ import annotations

import gc
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from boltcutter.analysis import index
from boltcutter.analysis.facts import Facts, Place
from boltcutter.checkpoint.storage import is_url
from boltcutter.environment import lease
from boltcutter.environment.process import LOCAL_JOB, start_time
from boltcutter.run.metrics import Mode, infer_mode

STATUSES = ("running", "completed", "interrupted", "killed", "failed", "submitted", "not started", "unreadable")
OF_EACH_RUN = ("seed", "data.fold", "data.num_folds", "folder", "checkpoints", "resume")  # among repetitions
KINDS = ("run", "job", "search", "trial", "seed", "fold")


@dataclass(frozen=True)
class Run:
    """A run, or a search.

    Args:
        id: Name of its folder; of a trial, that of the search and its number: ``20260101-120000-ab12cd34/0003``.
        folder: Path of its folder, or its URL on object storage.
        name: Name of the run, which several may have.
        status: One of ``STATUSES``: ``interrupted`` is by a signal, ``submitted`` is launched, but not started.
        started: Time of its start, in seconds since the epoch.
        seconds: Duration of all attempts that have ended; None if there is none.
        settings: Settings by dotted key, with references to other keys resolved; references to the environment are not.
        metrics: Metrics by name: those of validation at the best checkpoint, those of the test, and otherwise the last.
        devices: Number and kind of devices.
        tags: Tags of the configuration and of ``boltcutter runs tag``.
        note: Note of ``boltcutter runs note``.
        kind: ``run``, ``search``, ``trial``, ``seed`` or ``fold`` of a search, or ``job``, which was launched.
        parent: Id of the search of a trial.
        reason: How the last attempt ended.
        references: Keys of settings that only refer to another key.
    """

    id: str
    folder: str
    name: str
    status: str
    started: float
    seconds: float | None
    settings: dict[str, Any]
    metrics: dict[str, float]
    devices: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""
    kind: str = "run"
    parent: str | None = None
    reason: str = ""
    references: tuple[str, ...] = ()


def find_runs(root: Path | str) -> list[Run]:
    """All runs and searches below a folder or URL, the oldest first."""
    if is_url(root):
        from boltcutter.analysis.remote import mirror

        url, local = str(root).rstrip("/"), mirror(str(root))
        return [replace(run, folder=url + run.folder.removeprefix(str(local))) for run in find_runs(local)]
    was_enabled = gc.isenabled()
    gc.disable()  # it would go through millions of values again and again
    try:
        return as_runs(index.read_indexed(str(root)))
    finally:
        if was_enabled:
            gc.enable()


def as_runs(found: Sequence[tuple[Place, Facts]]) -> list[Run]:
    """The runs that places and facts describe, with the status that they have now, the oldest first."""
    searches = {place.folder: facts for place, facts in found if "objectives" in facts}
    runs = [_as_run(place, facts, searches.get(place.search or "")) for place, facts in found]
    trials: dict[str | None, list[Run]] = {}
    for run in runs:
        trials.setdefault(run.parent, []).append(run)
    for number, run in enumerate(runs):
        if run.kind == "search":
            search, own = searches[run.folder], trials.get(run.id, [])
            name, mode = next(iter(search["objectives"]), ("", ""))
            if search["trials"] != "trial":  # seeds or folds, none of which is chosen
                metrics = mean_metrics([each for each in own if each.metrics])
            else:
                groups = repetitions(own) if search.get("repeats") else [[each] for each in own]
                size = max(map(len, groups), default=0)
                means = [replace(group[0], metrics=mean_metrics(group)) for group in groups if len(group) == size]
                best = best_run(means, name, "max" if mode == "max" else "min")
                metrics = best.metrics if best else {}
            runs[number] = replace(run, metrics=metrics)
    return sorted(runs, key=lambda run: (run.started, run.folder))


def mean_metrics(runs: Sequence[Run]) -> dict[str, float]:
    """The mean of each metric that all have."""
    metrics = [run.metrics for run in runs]
    common = [name for name in metrics[0] if all(name in each for each in metrics)] if metrics else []
    return {name: fmean(each[name] for each in metrics) for name in common}


def repetitions(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of runs whose settings differ in seed and fold only."""
    groups: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in runs:
        own = {key: value for key, value in run.settings.items() if key not in (*run.references, *OF_EACH_RUN)}
        groups.setdefault(frozenset((key, repr(value)) for key, value in own.items()), []).append(run)
    return list(groups.values())


def _as_run(place: Place, facts: Facts, search: Facts | None) -> Run:
    above, _, name = place.folder.rpartition("/")
    parent = place.search.rpartition("/")[2] if place.search else None
    kind = "search" if "objectives" in facts else "job" if facts.get("is_job") else "run"
    if parent and kind == "run":
        kind = search["trials"] if search else "trial"
    return Run(
        id=f"{parent}/{name}" if parent else name,
        folder=place.folder,
        name=facts.get("name") or above.rpartition("/")[2],
        status=facts.get("status") or _status(place.folder, facts),
        started=facts["started"],
        seconds=facts.get("seconds"),
        settings=facts.get("settings") or {},
        metrics=facts.get("metrics") or {},
        devices=facts.get("devices") or "",
        tags=tuple(facts["tags"]),
        note=facts["note"],
        kind=kind,
        parent=parent,
        reason=facts.get("reason") or "",
        references=tuple(facts.get("references") or ()),
    )


def _status(folder: str, facts: Facts) -> str:
    reason = facts["reason"]
    if not reason:
        if has_ended(str(facts.get("job") or "")):
            return "failed"  # before it could record an attempt
        return "submitted" if facts.get("is_job") else "not started"
    if reason == "running":  # or killed before it could record that
        return "running" if is_held(Path(folder)) else "interrupted" if "objectives" in facts else "killed"
    if reason.startswith("completed"):
        return "completed"
    if reason in ("killed", "interrupted"):
        return str(reason)
    return "interrupted" if reason.startswith("preempted") else "failed"


def has_ended(job: str) -> bool:
    """Whether a launched process of this host, whose job id says when it has started, has ended."""
    found = LOCAL_JOB.fullmatch(job)
    if not found or found[2] != socket.gethostname():
        return False
    return start_time(int(found[1])) not in (found[3], None)


def is_held(folder: Path) -> bool:
    """Whether a process trains in the folder, as far as this host can tell."""
    if not (folder / lease.FILE).is_file():  # a folder or FIFO is no lease
        return False
    holder = lease.read_holder(folder)
    return holder is not None and holder.is_alive() is not False


def best_run(runs: Sequence[Run], metric: str, mode: Mode | None = None) -> Run | None:
    """The run with the best value of a metric, by default as the runs or its name say; None if no run has one."""
    having = [run for run in runs if run.metrics.get(metric, float("nan")) == run.metrics.get(metric)]
    mode = mode or metric_mode(having, metric) or "min"
    return (max if mode == "max" else min)(having, key=lambda run: run.metrics[metric], default=None)


def metric_mode(runs: Sequence[Run], metric: str) -> Mode | None:
    """Whether smaller or larger values of a metric are better: as a callback of a run says, or else its name."""
    for run in runs:
        for key in (key for key, value in run.settings.items() if value == metric and key.endswith("monitor")):
            mode = run.settings.get(key.removesuffix("monitor") + "mode")
            if mode in ("min", "max"):
                return mode  # type: ignore[no-any-return]
    return infer_mode(metric)
