from pathlib import Path

import pytest

from boltcutter.run.metrics import MAX_NAMES, final_metrics, infer_mode, parse_name, read_columns


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("val/loss", ("loss", "val", False)),
        ("val_loss_epoch", ("loss", "val", True)),
        ("valid_dataset_iou", ("dataset_iou", "val", False)),
        ("train/accuracy", ("accuracy", "train", False)),
        ("test_loss", ("loss", "test", False)),
        ("accuracy", ("accuracy", "", False)),
        ("valley", ("valley", "", False)),
    ],
)
def test_the_parts_of_a_name(name: str, expected: tuple[str, str, bool]) -> None:
    assert parse_name(name) == expected


@pytest.mark.parametrize(("name", "expected"), [("val_acc", "max"), ("val/rmse", "min"), ("dice", "max"), ("lr", None)])
def test_which_way_a_metric_is_to_go(name: str, expected: str | None) -> None:
    assert infer_mode(name) == expected


def test_the_last_value_of_each_metric_and_its_step(tmp_path: Path) -> None:
    assert final_metrics(tmp_path) == {}
    rows = [
        "step,epoch,train/loss,val/loss,test/loss,throughput/samples",
        "0,0,3.5,,,9",
        "4,1,2.5,2.0,,",
        "5,1,,,1.0,8",
    ]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    assert final_metrics(tmp_path) == {"train/loss": (2.5, 5), "val/loss": (2.0, 5)}


def test_columns_are_read_as_far_as_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text('step,epoch,val/loss,"a,b"\n9,0,0.5,\n19,1,x,1e400,more\n29\n39,2,1,2\n49,2,1')
    found = {name: [list(column) for column in columns] for name, columns in read_columns(path).items()}
    assert repr(found) == repr(
        {
            "val/loss": [[9, 19, 39], [0, 1, 2], [0.5, float("nan"), 1.0]],
            "a,b": [[19, 39], [1, 2], [float("inf"), 2.0]],
        }
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("step,epoch,a", "more names than can be read"),
        (",".join(map(str, range(MAX_NAMES))) + "\n1,2\n", "more names than can be read"),
    ],
    ids=["empty", "incomplete", "wide"],
)
def test_a_table_of_somebody_else_is_limited(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_columns(tmp_path / "metrics.csv")
