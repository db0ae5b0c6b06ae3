"""Plots of predictions, as SVG files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter.checkpoint.atomic import write_text
from boltcutter.report.csv_table import Table

CELL = 28.0  # pixels per class of a small confusion matrix
MAX_LABELLED = 40  # number of classes whose names and counts are legible
MAX_SIDE = 1200.0  # pixels of a large confusion matrix
SERIES_SIDE = 200.0  # pixels
BLUE, ORANGE = "#08519c", "#d95f02"
STYLE = "font: 12px sans-serif; fill: black"


def has_series(columns: Iterable[str]) -> bool:
    """Whether a table has several targets, such as a forecast, and their predictions."""
    return bool(_steps(columns))


def draw_targets(folder: Path, table: Table) -> None:
    """Plot samples with several targets, such as a forecast, in the order of the targets."""
    steps = _steps(table)
    targets, predictions = (
        np.stack([table[f"{name}{step}"] for step in steps], axis=1) for name in ("target", "prediction")
    )  # (N, T)
    draw_series(folder / "series.svg", targets, predictions, [f"index {index}" for index in table["index"]])


def _steps(columns: Iterable[str]) -> list[str]:
    names = [*columns]
    return [name[6:] for name in names if re.fullmatch(r"target_[0-9]+", name) and f"prediction{name[6:]}" in names]


def draw_confusion(path: Path, matrix: npt.NDArray[Any], names: Sequence[str]) -> None:
    """Draw a confusion matrix with targets as rows, colored by the fraction of the row, with counts if they fit."""
    count, labelled = len(names), len(names) <= MAX_LABELLED
    cell = CELL if labelled else MAX_SIDE / count
    left = 40 + 7 * max(map(len, names)) if labelled else 30.0
    side = cell * count
    shapes = []
    for row, column in np.argwhere(matrix):
        x, y, fraction = left + column * cell, left + row * cell, matrix[row, column] / matrix[row].sum()
        shapes.append(_square(x, y, cell, f'fill="{BLUE}" fill-opacity="{fraction:.3f}"'))
        if labelled:
            color = "white" if fraction > 0.5 else "black"
            shapes.append(_text(x + cell / 2, y + cell / 2 + 4, str(matrix[row, column]), f"fill: {color}"))
    for number, name in enumerate(names if labelled else ()):
        middle = left + (number + 0.5) * cell
        shapes.append(_text(left - 8, middle + 4, name, "text-anchor: end"))
        shapes.append(_text(middle, left - 8, name, "text-anchor: start", rotate=-90 if len(name) > 3 else 0))
    shapes.append(_square(left, left, side, 'fill="none" stroke="grey"'))
    shapes += [_text(left + side / 2, 16, "prediction"), _text(16, left + side / 2, "target", rotate=-90)]
    _write(path, left + side + 20, shapes)


def draw_series(path: Path, targets: npt.NDArray[Any], predictions: npt.NDArray[Any], titles: Sequence[str]) -> None:
    """Draw targets and predictions of some samples, shape (N, T), as lines over the T targets of each."""
    side, margin, count = SERIES_SIDE, 40.0, targets.shape[1]
    shapes = [_text(margin + side, 16, "target: black, prediction: orange")]
    for number, title in enumerate(titles):
        left, top = margin + number % 2 * (side + margin) + 5, margin + number // 2 * (side + margin)
        both = np.stack([targets[number], predictions[number]]).astype(np.float64)  # (2, T)
        known = both[np.isfinite(both)]
        low, high = known.min(initial=np.inf), known.max(initial=-np.inf)
        x = left + np.arange(count) * side / max(1, count - 1)
        for values, color in zip(both, ("black", ORANGE), strict=True):
            y = top + side - (values - low) / ((high - low) or 1.0) * side
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if np.isfinite(b))
            shapes.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        shapes += [_square(left, top, side, 'fill="none" stroke="grey"'), _text(left + side / 2, top - 4, title)]
        if known.size:
            shapes += [
                _text(left - 4, top + 10 + at, f"{v:.3g}", "text-anchor: end")
                for at, v in ((0, high), (side - 10, low))
            ]
    _write(path, 2 * (side + margin) + margin, shapes)


def _square(x: float, y: float, side: float, attributes: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{side:g}" height="{side:g}" {attributes}/>'


def _text(x: float, y: float, text: str, style: str = "", rotate: int = 0) -> str:
    turned = f' transform="rotate({rotate} {x:g} {y:g})"' if rotate else ""
    return f'<text x="{x:g}" y="{y:g}" style="text-anchor: middle; {style}"{turned}>{escape(text)}</text>'


def _write(path: Path, side: float, shapes: Sequence[str]) -> None:
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side:g} {side:g}" width="{side:g}" style="{STYLE}">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    write_text(path, "\n".join([begin, background, *shapes, "</svg>\n"]))
