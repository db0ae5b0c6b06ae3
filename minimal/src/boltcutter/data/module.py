"""What all data sets share: loaders that show each sample once, and the position that a checkpoint keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset

from boltcutter.data.sampler import BatchSampler

KEPT = ("epoch", "seed", "batch_size", "length")


class DataModule(L.LightningDataModule, ABC):
    """Three splits behind exact loaders; a subclass writes ``load``, and tells ``shape`` and ``outputs`` in its YAML.

    Args:
        batch_size: Samples in one step over all devices.
        seed: What split and order depend on.
        workers: Processes for each device that prepare batches; 0 prepares them in the training process.
    """

    def __init__(self, *, batch_size: int, seed: int, workers: int) -> None:
        super().__init__()
        if workers < 0:
            raise ValueError(f"data.workers={workers} is not a number of processes; try 0")
        self.batch_size, self.seed, self.workers = batch_size, seed, workers
        self.splits: dict[str, Any] = {}
        self._order: BatchSampler | None = None
        self._resumed: dict[str, int] = {}

    @abstractmethod
    def load(self) -> dict[str, Dataset[Any]]:
        """Read the data, and split it into ``train``, ``val`` and ``test``; called once in each process."""

    def setup(self, stage: str) -> None:
        """Load once, whatever the stage."""
        self.splits = self.splits or self.load()

    def train_dataloader(self) -> Loader:
        """A new order in each epoch, from where a checkpoint has left it; never another order than it has had."""
        loader, then = self._loader("train"), self._resumed
        self._order = loader.order
        for name in KEPT[1:] if then else ():
            if then[name] != getattr(self._order, name):
                raise ValueError(f"data.{name}={getattr(self._order, name)}: the run has had {then[name]}; set it back")
        if then and then["done"] < len(self._order):
            self._order.epoch, self._order.start = then["epoch"], then["done"]
        return loader

    def val_dataloader(self) -> Loader:
        """Each sample once."""
        return self._loader("val")

    def test_dataloader(self) -> Loader:
        """Each sample once."""
        return self._loader("test")

    def state_dict(self) -> dict[str, Any]:
        """Which batches of which order are done: counted as they are trained on, not as workers prepare them."""
        trainer: Any = self.trainer
        done = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return {"done": done, **{name: getattr(self._order, name) for name in KEPT}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._resumed = state_dict

    def _loader(self, split: str) -> Loader:
        ranks = getattr(self.trainer and self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        rank, count = ranks.get("rank", 0), ranks.get("num_replicas", 1)
        options: Any = {"seed": self.seed, "rank": rank, "ranks": count, "shuffle": split == "train"}
        samples = self.splits[split]
        return Loader(samples, BatchSampler(len(samples), self.batch_size, **options), self.workers)


class Loader(DataLoader[Any]):
    """Batches of a data set in a given order."""

    def __init__(self, samples: Dataset[Any], order: BatchSampler, workers: int) -> None:
        super().__init__(samples, batch_sampler=order, num_workers=workers, persistent_workers=workers > 0)
        self.order = order

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()  # a generator, since Lightning asks for the iterator before it sets the epoch
