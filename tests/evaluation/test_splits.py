from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from boltcutter.data.digits import Digits
from boltcutter.evaluation.splits import (
    ChainedLoader,
    note_limit,
    prediction_argument,
    skip_reason,
    uses_validation_step,
)


class Manual(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Whole(L.LightningModule):
    def test_step(self, batch: torch.Tensor) -> None: ...

    def test_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.zeros(2))  # type: ignore[arg-type]


def test_skip_reason_names_the_missing_hook() -> None:
    assert skip_reason(None, Whole(), "test") is None
    assert skip_reason(None, Manual(), "test") == "Manual has no test_step"
    assert skip_reason(None, Whole(), "val") == "Whole has no validation_step"
    reason = str(skip_reason(L.LightningDataModule(), Whole(), "test"))  # Lightning does not ask the task then
    assert reason.startswith("LightningDataModule has no test_dataloader (that of Whole")


def test_chained_splits_are_counted_and_named_together() -> None:
    def loader(names: list[str] | None, *batches: list[int]) -> Any:
        size = sum(map(len, batches))
        dataset = type("Named", (list,), {"names": names} if names else {})(range(size))
        return SimpleNamespace(dataset=dataset, batch_sampler=batches)

    chained = ChainedLoader([loader(["a", "b", "c"], [0, 1], [2]), loader(["d"], [0])])
    assert list(chained.batch_sampler or ()) == [[0, 1], [2], [3]]
    assert chained.dataset.names == ["a", "b", "c", "d"]
    assert ChainedLoader([loader(["a"], [0]), loader(None, [0])]).dataset.names is None
    assert ChainedLoader([SimpleNamespace()]).batch_sampler is None  # of a stream


def test_prediction_argument() -> None:
    data = L.LightningDataModule()
    assert prediction_argument(data, Manual()) is None
    data.predict_dataloader = lambda: []  # type: ignore[method-assign]
    assert prediction_argument(data, Manual()) == ""
    data.read = data.loader = lambda name: name  # type: ignore[attr-defined]
    assert prediction_argument(data, Manual()) == ""  # another data module may use these names differently
    assert uses_validation_step(data, "val")
    ours = Digits(batch_size=4)
    assert prediction_argument(ours, Manual()) == "input=<files>"
    assert not uses_validation_step(ours, "val")


@pytest.mark.parametrize(
    ("options", "overrides", "count"),
    [
        ({"limit_test_batches": 1}, [], 1),
        ({"limit_test_batches": 0.5}, [], 1),
        ({"fast_dev_run": True}, [], 1),
        ({"limit_test_batches": 1.0}, [], 0),
        ({}, [], 0),
        ({"limit_test_batches": 1}, ["trainer.limit_test_batches=1"], 0),  # just set
        ({"limit_val_batches": 1}, [], 0),
    ],
)
def test_a_limit_of_the_run_is_reported(
    options: dict[str, Any], overrides: list[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    capsys.readouterr()
    note_limit(trainer, "limit_test_batches", overrides)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == count
    assert all("limit_test_batches=1.0" in line for line in lines)
