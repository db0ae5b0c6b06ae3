"""Data modules that divide their samples into folds correctly, or not, as users write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

import boltcutter
from boltcutter.data.module import BatchedTensorDataset

NUM_SAMPLES = 60


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset with an optional random ``transform``."""

    def __init__(self, inputs: Tensor, targets: Tensor, transform: Any = None) -> None:
        self.inputs, self.targets, self.transform = inputs, targets, transform

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index]
        return self.transform(inputs) if self.transform else inputs, self.targets[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples as a stream."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __iter__(self) -> Any:
        return zip(*self.columns, strict=True)


def jitter(inputs: Tensor) -> Tensor:
    return inputs + torch.rand(())


def make_dataset(kind: str, inputs: Tensor, targets: Tensor, indices: Any, *, train: bool) -> Any:
    """A dataset of some of the samples."""
    rows = torch.as_tensor(indices)
    match kind:
        case "batched":
            return BatchedTensorDataset(inputs[rows], targets[rows], (lambda x, batch: jitter(x)) if train else None)
        case "tensors":
            return TensorDataset(inputs[rows], targets[rows])
        case "subset":
            return Subset(Samples(inputs, targets, jitter if train else None), rows.tolist())
        case "samples":
            return Samples(inputs[rows], targets[rows])
        case "scaled":  # by the statistics of the train split
            others = np.setdiff1d(np.arange(len(inputs)), indices)
            used = inputs[rows if train else torch.as_tensor(others)]
            return TensorDataset((inputs[rows] - used.mean(0)) / used.std(0), targets[rows])
        case "stream":
            return Stream(inputs[rows], targets[rows])
    raise AssertionError(kind)


def divide(fault: str, num_folds: int, fold: int) -> tuple[Any, Any]:
    """Indices for training and validation."""
    order = np.random.default_rng(0).permutation(NUM_SAMPLES)
    parts = np.array_split(order, num_folds)
    val, train = parts[fold], np.concatenate([part for number, part in enumerate(parts) if number != fold])
    match fault:
        case "ignored":
            return order[12:], order[:12]
        case "ignored overlap":
            return order, order[:12]
        case "overlap":
            return order, val
        case "redrawn":
            order = np.random.default_rng(fold).permutation(NUM_SAMPLES)
            return order[20:], order[:20]
        case "uncovered":
            return np.concatenate([train, val[4:]]), val[:4]
    return train, val


def make_samples(*, repeated: bool = False) -> tuple[Tensor, Tensor]:
    """The same samples in each process; ``repeated``: each of them twice."""
    inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    inputs = torch.cat([inputs[::2], inputs[::2]]) if repeated else inputs
    return inputs, (inputs.sum(dim=1) > 0).long()


class Native(boltcutter.DataModule):
    """A ``DataModule`` with any kind of dataset."""

    def __init__(
        self, *, dataset: str = "tensors", fault: str = "", shape: Any = (4,), num_classes: int = 2, **settings: Any
    ) -> None:
        super().__init__(**{"batch_size": 4, **settings})
        self.dataset, self.fault = dataset, fault

    def load(self) -> boltcutter.Splits:
        samples = make_samples(repeated=self.fault == "repeated")
        train, val = divide(self.fault, self.num_folds or 2, self.fold)
        parts = [make_dataset(self.dataset, *samples, rows, train=rows is train) for rows in (train, val)]
        return boltcutter.Splits(*parts)

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        raise ValueError("there are no files")


class Foreign(L.LightningDataModule):
    """A ``LightningDataModule``; with ``dataset=sampler`` or ``batches`` both loaders select from the same dataset."""

    def __init__(
        self,
        dataset: str = "tensors",
        fault: str = "",
        num_folds: int | None = None,
        fold: int = 0,
        shape: Any = (4,),
        num_classes: int = 2,
    ) -> None:
        super().__init__()
        self.dataset, self.fault, self.num_folds, self.fold = dataset, fault, num_folds or 2, fold
        self.prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        assert self.trainer is not None  # as during training
        assert self.prepared
        self.samples = make_samples(repeated=self.fault == "repeated")
        self.train_rows, self.val_rows = divide(self.fault, self.num_folds, self.fold)

    def _loader(self, rows: Any, *, train: bool) -> DataLoader[Any]:
        if self.dataset == "sampler":
            sampler = SubsetRandomSampler(rows.tolist())
            return DataLoader(TensorDataset(*self.samples), 4, sampler=sampler)
        if self.dataset == "batches":
            return DataLoader(TensorDataset(*self.samples), batch_sampler=rows.reshape(-1, 4).tolist())
        dataset = make_dataset(self.dataset, *self.samples, rows, train=train)
        return DataLoader(dataset, 4, shuffle=train and self.dataset != "stream")

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_rows, train=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_rows, train=False)
