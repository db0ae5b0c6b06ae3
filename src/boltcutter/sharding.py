"""Loaders that Boltcutter's data modules did not make: sharded over ranks, reproducible, and resumed in mid-epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from boltcutter.seeding import draw_indices, seed_generators
from boltcutter.stream import Stream


class Sharded(Protocol):
    """A loader, or the data set of one, that yields the samples of its own rank alone: it is used as it is."""

    is_sharded: bool


def shard_loaders(trainer: L.Trainer, seed: int) -> None:
    """Have ``trainer`` shard every loader that does not do so itself.

    Lightning's own samplers repeat samples in validation and test, shuffle what was not to be shuffled, and let each
    rank draw weighted samples from its own generator, so that ranks overlap.
    """
    connector, loaders = trainer._accelerator_connector, trainer._data_connector
    preparation = LoaderPreparation(
        trainer, seed, loaders._prepare_dataloader, enabled=connector.use_distributed_sampler
    )
    connector.use_distributed_sampler = False
    loaders._prepare_dataloader = preparation  # type: ignore[method-assign, assignment]


class LoaderPreparation:
    """What Lightning calls with each loader that it is about to use.

    Args:
        trainer: Whose loaders they are.
        seed: What the order of training samples depends on, with the epoch.
        otherwise: Lightning's own preparation, for prediction.
        enabled: Whether loaders are sharded; ``trainer.use_distributed_sampler``.
    """

    def __init__(self, trainer: L.Trainer, seed: int, otherwise: Callable[..., Any], *, enabled: bool) -> None:
        self.trainer, self.seed, self.otherwise, self.enabled = trainer, seed, otherwise, enabled
        self._group: Any = None
        self._stated: set[str] = set()

    def __call__(self, loader: Any, shuffle: bool, mode: RunningStage) -> Any:
        """The loader, or one in its place with this rank's samples."""
        if mode == RunningStage.PREDICTING:
            # Lightning makes a copy that notes indices for writers, which fails for DataLoader(dataset, 4).
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
            copies = self.trainer.world_size > 1 or any(isinstance(c, BasePredictionWriter) for c in callbacks)
            return self.otherwise(loader, shuffle=shuffle, mode=mode) if copies else loader
        if getattr(loader, "is_sharded", False):
            return loader
        ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        rank, world_size = ranks.get("rank", 0), ranks.get("num_replicas", 1)
        training = mode == RunningStage.TRAINING
        if not training and world_size == 1:
            return loader
        if not self.enabled and world_size > 1:
            self._state(f"trainer.use_distributed_sampler=false: {mode.dataloader_prefix}_dataloader is not sharded")
            rank, world_size = 0, 1
        epoch, done = epoch_position(self.trainer) if training else (0, 0)
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            return shard_loader(
                loader,
                seed=self.seed,
                rank=rank,
                world_size=world_size,
                training=training,
                epoch=epoch,
                done=done,
                cycles=self._cycles,
            )
        if world_size == 1 and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return loader  # Lightning saves and restores its position
        if training:
            self._state(
                f"train_dataloader: a stream ({type(getattr(loader, 'dataset', loader)).__name__}) cannot be entered "
                "in its middle: a resume in mid-epoch reads the finished batches again and drops them, and is exact "
                "if the stream yields the same each time"
            )
        stream = Stream(loader, seed=self.seed, rank=rank, world_size=world_size, training=training, group=self._groups)
        stream.epoch, stream.start = epoch, done
        return stream

    def _groups(self) -> Any:
        """Processes that agree on the host, made once: on the device, each batch would wait for the one before."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def _cycles(self) -> bool:
        """Whether a shorter loader begins again while a longer one beside it goes on; known once all are prepared."""
        combined: Any = self.trainer.fit_loop._combined_loader
        return getattr(combined, "_mode", None) == "max_size_cycle"

    def _state(self, text: str) -> None:
        if self.trainer.is_global_zero and text not in self._stated:
            self._stated.add(text)
            print(f"data: {text}")


def epoch_position(trainer: L.Trainer) -> tuple[int, int]:
    """The epoch, and how many of its batches were trained on: as restored, or as in the checkpoint to be restored."""
    loop: Any = trainer.fit_loop
    # Lightning asks for the loader before it restores the loops where a scheduler wants the number of steps.
    saved = (trainer._checkpoint_connector._loaded_checkpoint or {}).get("loops", {}).get("fit_loop")
    if saved:
        batches, epochs = saved["epoch_loop.batch_progress"], saved["epoch_progress"]
        done, last, epoch = batches["current"]["processed"], batches["is_last_batch"], epochs["current"]["processed"]
    else:
        progress = loop.epoch_loop.batch_progress
        done, last, epoch = progress.current.processed, progress.is_last_batch, loop.epoch_progress.current.processed
    limit = trainer.limit_train_batches
    finished = last or (isinstance(limit, int) and done >= limit)
    return epoch, 0 if finished else done


def shard_loader(
    loader: DataLoader[Any],
    *,
    seed: int,
    rank: int,
    world_size: int,
    training: bool,
    epoch: int = 0,
    done: int = 0,
    cycles: Callable[[], bool] = bool,
) -> DataLoader[Any]:
    """A copy of a loader of a map-style data set, with one rank's samples in an order that all ranks agree on.

    Args:
        loader: With any sampler or batch sampler; those that shard themselves are left to it.
        seed: What order and randomness of the samples depend on, with the epoch.
        rank: Of this process.
        world_size: Number of ranks.
        training: Whether all ranks get equally many samples, of which at most ``world_size - 1`` are repeated.
            Otherwise each sample comes once.
        epoch: Whose order is next.
        done: Batches of it that were trained on.
        cycles: Whether these may be more than the loader has, because it began again.
    """
    if getattr(loader.dataset, "is_sharded", False) or has_distributed_sampler(loader):
        rank, world_size = 0, 1
    settings: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size, "training": training}
    copied, batches = copy.copy(loader), loader.batch_sampler
    changed: dict[str, Any] = {"_iterator": None}
    if batches is None:
        sampler = changed["sampler"] = RankSampler(loader.sampler, **settings)
    elif type(batches) is BatchSampler:
        sampler = changed["sampler"] = RankSampler(batches.sampler, **settings)
        changed["batch_sampler"] = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    else:  # its batches cannot be made anew from other samples, but they can be dealt out
        sampler = changed["batch_sampler"] = RankSampler(batches, **settings)
    sampler.epoch = epoch
    if training:
        name = "sampler" if batches is None else "batch_sampler"
        changed[name] = SeededBatchSampler(changed[name], sampler, done, here=not loader.num_workers, cycles=cycles)
    vars(copied).update(changed)  # torch refuses plain assignment
    return copied


def has_distributed_sampler(loader: DataLoader[Any]) -> bool:
    """Whether sampler or batch sampler know the ranks."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return any(
        isinstance(s, DistributedSampler) or (hasattr(s, "num_replicas") and hasattr(s, "rank")) for s in samplers
    )


class RankSampler(Sampler[Any]):
    """One rank's part of what another sampler yields: samples, or whole batches.

    All ranks draw the same order, from generators seeded by (seed, epoch), and take every ``world_size``-th of it.

    Args:
        sampler: Of all samples or batches.
        seed: What the order depends on, with the epoch.
        rank: Of this process.
        world_size: Number of ranks.
        training: Whether the first ones are repeated until all ranks have equally many.
    """

    def __init__(self, sampler: Any, *, seed: int, rank: int, world_size: int, training: bool) -> None:
        self.source, self.seed, self.rank, self.world_size = sampler, seed, rank, world_size
        self.training = training
        self.epoch = 0
        self.start = 0  # of this rank's part to skip, once
        for name in ("batch_size", "drop_last"):  # of a batch sampler
            if hasattr(sampler, name):
                setattr(self, name, getattr(sampler, name))

    @property
    def sampler(self) -> RankSampler:
        """Where Lightning looks for ``set_epoch``, if this yields batches."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        length = len(self.source)
        if self.training or length < self.world_size:
            return -(-length // self.world_size)
        return len(range(self.rank, length, self.world_size))

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        if sized_len(self.source) is None:  # it may have no end
            return islice(iter(self.source), self.rank + start * self.world_size, None, self.world_size)
        drawn = draw_indices(self.source, self.seed, self.epoch)
        missing = -len(drawn) % self.world_size if self.training or len(drawn) < self.world_size else 0
        while missing and drawn:  # there may be fewer of them than ranks
            drawn += drawn[:missing]
            missing = -len(drawn) % self.world_size
        return iter(drawn[self.rank :: self.world_size][start:])


class SeededBatchSampler(Sampler[list[Any]]):
    """Batches before each of which all generators are seeded, in the process that reads the samples.

    Random changes of samples then depend neither on how training came to this batch nor on the number of workers.

    Args:
        batches: Sampler of batches.
        sampler: What knows the epoch.
        done: Batches of the epoch that ``sampler`` will skip, once.
        here: Whether this process reads the samples.
        cycles: Whether ``done`` may be more than there are, because they began again.
    """

    def __init__(
        self, batches: Any, sampler: RankSampler, done: int, *, here: bool, cycles: Callable[[], bool] = bool
    ) -> None:
        self.batches, self.sampler, self.done, self.here, self.cycles = batches, sampler, done, here, cycles
        self.batch_size, self.drop_last = getattr(batches, "batch_size", None), getattr(batches, "drop_last", False)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        first, self.done = self.done, 0
        sampler = self.sampler
        if first and self.cycles() and (length := sized_len(self.batches)):
            first %= length
        sampler.start = first * (self.batches.batch_size if type(self.batches) is BatchSampler else 1)
        for number, batch in enumerate(self.batches, start=first):
            key = (sampler.seed, sampler.epoch, number, sampler.rank)
            if self.here:
                seed_generators(*key)
            yield SeededBatch(batch, key) if not self.here and isinstance(batch, (list, tuple)) else batch


class SeededBatch(list[Any]):
    """Indices of a batch; whoever goes through them, to read the samples, has its generators seeded first.

    Args:
        indices: Of the samples.
        key: What the seed depends on.
    """

    def __init__(self, indices: Iterable[Any], key: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        seed_generators(*self.key)
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededBatch, (self[:], self.key)
