from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from boltcutter.checks.first_batch import FirstBatchError, describe
from boltcutter.training.failure import explain_errors


class FailsAt(L.LightningModule):
    """Raises an error at one training step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.layer = step, nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        width = 3 if self.global_step == self.step else 2
        return self.layer(batch["x"][:, :1].expand(-1, width)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(task: L.LightningModule) -> None:
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, **options)
    with explain_errors(trainer):
        trainer.fit(task, DataLoader([{"x": torch.ones(2)}] * 8, batch_size=2))


@pytest.mark.filterwarnings("ignore:.*(many workers|smaller than the logging interval)")
def test_only_errors_of_the_first_batch_are_explained() -> None:
    with pytest.raises(FirstBatchError) as found:
        fit(FailsAt(0))
    text = str(found.value)
    assert text.startswith("task: FailsAt.training_step (test_first_batch.py:")
    assert "Linear(in_features=2, out_features=1, bias=True) with input (2, 3) float32" in text
    assert "batch: {x: (2, 2) float32}" in text
    assert isinstance(found.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as later:
        fit(FailsAt(2))
    assert not isinstance(later.value, FirstBatchError)


@pytest.mark.filterwarnings("ignore:.*(many workers|smaller than the logging interval)")
def test_the_place_of_an_index_out_of_range_on_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task(FailsAt):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert'")

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None: ...

        def teardown(self, stage: str) -> None:  # as everything that uses the GPU afterwards
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # as `boltcutter check` does
    with pytest.raises(
        FirstBatchError, match=r"^task: Task.training_step \(.*\): an index is out of range, such as a target"
    ):
        fit(Task(0))


def test_nested_batches_are_described() -> None:
    batch = [torch.zeros(2, 3), {"mask": torch.zeros(2, dtype=torch.bool), "name": ["a"]}]
    assert describe(batch) == "[(2, 3) float32, {mask: (2,) bool, name: list}]"
    assert describe(torch.nn.LazyLinear(2).weight) == "of a lazy layer"
