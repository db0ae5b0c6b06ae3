from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from boltcutter.project import Project
from boltcutter.run.metrics import Mode
from boltcutter.search.outcome import best_on_average, summarize_groups, test_metrics, write_outcome, write_trials
from boltcutter.search.plan import Plan
from boltcutter.search.repeats import summarize
from boltcutter.search.results import Result
from boltcutter.search.settings import Search

PROJECT = Project.find(Path(__file__))
test_metrics.__test__ = False  # type: ignore[attr-defined]


def result(folder: Path, number: int, loss: float, state: str = "complete", **values: Any) -> Result:
    named = {key.replace("__", "."): value for key, value in values.items()}
    objectives = {"val/loss": loss} if state == "complete" else {}
    metrics = {"val/loss": loss + 0.1, "train/loss": 0.0, "lr-SGD": 0.1}
    return Result(number, state, named, objectives, [(9, loss)], metrics, 2.0, folder / "trials" / f"{number:04d}")


def write(folder: Path, results: list[Result], space: dict[str, str], *, averages: bool = False) -> None:
    search = Search(space=space, seeds=4 if averages else None)
    metrics: list[tuple[str, Mode]] = [("val/loss", "min")]
    write_outcome(Plan(PROJECT, folder, {}, ["model=linear"], search, metrics, search.fixed(0), 1, 0.0), results)


def text_of(page: Path) -> str:
    """The text above the sections of a report."""
    return re.sub(r"(<[^>]+>|\s)+", " ", page.read_text().split("<body>")[1].split("<main>")[0])


def test_trials_csv(tmp_path: Path) -> None:
    failed = result(tmp_path, 1, 9, "failed", optimizer__lr=0.2)
    write_trials(tmp_path / "trials.csv", [result(tmp_path, 0, 0.5, optimizer="sgd"), failed], [("val/loss", "min")])
    table = pd.read_csv(tmp_path / "trials.csv")
    assert list(table)[:5] == ["trial", "state", "optimizer", "optimizer.lr", "val/loss"]
    assert list(table["val/loss"]) == [0.5, 9.1]  # of the best checkpoint, where a trial is complete
    assert list(table["folder"]) == [0, 1]
    hostile = replace(result(tmp_path, 2, 0.5, name="=HYPERLINK(1)\r@x"), error="+1")
    write_trials(tmp_path / "trials.csv", [hostile], [("=1", "min")])
    header, row = csv.reader((tmp_path / "trials.csv").read_text().splitlines(keepends=True))
    assert not [cell for cell in (*header, *row) if cell.startswith(("=", "+", "-", "@"))]
    assert row[2] == "'=HYPERLINK(1)\n@x"


def test_a_search_leaves_its_best_trial_as_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [result(tmp_path, number, loss, optimizer__lr=0.1 * loss) for number, loss in enumerate((0.5, 0.25, 1))]
    write(tmp_path, [*results, result(tmp_path, 3, 0, "pruned", optimizer__lr=7.0)], {"optimizer.lr": "uniform(0, 9)"})
    out = capsys.readouterr().out
    assert f"experiment={tmp_path / 'best.yaml'}" in out
    assert f"report  {tmp_path / 'report.html'}" in out
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert best["optimizer"]["lr"] == 0.025
    assert (tmp_path / "trials.csv").is_file()


def test_a_search_without_a_complete_trial_leaves_no_best_one(tmp_path: Path) -> None:
    write(tmp_path, [result(tmp_path, 0, 9, "failed", optimizer__lr=0.1)], {"optimizer.lr": "uniform(0, 9)"})
    assert not (tmp_path / "best.yaml").exists()
    assert (tmp_path / "report.html").is_file()


def test_repeated_runs_are_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [result(tmp_path, seed, loss, seed=seed) for seed, loss in enumerate((1.0, 2.0, 3.0))]
    failed = result(tmp_path, 3, 9, "failed", seed=3)
    for folder in (r.folder for r in results):
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps({"test": {"test/accuracy": 0.75}}))
    assert test_metrics(results[0].folder) == {"test/accuracy": 0.75}
    write(tmp_path, [*results, failed], {}, averages=True)
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["val/loss", "3", "2", "±", "1"] in [row[:5] for row in rows]
    assert ["test/accuracy", "3", "0.75", "±", "0"] in [row[:5] for row in rows]
    assert not [row for row in rows if row and row[0].startswith(("train/", "lr-"))]
    assert "seed 3 (failed)" in out
    assert not (tmp_path / "best.yaml").exists()
    page = text_of(tmp_path / "report.html")
    assert "mean val/loss 2.000 95% interval -0.4841 … 4.484, 4 seeds, 3 of 4 runs" in page
    assert "best val/loss" not in page


def test_the_report_of_folds_has_the_mean_of_the_best_values(tmp_path: Path) -> None:
    losses = {"sgd": (0.0, 4.0), "adamw": (1.0, 2.0)}  # the best single run is of the values that are worse on average
    runs = [(name, fold, loss) for name, found in losses.items() for fold, loss in enumerate(found)]
    results = [result(tmp_path, n, loss, optimizer=name, data__fold=fold) for n, (name, fold, loss) in enumerate(runs)]
    search, metrics = Search(space={"optimizer": "choice(sgd, adamw)"}, folds=2), [("val/loss", "min")]
    write_outcome(Plan(PROJECT, tmp_path, {}, ["model=linear"], search, metrics, search.fixed(0), 4, 0.0), results)
    page = text_of(tmp_path / "report.html")
    interval = summarize({"0": 1.0, "1": 2.0}, num_folds=2).corrected
    assert interval
    assert f"optimizer adamw mean val/loss 1.500 95% interval {interval[0]:#.4g} … {interval[1]:#.4g}, 2 folds" in page
    assert "best trial" not in page


def test_a_grid_over_folds_is_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [result(tmp_path, n, n + 1.0, data__fold=n) for n in range(2)], {"data.fold": "grid(0, 1)"})
    page, interval = text_of(tmp_path / "report.html"), summarize({"0": 1.0, "1": 2.0}, num_folds=2).corrected
    assert interval
    assert f"mean val/loss 1.500 95% interval {interval[0]:#.4g} … {interval[1]:#.4g}, 2 folds" in page
    assert "best trial" not in page
    assert "experiment=" not in capsys.readouterr().out


def test_each_combination_is_averaged_on_its_own(tmp_path: Path) -> None:
    results = [result(tmp_path, n, n, seed=n % 2, optimizer="sgd" if n < 2 else "adamw") for n in range(4)]
    text = summarize_groups(results, None)
    assert text.index("optimizer=sgd") < text.index("optimizer=adamw")
    means = [row[2] for line in text.splitlines() if (row := line.split())[:2] == ["val/loss", "2"]]
    assert means == ["0.5", "2.5"]


def test_a_mean_is_of_all_repeated_runs(tmp_path: Path) -> None:
    results = [result(tmp_path, n, loss, optimizer__lr=0.1, seed=n) for n, loss in enumerate((0.1, 3.1))]
    metrics: list[tuple[str, Mode]] = [("val/loss", "min")]
    assert best_on_average(results[:1], metrics, 2) is None
    best = best_on_average(results, metrics, 2)
    assert best
    assert best.objectives == {"val/loss": pytest.approx(1.6)}


def test_the_best_values_of_repeated_runs_are_those_of_the_best_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {0.1: (0.5, 9.0), 0.2: (2.0, 2.0), 0.3: (0.1,), 0.4: (0.2, 0.2)}  # of seeds 0 and 1
    results = [
        result(tmp_path, len(losses) * seed, loss, optimizer__lr=lr, seed=seed)
        for lr, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    results[-1] = replace(results[-1], state="failed", objectives={})
    write(tmp_path, results, {"optimizer.lr": "grid(0.1, 0.2, 0.3, 0.4)"}, averages=True)
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert best["optimizer"]["lr"] == 0.2
    assert "seed" not in best
    assert "mean val/loss 2" in (tmp_path / "best.yaml").read_text()
    assert f"experiment={tmp_path / 'best.yaml'}" in capsys.readouterr().out
