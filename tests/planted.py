"""Faults that are planted in a small training, whose causes are known: for the tests and the study of ``why``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, BAD = 256, 137
# What why has to answer: the kind of cause, and whether the sample BAD is to be named.
FAULTS: dict[str, str] = {
    "nan-input": "sample",
    "infinite-input": "sample",
    "log-of-zero": "sample",
    "empty-mask": "sample",
    "constant": "sample",
    "all-padding": "sample",
    "outlier-target": "sample",
    "outlier-input": "sample",
    "root-of-zero": "sample",
    "arc-cosine": "sample",
    "augmentation": "sample",
    "two-samples": "sample",
    "out-of-range": "sample",
    "unreadable": "sample",
    "rate-too-high": "learning_rate",
    "rate-jumps": "learning_rate",
    "float32-overflow": "precision",
    "weight-lost": "weights",
    "constant-batch": "none",
    "code": "none",
    "code-of-large": "none",
    "gradient-scaled": "none",
}


class PlantedDataset(Dataset[tuple[Tensor, Tensor]]):
    """Six numbers, of which a positive number is to be computed; one sample may be bad."""

    def __init__(self, fault: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.fault = fault
        self.inputs = torch.randn(SAMPLES, 6, generator=generator)
        self.targets = (self.inputs @ torch.randn(6, 1, generator=generator)).abs() + 0.5
        bad = self.inputs[BAD]
        if fault == "nan-input":
            bad[3] = torch.nan
        elif fault == "infinite-input":
            bad[1] = torch.inf
        elif fault in ("log-of-zero", "root-of-zero"):
            self.targets[BAD] = 0
        elif fault in ("empty-mask", "all-padding"):
            bad[:] = 0
        elif fault == "constant":
            bad[:] = 2
        elif fault in ("outlier-target", "out-of-range"):
            self.targets[BAD] = 3000
        elif fault == "outlier-input":
            bad *= 1e4
        elif fault == "arc-cosine":
            self.targets = self.targets / (self.targets.max() + 1)
            self.targets[BAD] = 1.5
        elif fault == "two-samples":
            bad[0] = self.inputs[BAD + 1][0] = torch.nan
        elif fault == "constant-batch":
            self.targets[96:112] = 1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.fault == "unreadable" and index == BAD:
            raise OSError("this sample is damaged")
        inputs = self.inputs[index]
        if self.fault == "augmentation":
            kept = torch.rand(6) < (0.0 if index == BAD else 2.0)  # all but a crop, which is empty for one sample
            inputs = inputs - inputs[kept].mean()
        return inputs, self.targets[index]


class PlantedData(L.LightningDataModule):
    """Batches of 16 samples."""

    def __init__(self, fault: str = "no", num_workers: int = 0, batch_size: int = 16) -> None:
        super().__init__()
        self.fault, self.num_workers, self.batch_size = fault, num_workers, batch_size

    def train_dataloader(self) -> Any:
        data = PlantedDataset(self.fault)
        shuffle = self.fault not in ("constant-batch", "two-samples")
        return DataLoader(data, self.batch_size, shuffle=shuffle, num_workers=self.num_workers)


class PlantedModule(L.LightningModule):
    """A regression by two layers, whose step has the fault."""

    def __init__(self, fault: str = "no", lr: float = 0.01) -> None:
        super().__init__()
        self.fault, self.lr = fault, lr
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        if self.fault == "constant":
            inputs = (inputs - inputs.mean(1, keepdim=True)) / inputs.std(1, keepdim=True)
        if self.fault == "empty-mask":
            mask = (inputs != 0).float()
            inputs = inputs * (mask.sum(1, keepdim=True) / mask.sum(1, keepdim=True))
        if self.fault == "all-padding":
            weights = torch.where(inputs != 0, 0.0, -torch.inf).softmax(1)
            inputs = inputs * weights
        if self.fault == "log-of-zero":
            targets = targets.log()
        if self.fault == "arc-cosine":
            targets = targets.acos()
        outputs = self.net(inputs)
        if self.fault == "root-of-zero":
            outputs = (outputs * targets).abs().sqrt()
        loss = (outputs - targets).square().mean()
        if self.fault == "out-of-range":
            loss = loss + torch.zeros(4)[9 * (targets > 1000).long()].mean()
        if self.fault == "constant-batch":
            loss = loss / targets.std()
        if self.fault == "float32-overflow" and self.global_step == 20:
            large = outputs.abs() * 0 + 90.0  # exp(90) has no float32
            loss = loss + large.exp().log().mean()
        if self.fault == "code" and self.global_step == 20:
            loss = loss * torch.inf
        if self.fault == "code-of-large" and self.global_step == 15:
            loss = loss.exp().exp()  # which has no float32 of the five samples with the largest losses
        found: Tensor = loss
        return found

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.fault == "weight-lost" and self.global_step == 20:
            with torch.no_grad():
                next(self.net[2].parameters())[0, 3] = torch.nan

    def on_after_backward(self) -> None:
        if self.fault == "gradient-scaled" and self.global_step == 20:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 1e4

    def configure_optimizers(self) -> Any:
        if self.fault == "rate-too-high":
            return torch.optim.SGD(self.parameters(), 1.0)
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        if self.fault != "rate-jumps":
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 50.0 if step == 30 else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def write_project(root: Path) -> Path:
    """A project with this data and module."""
    for group, name in (("data", "PlantedData"), ("task", "PlantedModule")):
        (root / "configs" / group).mkdir(parents=True)
        more = "num_workers: 0\nbatch_size: 16\n" if group == "data" else "lr: 0.01\n"
        text = f"# Planted.\n_target_: planted.{name}\nfault: 'no'\n{more}"
        (root / "configs" / group / "planted.yaml").write_text(text)
    (root / "planted.py").write_text(Path(__file__).read_text())
    return root


def overrides(fault: str, folder: Path, ranks: int = 1, workers: int = 0) -> list[str]:
    """The overrides of a training with a fault."""
    given = [
        "data=planted",
        "task=planted",
        "model=null",
        "logger=csv",
        "report=false",
        "test=false",
        f"folder={folder}",
    ]
    given += [f"data.fault={fault}", f"task.fault={fault}", f"data.num_workers={workers}", "trainer.accelerator=cpu"]
    given += ["trainer.max_epochs=4", "trainer.gradient_clip_val=null", f"data.batch_size={16 // ranks}"]
    if ranks > 1:
        given += ["trainer=ddp", f"trainer.devices={ranks}", "trainer.strategy.start_method=fork"]
    return given


def forked(function: Callable[..., Any], *arguments: Any) -> int:
    """Call a function in a fork of this process, and return its exit status."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        status = 1
        try:
            function(*arguments)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0) if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
