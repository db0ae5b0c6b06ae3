import os
from pathlib import Path

import numpy as np
import pytest
from compared_runs import write_run

from boltcutter.analysis.groups import Result, read_group
from boltcutter.analysis.record import find_runs
from boltcutter.analysis.samples import compare_samples, have_same_targets, read_predictions
from boltcutter.analysis.significance import mcnemar

METRIC = "test/accuracy"


def result(folder: Path, right: list[bool] | None, seed: int = 0) -> Result:
    write_run(folder, 0.5, right=right, seed=seed)
    return read_group(str(folder), find_runs(folder), METRIC).results[0]


def test_classifiers_are_compared_by_mcnemar(tmp_path: Path) -> None:
    first = result(tmp_path / "a", [True] * 80 + [False] * 20)
    second = result(tmp_path / "b", [True] * 70 + [False] * 10 + [True] * 3 + [False] * 17)
    found = compare_samples([(first, second)], METRIC)
    assert found is not None
    assert (found.measure, found.test, found.count) == ("right predictions", "McNemar's exact test", 100)
    assert found.difference == pytest.approx(-0.07)
    assert found.p == mcnemar(10, 3)
    assert found.interval[0] < -0.07 < found.interval[1]
    assert [sample["index"] for sample in found.changed] == [*range(70, 80), *range(80, 83)]
    outcomes = {"first_outcome": 1.0, "second_outcome": 0.0, "difference": -1.0}
    assert found.changed[0] == {"index": 70, "target": 0, "first": 0, "second": 1} | outcomes


def test_several_pairs_are_averaged(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = []
    for seed in range(4):
        first, second = (rng.random(200) < rate for rate in (0.7, 0.9))
        both = {"a": first, "b": second}
        pairs.append(tuple(result(tmp_path / f"{n}{seed}", right.tolist(), seed) for n, right in both.items()))
    found = compare_samples(pairs, METRIC)
    assert found is not None
    assert (found.pairs, found.test) == (4, "bootstrap of the samples")
    assert found.interval[0] > 0.1
    assert found.p < 0.001
    assert all(abs(sample["difference"]) >= 0.5 for sample in found.changed)


def test_the_loss_is_compared_by_a_bootstrap(tmp_path: Path) -> None:
    results = [result(tmp_path / name, None) for name in ("a", "b")]
    losses = np.random.default_rng(0).exponential(0.5, (2, 300))
    for each, shift in zip(results, (0.0, 0.3), strict=True):
        file = Path(each.run.folder) / "evaluation" / "test" / "predictions.csv"
        file.parent.mkdir(parents=True)
        rows = [f"{i},{value + (1 + noise) * shift},{i / 7},{i / 8}" for i, (value, noise) in enumerate(losses.T)]
        file.write_text("\n".join(["index,loss,target,prediction", *rows]))
    found = compare_samples([(results[0], results[1])], METRIC)  # of no classes
    assert found is not None
    assert (found.measure, found.test, len(found.changed)) == ("loss", "bootstrap of the samples", 10)
    assert found.interval[0] < 0.3 + 0.15 < found.interval[1]
    assert found.p < 0.001
    assert compare_samples([(results[0], results[1])], "test/loss") == found


def test_other_samples_are_not_compared(tmp_path: Path) -> None:
    first, second, none = (
        result(tmp_path / name, right) for name, right in (("a", [True] * 9), ("b", [True] * 8), ("c", None))
    )
    for other in (second, none):
        assert compare_samples([(first, other)], METRIC) is None
        assert not have_same_targets(*(read_predictions(each.run.folder, "test") for each in (first, other)))
    assert not have_same_targets({}, {})
    assert compare_samples([], METRIC) is None
    assert compare_samples([(first, first)], "val/accuracy") is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "index,target\n",
        "index,target\n0,nan\n1,inf\n",
        "index,target\n0,x\n1,2\n",
        "\0\n",
        "index,target\n" + "9" * 200_000,
    ],
)
def test_damaged_predictions_are_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "evaluation" / "test" / "predictions.csv"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert read_predictions(tmp_path, "test") == {}


def test_predictions_of_somebody_else_do_not_block(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation" / "test"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "predictions.csv")
    assert read_predictions(tmp_path, "test") == {}
