from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from boltcutter.analysis import luck
from boltcutter.analysis.record import Run
from boltcutter.run import evaluations


def make_runs(folder: Path, values: list[float], lrs: list[float] | None = None, **settings: object) -> list[Run]:
    """Runs that were each tested once."""
    runs = []
    for seed, value in enumerate(values):
        place = folder / "runs" / "a" / str(seed)
        evaluations.append(place, {"split": "test", "checkpoint": "best.ckpt", "written": "1"})
        given = {"seed": seed, "data.path": "x", "optimizer.lr": (lrs or [0.1] * 9)[seed], "data.seed": 0, **settings}
        runs.append(Run(str(seed), str(place), "a", "completed", 0.0, 1.0, given, {"test/accuracy": value}))
    return runs


def test_the_best_of_many_is_lucky_by_the_spread_of_repetitions(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, [0.80, 0.82, 0.84, 0.82, 0.80])
    evaluations.append(Path(runs[0].folder), {"split": "test", "checkpoint": "best.ckpt", "written": "1"})  # again
    text = luck.describe(runs, "test/accuracy")
    assert "6 times, at 5 models" in text
    assert "2 points (1.18 standard deviations" in text  # of 1.67 points
    assert not luck.describe(runs, "val/accuracy")
    assert not luck.describe(runs[:1], "test/accuracy")
    other = [replace(run, settings={**run.settings, "data.path": "y"}) for run in runs]
    assert "at 5 models" in luck.describe([*runs, *other], "test/accuracy", runs[:1])


def test_samples_add_to_the_spread_where_the_split_is_shared(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, [0.8, 0.8])
    (tables := Path(runs[0].folder, "evaluation", "test")).mkdir()
    (tables / "predictions.csv").write_text("index,target\n" + "".join(f"{index},1\n" for index in range(100)))
    assert luck.spread(runs, "test/accuracy", is_fraction=True) == pytest.approx(math.sqrt(0.8 * 0.2 / 100))
    assert luck.spread(runs, "test/accuracy", is_fraction=False) == 0
    varied = [replace(run, settings={**run.settings, "data.seed": run.settings["seed"]}) for run in runs]
    assert luck.spread(varied, "test/accuracy", is_fraction=True) == 0
    different = make_runs(tmp_path / "b", [0.8, 0.9], [0.1, 0.2])
    assert luck.spread(different, "test/accuracy", is_fraction=True) is None
    assert "none is known" in luck.describe(different, "test/accuracy")
