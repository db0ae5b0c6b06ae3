"""Dataloaders of a third-party data module: samples are their own indices, and ranks write their batches to files."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

LENGTH = 45


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Samples with random augmentation."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        changed = index + 0.1 * torch.rand(3) + random.random() * 0.1
        return torch.cat([torch.tensor([float(index)]), changed]), torch.tensor(index % 3)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream; if ``sharded``, each rank has other samples, and a different number of them."""

    def __init__(self, length: int, *, sharded: bool = False) -> None:
        self.length, self.sharded = length, sharded

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        indices = list(range(self.length))
        random.shuffle(indices)
        mine = indices[: self.length * 2 // 3] if rank == 0 else indices[self.length * 2 // 3 :]
        worker = get_worker_info()
        chosen = mine if self.sharded and world > 1 else indices
        for index in chosen[worker.id :: worker.num_workers] if worker else chosen:
            yield torch.tensor([float(index), *torch.rand(3)]), torch.tensor(index % 3)


class Buckets(Sampler[list[int]]):
    """A batch sampler without the attributes ``sampler`` and ``batch_size``: consecutive samples, in random order."""

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[list[int]]:
        for begin in torch.randperm(11).tolist():
            yield list(range(begin * 4, begin * 4 + 4))


class NumbersDataModule(L.LightningDataModule):
    """A plain LightningDataModule with one dataloader of each kind."""

    def __init__(self, kind: str, log_dir: str, num_workers: int = 0, shape: Any = (4,), num_classes: int = 3) -> None:
        super().__init__()
        self.kind, self.log_dir, self.num_workers = kind, Path(log_dir), num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        data, weights = Numbers(), [1.0 + index for index in range(LENGTH)]
        options: dict[str, dict[str, Any]] = {
            "shuffled": {"batch_size": 4, "shuffle": True},
            "generator": {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(7)},
            "weighted": {"batch_size": 4, "sampler": WeightedRandomSampler(weights, 44, replacement=False)},
            "buckets": {"batch_sampler": Buckets()},
            "unbatched": {"batch_size": None, "sampler": BatchSampler(range(LENGTH), 4, drop_last=True)},
            "stream": {"dataset": Stream(LENGTH), "batch_size": 4},
            "sharded": {"dataset": Stream(LENGTH, sharded=True), "batch_size": 4},
        }
        if self.kind == "distributed":
            ranks = {"num_replicas": int(os.environ.get("WORLD_SIZE", 1)), "rank": int(os.environ.get("RANK", 0))}
            options["distributed"] = {"batch_size": 4, "sampler": DistributedSampler(data, **ranks)}
        chosen: dict[str, Any] = {"dataset": data, "num_workers": self.num_workers} | options[self.kind]
        if self.kind == "unbatched":
            chosen["dataset"] = Fetched()
        return DataLoader(**chosen)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(9) if self.kind == "stream" else Numbers(), batch_size=4)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        trainer: Any = self.trainer
        if not trainer.sanity_checking:
            stage, epoch = trainer.state.stage.value, trainer.current_epoch
            indices, values = batch[0][:, 0].int().tolist(), float(batch[0][:, 1:].double().sum())
            with open(self.log_dir / f"{trainer.global_rank}", "a") as file:
                print(stage, epoch, *indices, values, file=file)
            if stage == "train" and os.environ.get("STOP_AT") == str(trainer.global_step):
                os.kill(os.getpid(), signal.SIGTERM)
        return batch


class Fetched(Numbers):
    """Returns whole batches, for a dataloader with ``batch_size=None``."""

    def __getitem__(self, index: Any) -> Any:
        samples = [super(Fetched, self).__getitem__(i) for i in index]
        return tuple(torch.stack(part) for part in zip(*samples, strict=True))
