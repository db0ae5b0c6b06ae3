import pytest

from boltcutter.run.metrics import infer_mode, parse_name


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
