"""Names of runs: ``latest``, ``best:val/loss``, and ids or the beginning of one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from boltcutter.analysis.record import Run, best_run, find_runs, metric_mode
from boltcutter.analysis.table import shown_metrics
from boltcutter.checkpoint.storage import is_url
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError, hint, printable
from boltcutter.environment.process import distributed_rank
from boltcutter.extend import RUNS
from boltcutter.formatting import format_number
from boltcutter.project import Project
from boltcutter.run.metrics import parse_name

LATEST, BEST = "latest", "best:"
VARIABLE = "BOLTCUTTER_REFERENCES"  # what names referred to, for processes that this one starts
MAX_SHOWN = 4


def runs_folder(project: Project, overrides: Iterable[str] = ()) -> str:
    """Folder or URL of all runs: that of ``runs=…`` among the overrides, or of the project's configuration."""
    given = [override.removeprefix("runs=") for override in overrides if override.startswith("runs=")]
    if given and not is_url(given[-1]) and not Path(given[-1]).is_dir():
        raise ConfigError(f"runs={given[-1]}: no such folder; set it to a folder of runs")
    return given[-1] if given else str(compose(project, []).runs)


def resolve(project: Project, overrides: Sequence[str]) -> list[str]:
    """Replace names of runs in overrides, such as ``run=latest``, by their folders; other values are not changed."""
    known: dict[str, str] = json.loads(os.environ.get(VARIABLE) or "{}")
    runs: list[Run] | None = None
    found = list(overrides)
    for number, override in enumerate(overrides):
        key, _, value = override.partition("=")
        is_dynamic = value == LATEST or value.startswith(BEST)
        if key not in RUNS or not value or (not is_dynamic and (is_url(value) or ":" in value or Path(value).exists())):
            continue
        if override not in known:
            runs = find_runs(runs_folder(project, overrides)) if runs is None else runs
            run = find(runs, value, key) if is_dynamic or _matches(runs, value) else None
            if run is None:
                continue  # which the command reports
            if is_dynamic and distributed_rank() is not None:
                raise ConfigError(f"{override}: ranks could find different runs; use {key}={run.folder}")
            known[override] = run.folder
            if is_dynamic:
                os.environ[VARIABLE] = json.dumps(known)
        found[number] = f"{key}={known[override]}"
    return found


def find(runs: Sequence[Run], text: str, key: str = "run") -> Run:
    """The run that ``latest``, ``best:<metric>``, an id, or the beginning of one or of its last part refers to.

    A note says which run the first two are. Messages begin with ``key``, that of the override.
    """
    having = [run for run in runs if run.kind != "search" and run.status not in ("unreadable", "submitted")]
    if text == LATEST:
        alone = [run for run in having if run.parent is None]
        if not alone:
            raise ConfigError(f"{key}={text}: there are no runs; train one first")
        run = max(alone, key=lambda run: run.started)
        _note(f"{key}={text} is {run.folder}, {run.name}, {run.status}")
        return run
    if text.startswith(BEST):
        metric = text.removeprefix(BEST)
        if not metric:
            raise ConfigError(f"{key}={text}: names no metric; write {key}={BEST}val/loss")
        best = best_run(having, metric)
        if best is None:
            near = hint(text, {f"{BEST}{name}" for run in runs for name in run.metrics})
            raise ConfigError(f"{key}={text}: no run has {metric}{near or '; train one first'}", kind="unknown_run")
        mode = metric_mode([run for run in having if metric in run.metrics], metric) or "min"
        which = "largest" if mode == "max" else "smallest"
        _note(f"{key}={text} is {best.folder}, with the {which} {metric}, {format_number(best.metrics[metric])}")
        return best
    found = _matches(runs, text)
    if len(found) == 1:
        return found[0]
    if not found:
        near = hint(text, (LATEST, *(run.id for run in runs))) or "; see boltcutter runs"
        raise ConfigError(f"{key}={text}: no run with this id{near}", kind="unknown_run")
    listed = ", ".join(run.id for run in found[:MAX_SHOWN]) + (", …" if len(found) > MAX_SHOWN else "")
    raise ConfigError(
        f"{key}={text}: {len(found)} runs begin like this ({listed}); give more of the id", kind="unknown_run"
    )


def _note(text: str) -> None:
    print(f"note: {printable(text)}", file=sys.stderr)


def _matches(runs: Sequence[Run], text: str) -> list[Run]:
    """Runs of an id, or else those whose id, or the last part of it, begins with a text."""
    path = str(Path(text).absolute())
    exact = [run for run in runs if run.id == text or run.folder in (text, path)]
    head, slash, trial = text.partition("/")
    return exact or [
        run
        for run in runs
        if (run.id.startswith(text) or (owner := run.id.partition("/"))[0].rpartition("-")[2].startswith(head))
        and (run.id.startswith(text) or (owner[2].startswith(trial) if slash else not owner[2]))
        and (slash or run.parent is None)
    ]


def candidates(project: Project) -> dict[str, str]:
    """Values for completion: names and ids of runs, with descriptions."""
    runs = find_runs(runs_folder(project))
    found = {printable(run.id): printable(f"{run.name}, {run.status}") for run in reversed(runs) if run.parent is None}
    compared = (name for run in runs for name in run.metrics if parse_name(name).stage in ("val", "test"))
    best = dict.fromkeys((f"{BEST}{printable(name)}" for name in (*shown_metrics(runs), *compared)), "")
    return {LATEST: "the newest run", **best, **found} if runs else {}
