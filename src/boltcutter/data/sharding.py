"""Shard, seed and resume data loaders that were not created by Boltcutter's data modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from boltcutter.data.seeding import draw_indices, hash64, seed_generators
from boltcutter.data.stream import Stream
from boltcutter.protocols import data_parallel, is_sharded


def shard_loaders(trainer: L.Trainer, seed: int) -> None:
    """Make ``trainer`` shard every loader that is not sharded yet.

    The samplers of Lightning repeat samples in validation and test, shuffle loaders that are not shuffled, and draw
    weighted samples from a different generator on each rank, so that ranks overlap.
    """
    connector, loaders = trainer._accelerator_connector, trainer._data_connector
    preparation = LoaderPreparation(
        trainer, seed, loaders._prepare_dataloader, enabled=connector.use_distributed_sampler
    )
    connector.use_distributed_sampler = False
    loaders._prepare_dataloader = preparation  # type: ignore[method-assign, assignment]


class LoaderPreparation:
    """Prepares each loader before Lightning uses it.

    Args:
        trainer: Trainer that uses the loaders.
        seed: Seed of the order of training samples, together with the epoch.
        prepare: Lightning's own preparation, which is used for prediction.
        enabled: Whether loaders are sharded; ``trainer.use_distributed_sampler``.
    """

    def __init__(self, trainer: L.Trainer, seed: int, prepare: Callable[..., Any], *, enabled: bool) -> None:
        self.trainer, self.seed, self.prepare, self.enabled = trainer, seed, prepare, enabled
        self._group: Any = None
        self._printed: set[str] = set()

    def __call__(self, loader: Any, shuffle: bool, mode: RunningStage) -> Any:
        """Return the loader, or a replacement that yields this rank's samples."""
        if mode == RunningStage.PREDICTING:
            # Lightning creates a copy that tracks indices for writers, which fails for DataLoader(dataset, 4).
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
            copies = self.trainer.world_size > 1 or any(isinstance(c, BasePredictionWriter) for c in callbacks)
            if copies:
                return self.prepare(loader, shuffle=shuffle, mode=mode)
        if is_sharded(loader):
            return loader
        world_size, rank = data_parallel(self.trainer.strategy)
        training = mode == RunningStage.TRAINING
        if not self.enabled and world_size > 1:
            self._print_once(
                f"trainer.use_distributed_sampler=false: {mode.dataloader_prefix}_dataloader is not sharded"
            )
            rank, world_size = 0, 1
        epoch, done = epoch_position(self.trainer) if training else (0, 0)
        seed = self.seed if training else hash64(self.seed, *str(mode.dataloader_prefix).encode())
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            return shard_loader(
                loader,
                seed=seed,
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
            self._print_once(
                f"train_dataloader: a stream ({type(getattr(loader, 'dataset', loader)).__name__}) has no random "
                "access: resuming within an epoch reads the finished batches again and skips them, and is exact if "
                "the stream is deterministic"
            )
        stream = Stream(loader, seed=seed, rank=rank, world_size=world_size, training=training, group=self._groups)
        stream.epoch, stream.start = epoch, done
        return stream

    def _groups(self) -> Any:
        """Return the process group for communication on the host; on the device, each batch would wait for the last."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def _cycles(self) -> bool:
        """Return whether shorter loaders are cycled until the longest ends; known once all loaders are prepared."""
        combined: Any = self.trainer.fit_loop._combined_loader
        return getattr(combined, "_mode", None) == "max_size_cycle"

    def _print_once(self, text: str) -> None:
        if self.trainer.is_global_zero and text not in self._printed:
            self._printed.add(text)
            print(f"data: {text}")


def epoch_position(trainer: L.Trainer) -> tuple[int, int]:
    """Return the epoch and the number of its finished batches, as restored or as in the checkpoint to be restored."""
    loop: Any = trainer.fit_loop
    # If a scheduler needs the number of steps, Lightning prepares the loader before it restores the loops.
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
    """Copy a loader of a map-style dataset so that it yields one rank's samples, in an order known to all ranks.

    Args:
        loader: Loader with any sampler or batch sampler; distributed samplers are not sharded again.
        seed: Seed of the order and the randomness of samples, together with the epoch.
        rank: Rank of this process.
        world_size: Number of ranks.
        training: Whether all ranks get the same number of samples, by repeating at most ``world_size - 1``.
            Otherwise each sample is yielded exactly once.
        epoch: The next epoch.
        done: Number of finished batches of this epoch.
        cycles: Returns whether the loader is cycled, so that ``done`` may exceed its length.
    """
    if is_sharded(loader.dataset) or has_distributed_sampler(loader):
        rank, world_size = 0, 1
    settings: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size, "training": training}
    copied, batches = copy.copy(loader), loader.batch_sampler
    changed: dict[str, Any] = {"_iterator": None}
    if batches is None:
        sampler = changed["sampler"] = RankSampler(loader.sampler, **settings)
    elif type(batches) is BatchSampler:
        sampler = changed["sampler"] = RankSampler(batches.sampler, **settings)
        changed["batch_sampler"] = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    else:  # a custom batch sampler: shard its batches, not its samples
        sampler = changed["batch_sampler"] = RankSampler(batches, **settings)
    sampler.epoch = epoch
    name = "sampler" if batches is None else "batch_sampler"
    changed[name] = SeededBatchSampler(changed[name], sampler, done, in_process=not loader.num_workers, cycles=cycles)
    vars(copied).update(changed)  # DataLoader does not allow setting these attributes
    return copied


def has_distributed_sampler(loader: DataLoader[Any]) -> bool:
    """Return whether the sampler or batch sampler is a distributed one."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return any(
        isinstance(s, DistributedSampler) or (hasattr(s, "num_replicas") and hasattr(s, "rank")) for s in samplers
    )


class RankSampler(Sampler[Any]):
    """One rank's shard of the samples or batches of another sampler.

    All ranks draw the same order, with generators seeded by (seed, epoch), and take every ``world_size``-th entry.

    Args:
        sampler: Sampler of all samples or batches.
        seed: Seed of the order, together with the epoch.
        rank: Rank of this process.
        world_size: Number of ranks.
        training: Whether the first entries are repeated until all ranks have the same number.
    """

    def __init__(self, sampler: Any, *, seed: int, rank: int, world_size: int, training: bool) -> None:
        self.source, self.seed, self.rank, self.world_size = sampler, seed, rank, world_size
        self.training = training
        self.epoch = 0
        self.start = 0  # number of this rank's entries to skip in the next epoch
        for name in ("batch_size", "drop_last"):  # attributes of a batch sampler
            if hasattr(sampler, name):
                setattr(self, name, getattr(sampler, name))

    @property
    def sampler(self) -> RankSampler:
        """The object on which Lightning calls ``set_epoch`` if this is a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order of training depends."""
        self.epoch = epoch if self.training else 0

    def __len__(self) -> int:
        length = len(self.source)
        if self.training or length < self.world_size:
            return -(-length // self.world_size)
        return len(range(self.rank, length, self.world_size))

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        if sized_len(self.source) is None:  # it may be infinite
            return islice(iter(self.source), self.rank + start * self.world_size, None, self.world_size)
        drawn = draw_indices(self.source, self.seed, self.epoch)
        missing = -len(drawn) % self.world_size if self.training or len(drawn) < self.world_size else 0
        while missing and drawn:  # there may be fewer entries than ranks
            drawn += drawn[:missing]
            missing = -len(drawn) % self.world_size
        return iter(drawn[self.rank :: self.world_size][start:])


class SeededBatchSampler(Sampler[list[Any]]):
    """Seeds all generators before each batch, in the process that reads the samples.

    Random augmentation is then independent of previous batches, and of the number of workers.

    Args:
        batches: Batch sampler.
        sampler: Sampler that holds the epoch.
        done: Number of finished batches of the next epoch, to be skipped.
        in_process: Whether this process reads the samples, not a worker.
        cycles: Returns whether the loader is cycled, so that ``done`` may exceed its length.
    """

    def __init__(
        self, batches: Any, sampler: RankSampler, done: int, *, in_process: bool, cycles: Callable[[], bool] = bool
    ) -> None:
        self.batches, self.sampler, self.done, self.in_process, self.cycles = batches, sampler, done, in_process, cycles
        self.batch_size, self.drop_last = getattr(batches, "batch_size", None), getattr(batches, "drop_last", False)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order depends."""
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
            if self.in_process:
                seed_generators(*key)
            yield SeededBatch(batch, key) if not self.in_process and isinstance(batch, (list, tuple)) else batch


class SeededBatch(list[Any]):
    """Indices of a batch; iterating over them, in order to read the samples, first seeds all generators.

    Args:
        indices: Indices of the samples.
        key: Integers from which the seed is computed.
    """

    def __init__(self, indices: Iterable[Any], key: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        seed_generators(*self.key)
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededBatch, (self[:], self.key)
