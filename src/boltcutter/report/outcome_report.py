"""What the report of a run shows of each sample of its test: classes, confusion, predictions and the worst errors."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter import files
from boltcutter.report.pixels import encode_image, to_pixels
from boltcutter.report.reader import ReportReader
from boltcutter.report.template import format_number, shorten
from boltcutter.run import trust
from boltcutter.run.metrics import MAX_TABLE

MAX_SCATTER_POINTS = 2000
MAX_MATRIX_CLASSES = 150  # above which a confusion matrix is unreadable
MAX_TARGETS = 6  # of a regression with plots
MAX_CSV, MAX_ROWS = 1 << 24, 1 << 16  # bytes and rows of classes.csv and confusion.csv: a cell takes 50 bytes of memory
MIN_SIDE = 6  # pixels of a picture; smaller arrays are shown as numbers
MAX_WORST, MAX_INPUTS = 1 << 29, 1000  # bytes and number of the inputs with the worst errors, decompressed


def read_outcomes(reader: ReportReader, folder: Path) -> dict[str, Any]:
    """What ``PredictionWriter`` has written, as variables of the template of the report."""
    # A module may return no outputs per sample. If no evaluation was run at all, every missing part is listed.
    has_samples = (folder / "predictions.csv").is_file() or not (folder / "metrics.json").is_file()
    path = folder / "predictions.csv"
    scatters, classified = reader.get("Predictions", ([], has_samples), _read_predictions, path)
    found: dict[str, Any] = {"scatters": scatters, "classes": [], "confusion": {}, "worst": []}
    if classified or (folder / "classes.csv").is_file():
        found["classes"] = reader.get("Classes", [], _read_classes, folder / "classes.csv")
        found["confusion"] = reader.get("Confusion matrix", {}, read_confusion, folder / "confusion.csv")
    if has_samples:
        found["worst"] = reader.get("Worst errors", [], _read_worst, folder / "worst.npz", found["classes"])
    has_series = (folder / "series.svg").is_file()
    series = reader.get("Samples", b"", trust.read_bytes, folder / "series.svg") if has_series else b""
    return found | {"series": base64.b64encode(series).decode()}


def _read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, which must all have the same length."""
    with files.open_file(path, MAX_CSV) as file:
        text = file.read().decode()
    if text.count("\n") + text.count("\r") > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} rows")
    header, *rows = csv.reader(io.StringIO(text, newline=""))
    if any(len(row) != len(header) for row in rows):
        raise ValueError("rows of different lengths")
    return header, rows


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
    if counts.size and not 0 <= counts.min() <= counts.max() < 1 << 40:  # so that no sum overflows
        raise ValueError("a count below 0, or too large")
    sums = counts.sum(axis=1)
    is_shown = len(names) <= MAX_MATRIX_CLASSES
    cells = np.argwhere(counts).tolist() if is_shown else []
    wrong = counts - np.diag(counts.diagonal())
    top = np.argsort(-wrong, axis=None, kind="stable")[:8]
    frequent = [(int(t), int(p)) for t, p in zip(*np.unravel_index(top, counts.shape), strict=True) if wrong[t, p]]
    return {
        "names": names,
        "cells": [[row, column, int(counts[row, column])] for row, column in cells],
        "sums": sums.tolist(),
        "pairs": [(names[t], names[p], int(wrong[t, p]), float(wrong[t, p] / sums[t])) for t, p in frequent],
    }


def _read_predictions(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Targets, predictions and indices for each target of a regression, and whether it is a classification instead.

    Large tables are subsampled evenly over the loss.
    """
    with files.open_file(path, MAX_TABLE) as file:
        header = next(csv.reader([file.readline().decode()]), [])
        if "confidence" in header:
            return [], True
        suffixes = [name.removeprefix("target") for name in header if re.fullmatch(r"target(_[0-9]+)?", name)]
        if header and not suffixes:
            return [], False
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
        "truth": [shorten(value) for value in truth[finite]],
        "prediction": [shorten(value) for value in prediction[finite]],
        "index": table["index"][finite].astype(np.int64).tolist(),
        "of": samples,
    }


def _read_worst(path: Path, classes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = [row["class"] for row in classes]
    with files.open_file(path, MAX_WORST) as content, np.load(content, allow_pickle=False) as file:
        if sum(info.file_size for info in file.zip.infolist()) > MAX_WORST:
            raise ValueError(f"larger than {MAX_WORST >> 20} MiB")
        arrays = {name: file[name] for name in file}
    inputs = arrays["inputs"]
    if len(inputs) > MAX_INPUTS:
        raise ValueError(f"more than {MAX_INPUTS} inputs")
    shapes = arrays.get("shapes", np.broadcast_to(inputs.shape[1:], (len(inputs), inputs.ndim - 1)))
    if shapes.shape != (len(inputs), inputs.ndim - 1) or not (shapes.min(initial=0) >= 0):
        raise ValueError("shapes that the inputs cannot have")
    is_image = inputs.ndim == 4 and inputs.shape[1] in (1, 3) and min(inputs.shape[2:]) >= MIN_SIDE
    return [
        {
            "image": encode_image(to_pixels(values)[0]) if is_image else None,
            "text": str(arrays["text"][index]) if "text" in arrays else None,
            "values": [] if is_image else [float(value) for value in values.ravel()[:8]],
            "shape": " × ".join(map(str, values.shape)),
            "truth": _format_answer(arrays, "target", index, names),
            "prediction": _format_answer(arrays, "prediction", index, names),
            **{key: arrays[key][index].item() for key in ("index", "loss", "confidence") if key in arrays},
        }
        for index, values in enumerate(
            padded[tuple(map(slice, shape))] for padded, shape in zip(inputs, shapes.tolist(), strict=True)
        )
    ]


def _format_answer(arrays: Mapping[str, Any], what: str, index: int, names: Sequence[str]) -> str:
    """Class name, or numbers."""
    values = [array[index].item() for name, array in arrays.items() if re.fullmatch(rf"{what}(_[0-9]+)?", name)]
    return ", ".join(
        names[v] if isinstance(v, int) and 0 <= v < len(names) else str(v) if isinstance(v, int) else format_number(v)
        for v in values
    )
