from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from boltcutter.replay.rows import describe_rows, divided, locate, unreadable


class Files(TensorDataset):
    """A dataset that knows the files of its samples."""

    def __init__(self, names: list[Any], field: str) -> None:
        super().__init__(torch.zeros(len(names)))
        setattr(self, field, names)


def place(dataset: Any, index: int) -> str:
    trainer: Any = SimpleNamespace(train_dataloader=SimpleNamespace(dataset=dataset))
    return locate(trainer, index)


def test_samples_have_the_name_that_their_data_give_them() -> None:
    files = Files(["a.png", "b.png", "c.png"], "names")
    pairs = Files([("x.png", 0), ("y.png", 1)], "samples")
    assert place(files, 1) == "b.png"
    assert place(Subset(files, [2, 0]), 0) == "c.png"
    assert place(ConcatDataset([files, pairs]), 4) == "y.png"
    assert place(Files([Path("d.txt")], "paths"), 0) == "d.txt"
    assert place(Subset(TensorDataset(torch.zeros(9)), [7, 8]), 1) == "8 of the dataset before it was split"
    assert place(TensorDataset(torch.zeros(9)), 1) == ""


def test_samples_that_cannot_be_read_are_named() -> None:
    class Torn(Files):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise OSError("torn")
            return super().__getitem__(index)

    trainer: Any = SimpleNamespace(train_dataloader=SimpleNamespace(dataset=Torn(["a", "b", "c"], "names")))
    (found,) = unreadable(trainer, range(3))
    assert (found["index"], found["where"], found["error"]) == (1, "b", "OSError: torn")


def described(inputs: torch.Tensor, targets: torch.Tensor, row: int) -> list[str]:
    trainer: Any = SimpleNamespace(datamodule=SimpleNamespace(statistics={"columns": ["age", "income", "size"]}))
    rows: list[dict[str, Any]] = [{"row": row, "loss": 1.0, "gradient_norm": 1.0}]
    describe_rows(trainer, [inputs, targets], rows)
    found: list[str] = rows[0]["values"]
    return found


def test_what_is_unusual_in_a_sample_is_said() -> None:
    inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.rand(16, generator=torch.Generator().manual_seed(0))
    inputs[3, 1], inputs[4], inputs[5, 2], targets[6] = torch.nan, 0.5, 1e6, -400.0
    assert described(inputs, targets, 3)[0] == "input_0 has nan at column income"
    assert described(inputs, targets, 4)[0] == "input_0 is 0.5 everywhere"
    assert described(inputs, targets, 5)[0].startswith("input_0 has 1e+06 at column size")
    assert "deviations from the others" in described(inputs, targets, 6)[1]


def test_pictures_are_shown() -> None:
    trainer: Any = SimpleNamespace(datamodule=None)
    rows: list[dict[str, Any]] = [{"row": 1, "loss": 1.0, "gradient_norm": 1.0}]
    describe_rows(trainer, [torch.rand(4, 3, 8, 8), torch.zeros(4)], rows)
    assert rows[0]["picture"]["url"].startswith("data:image/png")


def test_many_samples_are_divided() -> None:
    parts = divided(list(range(100)))
    assert len(parts) == 8
    assert [row for part in parts for row in part] == list(range(100))
