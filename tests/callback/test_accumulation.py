from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from boltcutter.callback.accumulation import MeanOfAccumulated


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(6, 1))


class Module(L.LightningModule):
    """Gradients of 1 for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.gradients = list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch.mean()).sum()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert self.weight.grad is not None
        self.gradients.append(float(self.weight.grad))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("loader", [DataLoader(torch.ones(6, 1)), DataLoader(Stream())], ids=["known", "stream"])  # type: ignore[arg-type]
@pytest.mark.parametrize(("count", "steps"), [(4, 2), (3, 2), (1, 6), ({0: 4, 1: 5}, 2)])
def test_the_last_step_of_an_epoch_uses_the_mean_of_its_batches(
    loader: DataLoader[Any], count: int | dict[int, int], steps: int
) -> None:
    callbacks: list[Callback] = [MeanOfAccumulated()]
    if isinstance(count, dict):
        callbacks.append(GradientAccumulationScheduler(count))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=count if isinstance(count, int) else 1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, loader)
    assert module.gradients == pytest.approx([1.0] * 2 * steps)
