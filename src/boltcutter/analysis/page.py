"""One page about many runs, which opens offline: table, curves, settings that differ, parallel coordinates."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from boltcutter import run_files
from boltcutter.analysis import table
from boltcutter.analysis.query import value_of
from boltcutter.analysis.record import Run, metric_mode
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.values import format_value
from boltcutter.report.outcome_report import read_confusion
from boltcutter.report.page import downsample
from boltcutter.report.template import load_template
from boltcutter.run.metrics import MetricsReader, parse_name

MAX_POINTS = 200_000  # of all curves together
MIN_POINTS = 20  # of a curve
MAX_CURVES = 6  # metrics with curves
STAGES = ("val", "train", "test", "")  # in the order of their curves
MAX_MATRICES = 200  # confusion matrices, those of the newest runs

Array = npt.NDArray[Any]
Curves = dict[str, tuple[Array, ...]]  # steps, epochs and values of each metric


def write_table(runs: Sequence[Run], path: Path, title: str) -> Path:
    """Write the page; links to the reports of runs are relative to it."""
    home = path.absolute().parent
    write_text(path, render_table(title, collect(runs, [_link(run, home) for run in runs])))
    return path


def render_table(title: str, data: dict[str, Any], home: str = "") -> str:
    """Render the page as HTML; with a URL of its own, it asks the server for new data."""
    page = load_template(Path(__file__).with_name("page.html")).render(title=title, data=data, home=home)
    return page.encode(errors="replace").decode()


def collect(runs: Sequence[Run], links: Sequence[str | None], curves: Sequence[Curves] | None = None) -> dict[str, Any]:
    """Everything that the page shows of runs, the oldest first, and of links to their reports.

    Runs are columns, as they may be thousands. Curves are read unless they are given.
    """
    shorts, settings = table.short_ids(runs), table.differing_settings(runs)
    metrics = table.shown_metrics(runs)
    after = [key for key in table.FIELDS_AFTER if any(value_of(run, key) for run in runs)]
    order = ["name", "status", "age", *settings, *metrics, *after]
    kinds = {**dict.fromkeys(settings, "setting"), **dict.fromkeys(metrics, "metric")}
    curves = (
        [read_curves(MetricsReader(Path(run.folder, run_files.METRICS))) for run in runs] if curves is None else curves
    )
    names = sorted(
        {name for each in curves for name in each},
        key=lambda name: (name not in metrics, STAGES.index(parse_name(name).stage), name),
    )
    names = names[:MAX_CURVES]
    limit = max(MIN_POINTS, MAX_POINTS // max(1, len(runs) * len(names)))
    return {
        "ids": [shorts[run.id] for run in runs],
        "links": [*links],
        "seconds": [time.time() - run.started if run.status == "running" else run.seconds for run in runs],
        "columns": [
            {
                "name": key,
                "kind": kinds.get(key, "field"),
                "maximize": key in metrics and metric_mode(runs, key) == "max",
                "values": [_plain(value_of(run, key)) for run in runs],
                "texts": [table.format_cell(run, key) for run in runs],
            }
            for key in order
        ],
        "curves": [{"name": name, "runs": [_shorten(each.get(name), limit) for each in curves]} for name in names],
        "confusion": [None for _ in runs[:-MAX_MATRICES]] + [_read_confusion(run) for run in runs[-MAX_MATRICES:]],
    }


def _plain(value: Any) -> float | str | None:
    """A value by which the page sorts and draws."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return None if value is None else format_value(value)


def _link(run: Run, home: Path) -> str | None:
    report = os.path.join(run.folder, run_files.REPORT)
    # Not in a folder that cannot be read; a name may be of any bytes.
    return quote(os.fsencode(os.path.relpath(report, home))) if os.path.isfile(report) else None


def _read_confusion(run: Run) -> dict[str, Any] | None:
    """The confusion matrix of a run's test, if it has one."""
    with suppress(Exception):  # a file of somebody else may hold anything, and must not hide the other runs
        found = read_confusion(Path(run.folder, "evaluation", "test", "confusion.csv"))
        return {name: found[name] for name in ("names", "cells", "sums")} if found and found["cells"] else None
    return None


def read_curves(reader: MetricsReader) -> Curves:
    """The curves in ``metrics.csv`` as far as it is written, without values that are not finite."""
    curves: Curves = {}
    with suppress(OSError, ValueError, OverflowError, csv.Error):
        for name, columns in reader.read().items():
            finite = np.isfinite(columns[2])
            if name and finite.any() and not name.startswith((*run_files.NO_METRICS, "lr-")):
                curves[name] = tuple(np.asarray(column)[finite] for column in columns)
    return curves


def _shorten(curve: tuple[Array, ...] | None, limit: int) -> list[list[float]]:
    """Steps, epochs and values of a curve with at most ``limit`` points."""
    if curve is None:
        return []
    steps, epochs, values = (column[downsample(curve[2], limit)].tolist() for column in curve)
    return [steps, epochs, [float(f"{value:.5g}") for value in values]]
