"""Shard, seed and resume data loaders that were not created by Boltcutter's data modules."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from boltcutter.data.sampler import EpochState
from boltcutter.data.seeding import draw_indices, hash64, seed_generators
from boltcutter.internals import data_connector, data_fetcher
from boltcutter.protocols import data_parallel, is_sharded
from boltcutter_data.stream import Stream


class LoaderPreparation:
    """Prepares each loader before Lightning uses it: shards those that are not sharded yet.

    The samplers of Lightning repeat samples in validation and test, shuffle loaders that are not shuffled, and draw
    weighted samples from a different generator on each rank, so that ranks overlap.
    """

    def __init__(self, trainer: L.Trainer, seed: int) -> None:
        self.trainer, self.seed = trainer, seed
        self.prepare: Callable[..., Any] = data_connector(trainer)._prepare_dataloader  # Lightning's own
        connector: Any = trainer._accelerator_connector  # a trainer reads the setting only when it is built
        self.enabled, connector.use_distributed_sampler = bool(connector.use_distributed_sampler), False
        self._printed: set[str] = set()

    def __call__(self, loader: Any, shuffle: bool, mode: RunningStage) -> Any:
        """Return the loader, or a replacement that yields this rank's samples."""
        if mode == RunningStage.PREDICTING:
            # Lightning creates a copy that tracks indices for writers, which fails for DataLoader(dataset, 4).
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
            if self.trainer.world_size > 1 or any(isinstance(c, BasePredictionWriter) for c in callbacks):
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
        seed = self.seed if training else hash64(self.seed, *str(mode.dataloader_prefix).encode())
        shard: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size, "training": training}
        prepared: Any
        position: EpochState
        is_stream = not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
        if not is_stream:
            prepared, position = shard_loader(loader, **shard)
        elif world_size == 1 and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return StatefulLoader(loader, self.trainer) if training else loader
        else:
            prepared = position = Stream(loader, **shard)
        if training:
            position.epoch, position.start = epoch_position(self.trainer)
            if isinstance(position, RankBatches):
                fit_loop: Any = self.trainer.fit_loop
                position.repeats = lambda: bool(fit_loop._combined_loader._mode == "max_size_cycle")
            if is_stream:
                self._print_once(
                    f"train_dataloader: a stream ({type(getattr(loader, 'dataset', loader)).__name__}) has no random "
                    "access: resuming within an epoch reads the finished batches again and skips them, and is exact if "
                    "the stream is deterministic"
                )
        return prepared

    def _print_once(self, text: str) -> None:
        if self.trainer.is_global_zero and text not in self._printed:
            self._printed.add(text)
            print(f"data: {text}")


def epoch_position(trainer: L.Trainer) -> tuple[int, int]:
    """Return the epoch and the number of its finished batches, as restored or as in the checkpoint to be restored."""
    loop: Any = trainer.fit_loop
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
    loader: DataLoader[Any], *, rank: int, world_size: int, **settings: Any
) -> tuple[DataLoader[Any], RankBatches]:
    """Copy a loader of a map-style dataset so that it yields one rank's batches.

    Returns:
        The copy, and its batch sampler, which holds the epoch and the position.
    """
    batches = loader.batch_sampler
    samplers = [loader.sampler, batches, getattr(batches, "sampler", None)]
    is_distributed = any(
        isinstance(s, DistributedSampler) or (hasattr(s, "num_replicas") and hasattr(s, "rank")) for s in samplers
    )
    if is_distributed or is_sharded(loader.dataset):
        rank, world_size = 0, 1
    sampler = RankBatches(
        loader.sampler if batches is None else batches,
        rank=rank,
        world_size=world_size,
        is_grouped=type(batches) is BatchSampler,
        in_process=not loader.num_workers,
        **settings,
    )
    copied = copy.copy(loader)
    # DataLoader does not allow setting these attributes.
    replaced = {"_iterator": None, "sampler" if batches is None else "batch_sampler": sampler}
    vars(copied).update(replaced, state_dict=None)  # or a loader with a state would skip finished batches once more
    return copied, sampler


class StatefulLoader:
    """A loader that saves its position itself; checkpoints have that of the next batch to train on.

    A checkpoint may be saved after batches that follow were fetched, which a resumed run has to fetch again.
    """

    def __init__(self, loader: Any, trainer: L.Trainer) -> None:
        self.loader, self.trainer, self.load_state_dict = loader, trainer, loader.load_state_dict
        self._states: deque[Any] = deque(maxlen=3)  # after each of the latest batches

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._states.append(copy.deepcopy(self.loader.state_dict()))
        for batch in self.loader:
            self._states.append(copy.deepcopy(self.loader.state_dict()))
            yield batch

    def state_dict(self) -> Any:
        """Return the position before the batches that are fetched but not trained on."""
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        ahead = data_fetcher(self.trainer).fetched - progress.processed
        return self._states[-1 - ahead] if ahead else copy.deepcopy(self.loader.state_dict())


@dataclass(eq=False)
class RankBatches(EpochState, Sampler[Any]):
    """One rank's batches of the samples of another sampler, or of the batches of a custom batch sampler.

    All ranks draw the same order, with generators seeded by (seed, epoch), and take every ``world_size``-th entry. All
    generators are seeded before each batch, in the process that reads the samples, so that random augmentation does not
    depend on previous batches and the number of workers.

    Args:
        source: The sampler, or batch sampler.
        seed: Seed of the order and the randomness of samples, together with the epoch.
        rank: Rank of this process.
        world_size: Number of ranks.
        training: Whether all ranks get the same number of entries, by repeating at most ``world_size - 1``.
            Otherwise each is yielded exactly once.
        is_grouped: Whether to shard the samples of ``source``, torch's ``BatchSampler``, before they are grouped.
        repeats: Returns whether the batches begin anew in an epoch, as of the shorter of several loaders.
        in_process: Whether this process reads the samples, not a worker.
    """

    source: Any
    _: KW_ONLY
    seed: int
    rank: int
    world_size: int
    training: bool
    is_grouped: bool = False
    in_process: bool = True
    repeats: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.batch_size = getattr(self.source, "batch_size", None)
        self.drop_last = getattr(self.source, "drop_last", False)
        self.entries_per_batch = int(self.source.batch_size) if self.is_grouped else 1
        self.source = self.source.sampler if self.is_grouped else self.source
        self.follows_epochs = self.training

    def __len__(self) -> int:
        length, size = len(self.source), self.entries_per_batch
        if self.training or length < self.world_size:
            length = -(-length // self.world_size)
        else:
            length = len(range(self.rank, length, self.world_size))
        return length // size if self.drop_last else -(-length // size)

    def __iter__(self) -> Iterator[Any]:
        first, self.start = self.start, 0
        if first and self.repeats() and sized_len(self):
            first %= len(self)
        entries = self._shard(first * self.entries_per_batch)
        batches = BatchSampler(entries, self.entries_per_batch, self.drop_last) if self.is_grouped else entries
        for number, batch in enumerate(batches, first):
            key = (self.seed, self.epoch, number, self.rank)
            if self.in_process:
                seed_generators(*key)
            yield SeededBatch(batch, key) if not self.in_process and isinstance(batch, (list, tuple)) else batch

    def _shard(self, start: int) -> Iterator[Any]:
        """This rank's entries of ``source``, from ``start``."""
        if sized_len(self.source) is None:  # it may be infinite
            return islice(iter(self.source), self.rank + start * self.world_size, None, self.world_size)
        drawn = draw_indices(self.source, self.seed, self.epoch)
        missing = -len(drawn) % self.world_size if self.training or len(drawn) < self.world_size else 0
        while missing and drawn:  # there may be fewer entries than ranks
            drawn += drawn[:missing]
            missing = -len(drawn) % self.world_size
        return iter(drawn[self.rank :: self.world_size][start:])


class SeededBatch(list[Any]):
    """Indices of a batch; iterating over them, in order to read the samples, first seeds all generators."""

    def __init__(self, indices: Iterable[Any], key: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        seed_generators(*self.key)
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededBatch, (self[:], self.key)
