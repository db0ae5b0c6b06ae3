from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import QUICK, Script
from PIL import Image
from sklearn.datasets import load_digits

from boltcutter.prediction.predict import _table, find_inputs, split_paths
from boltcutter.report.columns import to_columns
from boltcutter.report.csv_table import MAX_COLUMNS


@pytest.fixture
def images(tmp_path: Path) -> Path:
    pixels, labels = load_digits(return_X_y=True)
    (tmp_path / "in").mkdir()
    for number in range(20):
        picture = Image.fromarray(np.rint(pixels[number].reshape(8, 8) * 255 / 16).astype(np.uint8))
        picture.save(tmp_path / "in" / f"{number:02}-{labels[number]}.png")
    return tmp_path / "in"


def test_images_are_predicted_by_name(script: Script, trained: Path, images: Path, tmp_path: Path) -> None:
    done = script("predict", f"run={trained}", f"input={images}", f"output={tmp_path}/out.csv")
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "out.csv")
    targets = [int(Path(name).stem[-1]) for name in table["input"]]
    assert (table["prediction"] == targets).mean() >= 0.9
    assert np.allclose(table[[str(digit) for digit in range(10)]].sum(axis=1), 1, atol=1e-5)


def test_multiple_inputs_keep_their_order(script: Script, trained: Path, images: Path) -> None:
    names = [str(images / "02-2.png"), str(images / "00-0.png")]
    done = script("predict", f"run={trained}", f"input=[{', '.join(names)}]", f"output={images}/out.csv")
    assert done.returncode == 0, done.stderr
    assert list(pd.read_csv(images / "out.csv")["input"]) == names


@pytest.mark.slow
def test_a_table_is_predicted_without_its_training_data(script: Script, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(200, 2))
    table = pd.DataFrame({"a": numbers[:, 0], "b": numbers[:, 1] * 50, "y": 3 * numbers[:, 0] + 100})
    table.to_csv(tmp_path / "train.csv", index=False)
    overrides = ["experiment=diabetes", f"data.path={tmp_path}/train.csv", "data.target=y", "trainer.max_epochs=30"]
    done = script("train", *QUICK[:2], *overrides, "model.dropout=0", f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    (tmp_path / "train.csv").unlink()
    table.drop(columns="y").to_csv(tmp_path / "new.csv", index=False)
    done = script("predict", f"run={tmp_path}/run", f"input={tmp_path}/new.csv")
    assert done.returncode == 0, done.stderr
    found = pd.read_csv(tmp_path / "run" / "predictions.csv")["prediction"]
    assert np.abs(found - table["y"]).mean() < 1.0  # in the target's own unit


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run={trained}"], "input is not set"),
        (["run={trained}", "input=nowhere.png"], "input=nowhere.png: no such file"),
        (["run={trained}", "input=README.md"], "README.md: "),
    ],
)
def test_errors_are_one_line(script: Script, trained: Path, overrides: list[str], message: str) -> None:
    done = script("predict", *(override.format(trained=trained) for override in overrides))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a.csv, b.csv", ["a.csv", "b.csv"]),
        ("""["a.csv", 'b.csv']""", ["a.csv", "b.csv"]),
        ("c,d.csv", ["c,d.csv"]),  # the name of a file
        ("a.csv,", ["a.csv"]),
        ("[]", []),
        ("", []),
        ("a" * 300, ["a" * 300]),  # longer than the name of a file may be
    ],
)
def test_inputs_are_written_in_several_ways(
    given: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c,d.csv").touch()
    assert split_paths(given) == found
    assert [str(path) for text in found for path in find_inputs(text)] == found


@pytest.mark.parametrize(("width", "is_table"), [(33, True), (MAX_COLUMNS, True), (MAX_COLUMNS + 1, False)])
def test_tests_and_predictions_have_the_same_limit_of_columns(width: int, is_table: bool) -> None:
    batch = torch.ones(2, width)
    found, skipped = to_columns(batch, None, 2)
    assert (len(found) == width, bool(skipped)) == (is_table, not is_table)
    of_files = _table(batch, ["a", "b"], [], "regression")
    assert isinstance(of_files, dict) is is_table
    classes = _table(batch, ["a", "b"], [], "classification")
    assert isinstance(classes, dict)
    assert ("confidence" in classes) is not is_table


def test_a_class_may_have_the_name_of_a_column() -> None:
    table = _table(torch.eye(2), ["a", "b"], ["input", "prediction"], "classification")
    assert isinstance(table, dict)
    assert {name: column.tolist() for name, column in table.items()} == {
        "input": ["a", "b"],
        "prediction": ["input", "prediction"],
        "class input": [1, 0],
        "class prediction": [0, 1],
    }
