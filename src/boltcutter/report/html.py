"""HTML report of a run: one self-contained file, rendered only from the files of the run folder."""

from __future__ import annotations

import base64
import csv
import io
import math
import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from markupsafe import Markup

from boltcutter import extend
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import one_line, printable
from boltcutter.report.template import format_number, load_template, redact_command
from boltcutter.run import trust
from boltcutter.run.metrics import Mode, infer_mode, parse_name
from boltcutter.run.store import run_store

MAX_POINTS = 1000  # per curve
MAX_SCATTER_POINTS = 2000
MAX_MATRIX_CLASSES = 150  # above which a confusion matrix is unreadable
MAX_TARGETS = 6  # of a regression with plots
MAX_TABLE = 1 << 27  # bytes of metrics.csv and predictions.csv
MAX_WORST = 1 << 30  # bytes of the inputs with the worst errors, decompressed


def write(folder: Path) -> Path:
    """Write ``report.html`` of a run; missing parts are listed in the report."""
    path = folder / "report.html"
    write_text(path, render(folder))
    return path


def write_or_warn(folder: Path) -> None:
    """Write the report; a failure is only a warning, so that it cannot hide the outcome of a training or evaluation."""
    try:
        write(folder)
    except Exception as error:  # also of a record of somebody else, with entries of other types
        text = f"warning: {run_store().show(folder)}/report.html could not be written ({one_line(error, 200)})"
        print(printable(text), file=sys.stderr)


def render(folder: Path, home: str = "") -> str:
    """Render the report as HTML.

    Args:
        folder: Folder of the run.
        home: URL of the page of all runs, if a server sends the report, which then updates itself.
    """
    test = folder / "evaluation" / "test"
    reader = ReportReader(folder)
    has_series = (test / "series.svg").is_file()
    series = reader.get("Samples", b"", trust.read_bytes, test / "series.svg") if has_series else b""
    record = reader.get("Record", {}, trust.read_json, folder / "record.json")
    config, sections = reader.get("Configuration", ({}, []), _read_config, folder / "config.yaml")
    groups = reader.get("Curves", {}, _read_groups, folder / "metrics.csv")
    scores = reader.get("Test metrics", record.get("test") or {}, trust.read_json, test / "metrics.json")
    # A module may return no outputs per sample. If no evaluation was run at all, every missing part is listed.
    has_samples = (test / "predictions.csv").is_file() or not (test / "metrics.json").is_file()
    scatters, classified = reader.get("Predictions", ([], has_samples), _read_predictions, test / "predictions.csv")
    classified = classified or (test / "classes.csv").is_file()
    classes = [] if not classified else reader.get("Classes", [], _read_classes, test / "classes.csv")
    confusion = {} if not classified else reader.get("Confusion matrix", {}, read_confusion, test / "confusion.csv")
    modes = _modes(config, groups)
    page = load_template(Path(__file__).with_name("report.html")).render(
        folder=folder,
        home=home,
        place=run_store().show(folder),
        record=record,
        command=reader.get("Command", "", redact_command, record.get("command") or ""),
        choices=config.get("choices") or {},
        sections=sections,
        finals=_final_metrics(groups, modes, scores, record.get("metrics") or {}),
        evaluations=reader.get("Evaluations", [], _read_evaluations, test.parent),
        classes=classes,
        confusion=confusion,
        worst=reader.get("Worst errors", [], _read_worst, test / "worst.npz", classes) if has_samples else [],
        series=base64.b64encode(series).decode(),
        added=[(slug(s.title), s.title, text) for s in extend.sections() if (text := reader.section(s))],
        attempts=reader.get("Attempts", [], _attempts, record.get("attempts") or []),
        missing=reader.missing,
        data={"charts": _charts(groups, modes), "confusion": confusion, "scatters": scatters},
    )
    return page.encode(errors="replace").decode()  # the command may contain file names that are not UTF-8


class ReportReader:
    """Reads the parts of a report, and records which could not be read and why."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.missing = folder, list[tuple[str, str]]()

    def get(self, title: str, empty: Any, read: Callable[..., Any], *args: Any) -> Any:
        """Return ``read(*args)``, or ``empty`` if it fails."""
        try:
            return read(*args)
        except FileNotFoundError as error:
            self.missing.append((title, f"{Path(error.filename).relative_to(self.folder)} is missing"))
        except Exception as error:  # a damaged file must not fail a finished training
            self.missing.append((title, f"cannot be read: {type(error).__name__}: {error}"[:200]))
        return empty

    def section(self, section: extend.Section) -> Markup:
        """Return the HTML of a section that a part adds; nothing if its file does not exist."""
        file = self.folder / section.file
        text = self.get(section.title, "", extend.load(section.render), file) if file.is_file() else ""
        return Markup(text)  # noqa: S704  # a part escapes the texts in it, as a template does


@dataclass(frozen=True)
class Curve:
    """A column of ``metrics.csv`` at the steps where it has values."""

    name: str
    stage: str  # train, val or ""
    epoch_mean: bool
    step: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    non_finite: int  # number of non-finite values

    def best(self, mode: Mode) -> int:
        """Index of the best value."""
        return int(self.value.argmin() if mode == "min" else self.value.argmax())


def _read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """All evaluations, if there are others than the test after training."""
    files = sorted(folder.glob("*/settings.json"))
    found = [trust.read_json(file) | {"name": file.parent.name} for file in files]
    for each in found:
        each["metrics"] = trust.read_json(folder / each["name"] / "metrics.json")
    return [] if [each["name"] for each in found] == ["test"] else found


def _read_config(path: Path) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
    """Parse the configuration, and split its text into sections; single-line entries form the first one."""
    text = trust.read_bytes(path).decode()
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise ValueError("aliases, which may multiply")
    blocks = [block.splitlines() for block in re.split(r"^(?=[^\s-])", text, flags=re.M) if block.strip()]
    general = [lines[0] for lines in blocks if len(lines) == 1]
    sections = [(lines[0].partition(":")[0], lines[1:]) for lines in blocks if len(lines) > 1]
    return dict(yaml.safe_load(text)), [("general", general), *sections]


def _read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, which must all have the same length."""
    header, *rows = csv.reader(io.StringIO(trust.read_bytes(path).decode(), newline=""))
    if any(len(row) != len(header) for row in rows):
        raise ValueError("rows of different lengths")
    return header, rows


def _read_groups(path: Path) -> dict[str, list[Curve]]:
    """Group curves by metric, over train and val, steps and epochs."""
    logged: dict[str, tuple[array[int], array[int], array[float]]] = {}  # steps, epochs and values of each column
    with trust.open_file(path, MAX_TABLE) as file:
        reader = csv.DictReader(line.decode() for line in file if line.endswith(b"\n"))  # the last may be incomplete
        if reader.fieldnames is None:
            raise ValueError("the file is empty")
        columns = [name for name in reader.fieldnames if name not in ("step", "epoch")]
        for row in reader:
            step, epoch = (int(_to_float(row[key] or "-1")) for key in ("step", "epoch"))
            for name in columns:
                if text := row[name]:
                    steps, epochs, values = logged.setdefault(name, (array("q"), array("q"), array("d")))
                    steps.append(step), epochs.append(epoch), values.append(_to_float(text))
    groups: dict[str, list[Curve]] = {}
    for column in filter(logged.get, columns):
        group, name, stage, epoch_mean = _parse_column(column)
        finite = np.isfinite(logged[column][2])  # other values are counted, not drawn
        if stage == "test" or not finite.any():
            continue
        found = (np.asarray(values)[finite] for values in logged[column])
        curve = Curve(name, stage, epoch_mean, *found, int((~finite).sum()))
        groups.setdefault(group, []).append(curve)
    return {group: groups[group] for group in sorted(groups, key=lambda group: _rank(group, groups[group]))}


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _rank(group: str, curves: Sequence[Curve]) -> int:
    """Order of charts: loss, other train and val metrics, learning rate, throughput, others."""
    measured = any(curve.stage for curve in curves)
    return [group == "loss", measured, group == "learning rate", "throughput" in group, True].index(True)


def _parse_column(column: str) -> tuple[str, str, str, bool]:
    """Group, name and stage of a column, and whether it holds means of epochs."""
    if column.startswith("lr-"):
        return "learning rate", column.removeprefix("lr-"), "", False
    group, stage, of_epoch = parse_name(column)
    return group, stage or ("epoch mean" if of_epoch else ""), stage, of_epoch


def _modes(config: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Mode]:
    """Mode of each metric: as in a callback that monitors it, else inferred from its name."""
    modes: dict[str, Mode] = {group: mode for group in groups if (mode := infer_mode(group))}
    for callback in (config.get("callback") or {}).values():
        if isinstance(callback, dict) and callback.get("monitor") and callback.get("mode") in ("min", "max"):
            modes[_parse_column(str(callback["monitor"]))[0]] = callback["mode"]
    return modes


def _charts(groups: Mapping[str, Sequence[Curve]], modes: Mapping[str, Mode]) -> list[dict[str, Any]]:
    """Data of the chart of each group; steps are faint behind means of epochs."""
    charts = []
    for group, curves in groups.items():
        means = {curve.stage for curve in curves if curve.epoch_mean}
        series = [_series(curve, faint=not curve.epoch_mean and curve.stage in means) for curve in curves]
        series.sort(key=lambda s: (s["faint"], s["name"]))
        chart = {"title": _title(group), "series": series, "maximize": modes.get(group) == "max", "best": None}
        val = next((curve for curve in curves if curve.stage == "val"), None)
        if val and group in modes:
            index = val.best(modes[group])
            chart["best"] = [int(val.step[index]), _short(val.value[index])]
        charts.append(chart)
    return charts


def _series(curve: Curve, *, faint: bool) -> dict[str, Any]:
    indices = downsample(curve.value)
    return {
        "name": ", ".join(filter(None, [curve.name, "step" if faint else ""])),
        "stage": curve.stage,
        "faint": faint,
        "non_finite": curve.non_finite,
        "x": curve.step[indices].tolist(),
        "epoch": curve.epoch[indices].tolist(),
        "y": [_short(value) for value in curve.value[indices]],
    }


def downsample(values: npt.NDArray[np.float64], limit: int = MAX_POINTS) -> npt.NDArray[np.int64]:
    """Indices of at most ``limit`` values: both ends, and minimum and maximum of equal chunks between."""
    indices: npt.NDArray[np.int64] = np.arange(len(values))
    if len(values) <= limit:
        return indices
    chunks = np.array_split(indices, limit // 2 - 1)
    extremes = [chunk[f(values[chunk])] for chunk in chunks for f in (np.argmin, np.argmax)]
    return np.unique(np.asarray([0, *extremes, len(values) - 1], np.int64))


def _final_metrics(
    groups: Mapping[str, Sequence[Curve]],
    modes: Mapping[str, Mode],
    scores: Mapping[str, float],
    recorded: Mapping[str, float],
) -> list[dict[str, Any]]:
    """One row per metric: last train and val value, best val value, test value; the loss comes last."""
    tests = {parse_name(name).group: value for name, value in scores.items()}
    rows: dict[str, dict[str, Any]] = {group: {"test": value} for group, value in tests.items()}
    for name, value in recorded.items():
        group, _, stage, _ = _parse_column(name)
        if stage:
            rows.setdefault(group, {})[stage] = value
    for group, curves in groups.items():
        for curve in sorted((curve for curve in curves if curve.stage), key=lambda curve: curve.epoch_mean):
            last = {curve.stage: float(curve.value[-1]), f"{curve.stage}_at": int(curve.step[-1])}
            rows.setdefault(group, {}).update(last)
            if curve.stage == "val" and group in modes:
                index = curve.best(modes[group])
                rows[group] |= {"best": float(curve.value[index]), "at": int(curve.step[index])}
    found = [{"test": None, "metric": _title(group), **row} for group, row in rows.items()]
    return sorted(found, key=lambda row: row["metric"] == "loss")


def _read_classes(path: Path) -> list[dict[str, Any]]:
    header, rows = _read_csv(path)
    return [
        {name: text if name == "class" else int(text) if text.isdecimal() else float(text) for name, text in cells}
        for cells in (zip(header, row, strict=True) for row in rows)
    ]


def read_confusion(path: Path) -> dict[str, Any]:
    """Class names, non-zero cells as [target, prediction, count], and the most frequent misclassifications."""
    _, rows = _read_csv(path)
    names = [row[0] for row in rows]
    counts = np.array([row[1:] for row in rows], np.int64).reshape(len(names), len(names))
    cells = [[int(row), int(column), int(counts[row, column])] for row, column in np.argwhere(counts)]
    sums = counts.sum(axis=1)
    wrong = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])
    pairs = [(names[t], names[p], n, n / int(sums[t])) for t, p, n in wrong[:8]]
    return {
        "names": names,
        "cells": cells if len(names) <= MAX_MATRIX_CLASSES else [],
        "sums": sums.tolist(),
        "pairs": pairs,
    }


def _read_predictions(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Targets, predictions and indices for each target of a regression, and whether it is a classification instead.

    Large tables are subsampled evenly over the loss.
    """
    with trust.open_file(path, MAX_TABLE) as file:
        header = next(csv.reader([file.readline().decode()]), [])
        if "confidence" in header:
            return [], True
        suffixes = [name.removeprefix("target") for name in header if re.fullmatch(r"target(_\d+)?", name)]
        used = ["index", *filter({"loss"}.__contains__, header)]
        used += [f"{what}{suffix}" for suffix in suffixes[:MAX_TARGETS] for what in ("target", "prediction")]
        numbers = np.loadtxt(file, delimiter=",", usecols=[header.index(name) for name in used], ndmin=2)
    table = dict(zip(used, numbers.T, strict=True))
    by_loss = np.argsort(table["loss"], kind="stable") if "loss" in table else np.arange(len(numbers))
    chosen = by_loss[np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), MAX_SCATTER_POINTS)).astype(int))]
    rows = {name: column[chosen] for name, column in table.items()}
    return [_scatter(rows, suffix, len(numbers)) for suffix in suffixes[:MAX_TARGETS]], False


def _scatter(table: Mapping[str, npt.NDArray[np.float64]], suffix: str, samples: int) -> dict[str, Any]:
    truth, prediction = table[f"target{suffix}"], table[f"prediction{suffix}"]
    finite = np.isfinite(truth) & np.isfinite(prediction)
    return {
        "target": suffix.removeprefix("_"),
        "truth": [_short(value) for value in truth[finite]],
        "prediction": [_short(value) for value in prediction[finite]],
        "index": table["index"][finite].astype(np.int64).tolist(),
        "of": samples,
    }


def _read_worst(path: Path, classes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = [row["class"] for row in classes]
    with trust.open_file(path, MAX_WORST) as content, np.load(content, allow_pickle=False) as file:
        if sum(info.file_size for info in file.zip.infolist()) > MAX_WORST:
            raise ValueError(f"larger than {MAX_WORST >> 20} MiB")
        arrays = {name: file[name] for name in file}
    inputs = arrays["inputs"]
    is_image = inputs.dtype == np.uint8 and inputs.ndim == 4 and inputs.shape[1] in (1, 3)
    encode_image = extend.find("encode_image") if is_image else None
    return [
        {
            "image": encode_image(values) if encode_image else None,
            "text": str(arrays["text"][index]) if "text" in arrays else None,
            "values": [] if encode_image else [float(value) for value in values.ravel()[:8]],
            "shape": " × ".join(map(str, values.shape)),
            "truth": _format_answer(arrays, "target", index, names),
            "prediction": _format_answer(arrays, "prediction", index, names),
            **{key: arrays[key][index].item() for key in ("index", "loss", "confidence") if key in arrays},
        }
        for index, values in enumerate(inputs)
    ]


def _format_answer(arrays: Mapping[str, Any], what: str, index: int, names: Sequence[str]) -> str:
    """Class name, or numbers."""
    values = [array[index].item() for name, array in arrays.items() if re.fullmatch(rf"{what}(_\d+)?", name)]
    return ", ".join(
        names[v] if isinstance(v, int) and 0 <= v < len(names) else str(v) if isinstance(v, int) else format_number(v)
        for v in values
    )


def _attempts(recorded: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each attempt with its duration in seconds and the tone of its status."""
    found = []
    for attempt in recorded:
        start, end = (datetime.fromisoformat(attempt[key]) if attempt.get(key) else None for key in ("start", "end"))
        seconds = (end - start).total_seconds() if start and end else None
        found.append({"seconds": seconds, **attempt, "start": start, "tone": _tone(str(attempt.get("reason")))})
    return found


def _tone(reason: str) -> str:
    tones = {"completed": "good", "running": "busy", "interrupted": "warn"}
    return tones.get(reason, "bad" if re.match(r"\w+(Error|Exception|Exit)?:", reason) else "warn")


def slug(title: str) -> str:
    """A title as the id of an element."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _title(group: str) -> str:
    return group.replace("_", " ").replace("/", ", ").replace(" gib", " in GiB")


def _short(value: float) -> float:
    return float(f"{value:.5g}")
