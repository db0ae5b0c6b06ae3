"""Which of two trained models is better on samples like those of the test split, and on which samples they differ."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boltcutter.analysis.groups import Result
from boltcutter.analysis.significance import Array, Interval, bootstrap, mcnemar
from boltcutter.run import trust
from boltcutter.run.metrics import parse_name

RIGHT, LOSS = "right predictions", "loss"
LARGEST = 10  # differences of the loss that are listed


@dataclass(frozen=True)
class SampleComparison:
    """Two models, or the averages of several pairs of them, and the samples that changed sides or differ most.

    Args:
        changed: Of each sample ``index``, ``target``, the predictions ``first`` and ``second`` of the first pair,
            and ``first_outcome``, ``second_outcome``, ``difference``: the fraction of right models, or the loss.
    """

    measure: str
    test: str
    count: int
    pairs: int
    difference: float
    interval: Interval
    p: float
    changed: list[dict[str, float]]


def compare_samples(pairs: Sequence[tuple[Result, Result]], metric: str) -> SampleComparison | None:
    """Compare models on the samples that all of them have predicted; None without such predictions.

    One pair of classifiers is compared by McNemar's exact test, everything else by a bootstrap of the samples.
    """
    name = parse_name(metric)
    both = [[read_predictions(r.folder, name.stage or "test") for r in results] for results in pairs]
    tables = [table for of_pair in both for table in of_pair]
    if not tables or not all(have_same_targets(tables[0], table) for table in tables):
        return None
    measure = LOSS if name.group == "loss" or not all(map(_has_classes, tables)) else RIGHT
    if measure == LOSS and not all("loss" in table for table in tables):
        return None
    first, second = (np.mean([_outcome(of_pair[side], measure) for of_pair in both], axis=0) for side in (0, 1))  # (N,)
    differences = second - first
    p, interval = bootstrap(differences)
    test, order = "bootstrap of the samples", np.argsort(-np.abs(differences), kind="stable")
    if measure == RIGHT and len(pairs) == 1:
        p, test = mcnemar(int(np.sum(differences < 0)), int(np.sum(differences > 0))), "McNemar's exact test"
    chosen = order[np.abs(differences[order]) >= 0.5] if measure == RIGHT else order[:LARGEST]
    outcomes = {"first_outcome": first, "second_outcome": second, "difference": differences}
    changed = [_describe(both[0], i) | {n: float(v[i]) for n, v in outcomes.items()} for i in chosen.tolist()]
    mean = float(np.mean(differences))
    return SampleComparison(measure, test, len(differences), len(pairs), mean, interval, p, changed)


def read_predictions(folder: Path | str, split: str) -> dict[str, Array]:
    """The columns of numbers of ``predictions.csv``, which may be from somebody else; empty if there is none."""
    with suppress(OSError, ValueError, csv.Error, StopIteration):
        text = trust.read_bytes(Path(folder, "evaluation", split, "predictions.csv")).decode()
        rows = csv.reader(text.splitlines())
        header = next(rows)
        wanted = [place for place, name in enumerate(header) if name in ("index", "target", "prediction", "loss")]
        values = np.array([[float(row[place]) for place in wanted] for row in rows if len(row) == len(header)])
        if len(values) > 1 and np.isfinite(values).all():
            return {header[place]: values[:, column] for column, place in enumerate(wanted)}
    return {}


def have_same_targets(first: dict[str, Array], second: dict[str, Array]) -> bool:
    """Whether two tables are predictions of the same samples."""
    names = ("index", "target")
    return all(n in first and n in second and np.array_equal(first[n], second[n]) for n in names)


def _has_classes(table: dict[str, Array]) -> bool:
    return "prediction" in table and all(bool(np.all(table[name] % 1 == 0)) for name in ("target", "prediction"))


def _outcome(table: dict[str, Array], measure: str) -> Array:
    return table["loss"] if measure == LOSS else np.asarray(table["target"] == table["prediction"], np.float64)


def _describe(tables: Sequence[dict[str, Array]], place: int) -> dict[str, Any]:
    """A sample, and its predictions by the first pair of models."""
    found = {name: tables[0][name][place] for name in ("index", "target")}
    found |= {s: t["prediction"][place] for s, t in zip(("first", "second"), tables, strict=True) if "prediction" in t}
    return {n: int(v) if v % 1 == 0 else float(v) for n, v in found.items()}
