"""A small training whose parts are changed one at a time: copied into a project as ``parts``."""

import os
import signal
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, get_worker_info

SAMPLES = 256
SCALE = float(os.environ.get("PAIR_SCALE", "1"))


def write_data(path: str, changed: int | None = None) -> None:
    """Write samples; one of them changed."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    targets = (inputs @ torch.randn(6, 1, generator=generator)).abs() + 0.5
    if changed is not None:
        inputs[changed, 2] += 0.5
    torch.save({"inputs": inputs, "targets": targets}, path)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, file: str, noise: float, worker_seed: int) -> None:
        found = torch.load(file, weights_only=True)
        self.inputs, self.targets = found["inputs"], found["targets"]
        self.noise, self.worker_seed = noise, worker_seed

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index] + self.noise * torch.randn(6)
        if get_worker_info() is not None:  # as a worker_init_fn that seeds would do
            inputs = inputs + 0.01 * torch.randn(6, generator=torch.Generator().manual_seed(self.worker_seed + index))
        return inputs, self.targets[index]


class PairData(L.LightningDataModule):
    def __init__(
        self,
        file: str,
        num_workers: int = 0,
        batch_size: int = 16,
        noise: float = 0.0,
        worker_seed: int = 0,
        order: int | None = None,
    ) -> None:
        super().__init__()
        self.file, self.num_workers, self.batch_size = file, num_workers, batch_size
        self.noise, self.worker_seed, self.order = noise, worker_seed, order

    def train_dataloader(self) -> Any:
        data = Samples(self.file, self.noise, self.worker_seed)
        generator = None if self.order is None else torch.Generator().manual_seed(self.order)
        sampler = RandomSampler(data, generator=generator)
        return DataLoader(data, self.batch_size, sampler=sampler, num_workers=self.num_workers)


class Rounded(nn.Linear):
    """A matrix product with a precision of its own."""

    def __init__(self, inputs: int, outputs: int, dtype: str) -> None:
        super().__init__(inputs, outputs)
        self.dtype: torch.dtype = getattr(torch, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.dtype), self.weight.to(self.dtype), self.bias.to(self.dtype)).float()


class Net(nn.Module):
    def __init__(self, hidden: int, dropout: float, momentum: float, dtype: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, hidden)
        self.second = Rounded(hidden, 1, dtype)
        self.norm = nn.BatchNorm1d(hidden, momentum=momentum)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.norm(x)
        x = torch.relu(x)
        x = self.dropout(x)
        return self.second(x)


class Preempted(L.Callback):
    """What a cluster does that takes back a machine: SIGTERM in the second epoch, once."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 21 and trainer.ckpt_path is None:
            signal.raise_signal(signal.SIGTERM)


class PairModule(L.LightningModule):
    def __init__(
        self,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        beta: float = 0.999,
        eps: float = 1e-8,
        hidden: int = 16,
        dropout: float = 0.1,
        momentum: float = 0.1,
        dtype: str = "float32",
        warmup: int = 4,
        power: float = 2.0,
        unfreeze_at: int = 0,
    ) -> None:
        super().__init__()
        self.options = {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, beta), "eps": eps}
        self.warmup, self.power, self.unfreeze_at = warmup, power, unfreeze_at
        self.net = Net(hidden, dropout, momentum, dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        outputs = self.net(inputs)
        return (outputs - targets).abs().pow(self.power).mean() * SCALE

    def on_after_backward(self) -> None:
        if self.global_step < self.unfreeze_at and self.net.second.weight.grad is not None:
            self.net.second.weight.grad.zero_()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
