"""report.html: the whole run in one file that opens offline, made from the files of the run's folder alone."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml
from PIL import Image

from boltcutter.atomic import write_text
from boltcutter.metrics import Mode, infer_mode, parse_name
from boltcutter.redaction import hide_passwords, looks_secret

POINTS = 1000  # of a curve
DOTS = 2000  # of a scatter
CELLS = 150  # classes of a confusion matrix that can still be read
TARGETS = 6  # numbers of a regression that are drawn
PIXELS = 128  # side of a picture; larger ones are made smaller


def write(folder: Path) -> Path:
    """Write ``report.html`` of the run in ``folder``; what is not in the folder is left out with a word."""
    path = folder / "report.html"
    write_text(path, render(folder))
    return path


def render(folder: Path) -> str:
    """The text of the page."""
    test = folder / "evaluation" / "test"
    parts = Parts(folder)
    record = parts.get("Record", {}, _read_object, folder / "record.json")
    config, sections = parts.get("Configuration", ({}, []), _read_config, folder / "config.yaml")
    groups = parts.get("Curves", {}, _read_groups, folder / "metrics.csv")
    scores = parts.get("Test metrics", record.get("test") or {}, _read_object, test / "metrics.json")
    # A module may say nothing of each sample; where nothing was measured at all, all that is missing is listed.
    sampled = (test / "predictions.csv").is_file() or not (test / "metrics.json").is_file()
    nothing: tuple[list[Any], bool] = ([], sampled)
    scatters, classified = parts.get("Predictions", nothing, _read_predictions, test / "predictions.csv")
    classified = classified or (test / "classes.csv").is_file()
    classes = [] if not classified else parts.get("Classes", [], _read_classes, test / "classes.csv")
    confusion = {} if not classified else parts.get("Confusion matrix", {}, _read_confusion, test / "confusion.csv")
    goals = _goals(config, groups)
    page = _template().render(
        folder=folder,
        record=record,
        command=parts.get("Command", "", _veil, record.get("command") or ""),
        choices=config.get("choices") or {},
        sections=sections,
        finals=_finals(groups, goals, scores, record.get("metrics") or {}),
        classes=classes,
        confusion=confusion,
        worst=parts.get("Worst errors", [], _read_worst, test / "worst.npz", [row["class"] for row in classes])
        if sampled
        else [],
        attempts=parts.get("Attempts", [], _attempts, record.get("attempts") or []),
        missing=parts.missing,
        data={"charts": _charts(groups, goals), "confusion": confusion, "scatters": scatters},
    )
    return page.encode(errors="replace").decode()  # a file name that is not UTF-8 may stand in the command


class Parts:
    """Reads the parts of a report, and remembers which could not be read and why."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: list[tuple[str, str]] = []

    def get(self, title: str, empty: Any, read: Callable[..., Any], *given: Any) -> Any:
        """What ``read`` makes of what is given, or ``empty``."""
        try:
            return read(*given)
        except FileNotFoundError as error:
            self.missing.append((title, f"{Path(error.filename).relative_to(self.folder)} is not there"))
        except Exception as error:  # days of training must not end in failure because of a damaged file
            self.missing.append((title, f"cannot be read: {type(error).__name__}: {error}"[:200]))
        return empty


@dataclass(frozen=True)
class Curve:
    """One column of ``metrics.csv``, where it has values."""

    name: str
    stage: str  # train, val, or "" for what belongs to neither
    epoch_mean: bool
    step: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    lost: int  # values that were not finite

    def best(self, goal: Mode) -> int:
        """Place of the best value."""
        return int(self.value.argmin() if goal == "min" else self.value.argmax())


def _read_object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no object")
    return found


def _read_config(path: Path) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
    """The values; and the text as sections of lines, the first one for all that is a single line."""
    text = path.read_text()
    blocks = [block.splitlines() for block in re.split(r"^(?=[^\s-])", text, flags=re.M) if block.strip()]
    general = [lines[0] for lines in blocks if len(lines) == 1]
    sections = [(lines[0].partition(":")[0], lines[1:]) for lines in blocks if len(lines) > 1]
    return dict(yaml.safe_load(text)), [("general", general), *sections]


def _read_groups(path: Path) -> dict[str, list[Curve]]:
    """Curves by metric: those of train and val, of steps and of epochs, stand together."""
    table = pd.read_csv(path, keep_default_na=False, na_values=[""], low_memory=False)
    groups: dict[str, list[Curve]] = {}
    for column in table.columns.drop(["step", "epoch"], errors="ignore"):
        group, name, stage, epoch_mean = _place(column)
        logged = table.loc[table[column].notna(), ["step", "epoch", column]]
        # A training that went astray has "nan" and "inf" here: counted, not drawn.
        values = pd.to_numeric(logged[column], errors="coerce").to_numpy(float)
        finite = np.isfinite(values)
        if stage == "test" or not finite.any():
            continue
        step, epoch = (_whole(logged[key])[finite] for key in ("step", "epoch"))
        curve = Curve(name, stage, epoch_mean, step, epoch, values[finite], int((~finite).sum()))
        groups.setdefault(group, []).append(curve)
    return {group: groups[group] for group in sorted(groups, key=lambda group: _rank(group, groups[group]))}


def _rank(group: str, curves: Sequence[Curve]) -> int:
    """The loss is drawn first, then what train or val measured, the learning rate, speed, and all else."""
    measured = any(curve.stage for curve in curves)
    return [group == "loss", measured, group == "learning rate", "throughput" in group, True].index(True)


def _whole(column: Any) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = pd.to_numeric(column, errors="coerce").fillna(-1).to_numpy(np.int64)
    return numbers


def _place(column: str) -> tuple[str, str, str, bool]:
    """Group, name, stage of a column, and whether it holds the means of epochs."""
    if column.startswith("lr-"):
        return "learning rate", column.removeprefix("lr-"), "", False
    group, stage, of_epoch = parse_name(column)
    return group, stage or ("epoch mean" if of_epoch else ""), stage, of_epoch


def _goals(config: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Mode]:
    """Whether a metric is to fall or to rise: as callbacks say that monitor it, otherwise as its name tells."""
    goals: dict[str, Mode] = {group: better for group in groups if (better := infer_mode(group))}
    for callback in (config.get("callback") or {}).values():
        if isinstance(callback, dict) and callback.get("monitor") and callback.get("mode") in ("min", "max"):
            goals[_place(str(callback["monitor"]))[0]] = callback["mode"]
    return goals


def _charts(groups: Mapping[str, Sequence[Curve]], goals: Mapping[str, Mode]) -> list[dict[str, Any]]:
    """What the page draws of each group; the steps stand back behind the means of epochs."""
    charts = []
    for group, curves in groups.items():
        means = {curve.stage for curve in curves if curve.epoch_mean}
        series = [_series(curve, faint=not curve.epoch_mean and curve.stage in means) for curve in curves]
        series.sort(key=lambda s: (s["faint"], s["name"]))
        chart = {"title": _title(group), "series": series, "rises": goals.get(group) == "max", "best": None}
        val = next((curve for curve in curves if curve.stage == "val"), None)
        if val and group in goals:
            place = val.best(goals[group])
            chart["best"] = [int(val.step[place]), _short(val.value[place])]
        charts.append(chart)
    return charts


def _series(curve: Curve, *, faint: bool) -> dict[str, Any]:
    kept = thin(curve.value)
    return {
        "name": ", ".join(filter(None, [curve.name, "step" if faint else ""])),
        "stage": curve.stage,
        "faint": faint,
        "lost": curve.lost,
        "x": curve.step[kept].tolist(),
        "epoch": curve.epoch[kept].tolist(),
        "y": [_short(value) for value in curve.value[kept]],
    }


def thin(values: npt.NDArray[np.float64], limit: int = POINTS) -> npt.NDArray[np.int64]:
    """Places of at most ``limit`` values: the two ends, and both extremes of each of the equal stretches between."""
    places: npt.NDArray[np.int64] = np.arange(len(values))
    if len(values) <= limit:
        return places
    stretches = np.array_split(places, limit // 2 - 1)
    extremes = [stretch[f(values[stretch])] for stretch in stretches for f in (np.argmin, np.argmax)]
    return np.unique(np.asarray([0, *extremes, len(values) - 1], np.int64))


def _finals(
    groups: Mapping[str, Sequence[Curve]],
    goals: Mapping[str, Mode],
    scores: Mapping[str, float],
    recorded: Mapping[str, float],
) -> list[dict[str, Any]]:
    """A row for each metric: where train and val ended, the best of val, and the test; the loss comes last."""
    tests = {parse_name(name).group: value for name, value in scores.items()}
    rows: dict[str, dict[str, Any]] = {group: {"test": value} for group, value in tests.items()}
    for name, value in recorded.items():
        group, _, stage, _ = _place(name)
        if stage:
            rows.setdefault(group, {})[stage] = value
    for group, curves in groups.items():
        for curve in sorted((curve for curve in curves if curve.stage), key=lambda curve: curve.epoch_mean):
            last = {curve.stage: float(curve.value[-1]), f"{curve.stage}_at": int(curve.step[-1])}
            rows.setdefault(group, {}).update(last)
            if curve.stage == "val" and group in goals:
                place = curve.best(goals[group])
                rows[group] |= {"best": float(curve.value[place]), "at": int(curve.step[place])}
    found = [{"test": None, "metric": _title(group), **row} for group, row in rows.items()]
    return sorted(found, key=lambda row: row["metric"] == "loss")


def _read_classes(path: Path) -> list[dict[str, Any]]:
    table = pd.read_csv(path, dtype={"class": str}, keep_default_na=False)  # a class may be named NA, or 01
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def _read_confusion(path: Path) -> dict[str, Any]:
    """Names, and what is not zero as [truth, prediction, count]; the pairs that are mistaken most often."""
    table = pd.read_csv(path, dtype={"truth": str}, keep_default_na=False)
    names = [str(name) for name in table.iloc[:, 0]]  # the header does not do: pandas renames what is there twice
    counts = table.iloc[:, 1:].to_numpy(np.int64)
    cells = [[int(row), int(column), int(counts[row, column])] for row, column in np.argwhere(counts)]
    sums = counts.sum(axis=1)
    wrong = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])
    pairs = [(names[t], names[p], n, n / int(sums[t])) for t, p, n in wrong[:8]]
    return {"names": names, "cells": cells if len(names) <= CELLS else [], "sums": sums.tolist(), "pairs": pairs}


def _read_predictions(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Truth, prediction and index for each target of a regression; and whether there are classes instead.

    Of many samples, some of each size of loss are taken.
    """
    table = pd.read_csv(path)
    if "confidence" in table:
        return [], True
    by_loss = table.sort_values("loss") if "loss" in table else table
    chosen = np.unique(np.linspace(0, len(table) - 1, min(len(table), DOTS)).astype(int))
    endings = [str(c).removeprefix("target") for c in table if re.fullmatch(r"target(_\d+)?", str(c))]
    return [_scatter(by_loss.iloc[chosen], ending, len(table)) for ending in endings[:TARGETS]], False


def _scatter(table: pd.DataFrame, ending: str, samples: int) -> dict[str, Any]:
    columns = (f"target{ending}", f"prediction{ending}")
    finite = table[np.isfinite(table[list(columns)]).all(axis=1)]
    truth, prediction = ([_short(value) for value in finite[column]] for column in columns)
    index, target = finite["index"].tolist(), ending.removeprefix("_")
    return {"target": target, "truth": truth, "prediction": prediction, "index": index, "of": samples}


def _read_worst(path: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file}
    inputs = arrays["inputs"]
    pictures = inputs.dtype == np.uint8 and inputs.ndim == 4 and inputs.shape[1] in (1, 3)
    return [
        {
            "picture": _picture(values) if pictures else None,
            "text": str(arrays["text"][place]) if "text" in arrays else None,
            "values": [] if pictures else [float(value) for value in values.ravel()[:8]],
            "shape": " × ".join(map(str, values.shape)),
            "truth": _answer(arrays, "target", place, names),
            "prediction": _answer(arrays, "prediction", place, names),
            **{key: arrays[key][place].item() for key in ("index", "loss", "confidence") if key in arrays},
        }
        for place, values in enumerate(inputs)
    ]


def _answer(arrays: Mapping[str, Any], what: str, place: int, names: Sequence[str]) -> str:
    """A class by its name, or numbers."""
    values = [array[place].item() for name, array in arrays.items() if re.fullmatch(rf"{what}(_\d+)?", name)]
    return ", ".join(
        names[v] if isinstance(v, int) and 0 <= v < len(names) else str(v) if isinstance(v, int) else number(v)
        for v in values
    )


def _picture(values: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """A picture (C, H, W) as a data address; small ones to the pixel."""
    image = Image.fromarray(np.ascontiguousarray(values[0] if len(values) == 1 else np.moveaxis(values, 0, -1)))
    small = max(image.size) <= PIXELS
    if not small:
        image.thumbnail((PIXELS, PIXELS))
    stream = io.BytesIO()
    image.save(stream, "png" if small else "jpeg")
    text = base64.b64encode(stream.getvalue()).decode()
    return {"address": f"data:image/{'png' if small else 'jpeg'};base64,{text}", "small": small}


def _attempts(recorded: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each attempt with its duration in seconds, and how its end is to be taken."""
    found = []
    for attempt in recorded:
        start, end = (datetime.fromisoformat(attempt[key]) if attempt.get(key) else None for key in ("start", "end"))
        seconds = (end - start).total_seconds() if start and end else None  # of a record without them
        found.append({"seconds": seconds, **attempt, "start": start, "tone": _tone(str(attempt.get("reason")))})
    return found


def _tone(reason: str) -> str:
    tones = {"completed": "good", "running": "busy", "interrupted": "warn"}
    return tones.get(reason, "bad" if re.match(r"\w+(Error|Exception|Exit)?:", reason) else "warn")


def _veil(command: str) -> str:
    """The command without the values of secrets."""
    words = [word.partition("=") for word in shlex.split(command)]
    hidden = [
        "***" if looks_secret(key.rpartition(".")[2]) and value else hide_passwords(value) for key, _, value in words
    ]
    return shlex.join(f"{key}{sign}{value}" for (key, sign, _), value in zip(words, hidden, strict=True))


def number(value: Any) -> str:
    """A number as a person reads it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return "–" if value is None or isinstance(value, jinja2.Undefined) else str(value)
    if isinstance(value, int | np.integer) or not math.isfinite(value):
        return f"{value:,}"
    size = abs(float(value))
    return f"{value:,.0f}" if 1e4 <= size < 1e9 else f"{value:#.4g}" if size >= 1e-3 or not size else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Hours and minutes, or what is shorter."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _title(group: str) -> str:
    return group.replace("_", " ").replace("/", ", ")


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,  # an earlier version may have recorded less
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "duration": duration}
    return environment.get_template("report.html")
