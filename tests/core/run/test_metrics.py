from pathlib import Path

import pytest

from boltcutter.run.metrics import final_metrics, infer_mode, parse_name


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
