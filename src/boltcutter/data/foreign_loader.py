"""Shard, seed and resume data loaders that were not created by Boltcutter's data modules."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from boltcutter.data.draws import SamplerChanges, draw_groups, draws_at_once
from boltcutter.data.generators import can_be_seeded, find_generators
from boltcutter.data.sampler import MAX_READ_AHEAD, EpochState
from boltcutter.data.seeding import SampleSeeds, Seeded, SeedWorker
from boltcutter.data.stream import Stream
from boltcutter.data.streams import Purpose, evaluated_split
from boltcutter.internals import data_connector, data_fetcher
from boltcutter.protocols import data_parallel, is_sharded

RANK_NAMES = {"get_rank", "get_world_size", "global_rank", "RANK", "LOCAL_RANK"}  # in code that may shard


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
        self._positions: dict[Any, tuple[Any, list[EpochState]]] = {}  # by loop: its loaders, and those that follow
        self._generators: dict[tuple[str, int], Any] = {}

    def __call__(self, loader: Any, shuffle: bool, mode: RunningStage) -> Any:
        """Return the loader, or a replacement that yields this rank's samples."""
        before = self._before(mode)
        number = len(before)
        if mode == RunningStage.PREDICTING:
            # Lightning creates a copy that tracks indices for writers, which fails for DataLoader(dataset, 4).
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
            if self.trainer.world_size > 1 or any(isinstance(c, BasePredictionWriter) for c in callbacks):
                return self.prepare(loader, shuffle=shuffle, mode=mode)
        if is_sharded(loader):
            own = getattr(loader, "epoch_sampler", None)
            before.append(own if isinstance(own, EpochState) else EpochState())
            before[-1].loader_number = number
            return loader
        samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
        if isinstance(loader, Stream | StatefulLoader) or any(isinstance(s, RankBatches) for s in samplers):
            return loader  # it was prepared before, as the user has kept the object
        world_size, rank = data_parallel(self.trainer.strategy)
        training = mode == RunningStage.TRAINING
        name = f"{mode.dataloader_prefix}_dataloader"
        if not self.enabled and world_size > 1:
            self._print_once(f"trainer.use_distributed_sampler=false: {name} is not sharded")
            rank, world_size = 0, 1
        stage = "train" if training else evaluated_split(self.trainer)
        place: dict[str, Any] = {"seed": self.seed, "stage": stage, "loader_number": number}
        place |= {"rank": rank, "world_size": world_size, "training": training}
        self._report_unseedable(loader, name)
        prepared: Any
        position: EpochState
        is_stream = not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
        if not is_stream:
            prepared, position = shard_loader(loader, shared=self._shared(loader, stage, number), **place)
            if world_size > 1 and (owner := next((s for s in samplers if asks_for_rank(s)), None)):
                self._print_once(
                    f"{name}: {type(owner).__name__} asks for the rank of its process, but its samples are divided "
                    "over the ranks; if it has divided them already, set is_sharded=True on the loader"
                )
        else:
            prepared = position = Stream(loader, **place)
            if is_stateful(loader) and world_size == 1:
                if position.workers_repeat():
                    raise ValueError(position.repeats_message(name) + "; a loader with a state cannot be sharded here")
                before.append(position)
                if not training:
                    return loader
                return StatefulLoader(loader, self.trainer, position)
            if position.workers_repeat():
                self._print_once(position.repeats_message(name) + "; each one skips those of the others")
        before.append(position)
        if training:
            position.epoch, position.start = epoch_position(self.trainer)
            position.seed_workers()
            if isinstance(position, RankBatches):
                position.restore(saved_states(self.trainer))
                position.repeats = partial(_repeats, self.trainer.fit_loop)
            if is_stream:
                self._print_once(
                    f"train_dataloader: a stream ({type(getattr(loader, 'dataset', loader)).__name__}) has no random "
                    "access: resuming within an epoch reads the finished batches again and skips them, and is exact if "
                    "the stream is deterministic"
                )
        return prepared

    def _before(self, mode: RunningStage) -> list[EpochState]:
        """Positions of the loaders of a stage that were prepared before this one."""
        trainer: Any = self.trainer
        of_stage = {RunningStage.TRAINING: trainer.fit_loop, RunningStage.TESTING: trainer.test_loop}
        of_stage |= {RunningStage.PREDICTING: trainer.predict_loop, RunningStage.VALIDATING: trainer.validate_loop}
        fitting = trainer.state.fn == "fit" and mode != RunningStage.TRAINING
        loop = trainer.fit_loop.epoch_loop.val_loop if fitting else of_stage[mode]
        # The loop gets the loaders when all of them are prepared, and reads them before it asks for others.
        before, positions = self._positions.get(loop, (None, []))
        if before is not loop._combined_loader or any(position.used for position in positions):
            positions = []
        self._positions[loop] = loop._combined_loader, positions
        return positions

    def _shared(self, loader: DataLoader[Any], stage: str, number: int) -> int:
        """Number of loaders of the stage before this one that use the same generator."""
        generator = getattr(loader.sampler, "generator", None)
        self._generators[stage, number] = generator
        if generator is None:
            return 0
        return sum(self._generators.get((stage, other)) is generator for other in range(number))

    def _report_unseedable(self, loader: Any, name: str) -> None:
        parts = (getattr(loader, part, None) for part in ("dataset", "collate_fn", "sampler", "batch_sampler"))
        for generator in find_generators(*parts):
            if not can_be_seeded(generator):
                self._print_once(
                    f"{name}: {type(generator).__name__} cannot be seeded, so what it draws cannot be reproduced; use "
                    "random.Random"
                )

    def _print_once(self, text: str) -> None:
        if self.trainer.is_global_zero and text not in self._printed:
            self._printed.add(text)
            print(f"data: {text}")


def asks_for_rank(sampler: Any) -> bool:
    """Whether the code of a sampler that is not one of torch's refers to ranks."""
    kinds = [kind for kind in type(sampler).__mro__ if not kind.__module__.startswith(("torch", "builtins", "typing"))]
    codes = [value.__code__ for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)]
    return any(RANK_NAMES & {*code.co_names, *(text for text in code.co_consts if type(text) is str)} for code in codes)


def epoch_position(trainer: L.Trainer) -> tuple[int, int]:
    """Return the epoch and the number of its finished batches, as restored or as in the checkpoint to be restored.

    Of an epoch that is finished, it is the next one: workers read ahead before Lightning sets the epoch. What this
    process has trained itself, such as a trial of BatchSizeFinder, is no position.
    """
    loop: Any = trainer.fit_loop
    saved = (trainer._checkpoint_connector._loaded_checkpoint or {}).get("loops", {}).get("fit_loop")
    if saved:
        batches, epochs = saved["epoch_loop.batch_progress"], saved["epoch_progress"]["current"]
        done, last, epoch, begun = (
            batches["current"]["processed"],
            batches["is_last_batch"],
            epochs["processed"],
            epochs["ready"],
        )
    else:
        progress, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.current
        done, last, epoch, begun = progress.current.processed, progress.is_last_batch, epochs.processed, epochs.ready
    limit = trainer.limit_train_batches
    finished = last or (isinstance(limit, int) and done >= limit)
    if finished:
        return begun, 0
    return epoch, done if saved or loop.restarting else 0


def saved_states(trainer: L.Trainer) -> list[Any]:
    """What the loaders of training have saved in the checkpoint that was restored, or is to be."""
    if restored := trainer.fit_loop._combined_loader_states_to_load:
        return restored
    saved = (trainer._checkpoint_connector._loaded_checkpoint or {}).get("loops", {}).get("fit_loop", {})
    found: list[Any] = saved.get("state_dict", {}).get("combined_loader", [])
    return found


def _repeats(loop: Any) -> bool:
    """Whether the shorter of several loaders begins anew in an epoch."""
    return bool(loop._combined_loader._mode == "max_size_cycle")


def is_stateful(loader: Any) -> bool:
    """Whether a loader saves its position itself."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


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
    own_rank = rank
    if is_distributed or is_sharded(loader.dataset):
        rank, world_size = 0, 1
    owners = (loader.dataset, loader.collate_fn)
    sampler = RankBatches(
        loader.sampler if batches is None else batches,
        rank=rank,
        world_size=world_size,
        own_rank=own_rank,
        is_grouped=type(batches) is BatchSampler,
        in_process=not loader.num_workers,
        ahead=loader.num_workers * (loader.prefetch_factor or 0),
        seed_samples=SampleSeeds(*owners),
        **settings,
    )
    copied = copy.copy(loader)
    # DataLoader does not allow setting these attributes.
    replaced: dict[str, Any] = {"_iterator": None, "sampler" if batches is None else "batch_sampler": sampler}
    # What the loader itself would save, such as a StatefulDataLoader, would skip finished batches once more.
    replaced |= {"state_dict": sampler.state_dict, "load_state_dict": sampler.load_state_dict}
    if loader.num_workers:
        replaced["worker_init_fn"] = SeedWorker(loader.worker_init_fn, sampler, *owners)
        replaced["generator"] = sampler.worker_seeds = torch.Generator()
        sampler.seed_workers()
    vars(copied).update(replaced)
    return copied, sampler


class StatefulLoader:
    """A loader that saves its position itself; checkpoints have that of the next batch to train on.

    A checkpoint may be saved after batches that follow were fetched, which a resumed run has to fetch again.
    """

    def __init__(self, loader: Any, trainer: L.Trainer, position: Stream) -> None:
        self.loader, self.trainer, self.load_state_dict = loader, trainer, loader.load_state_dict
        self.position = position
        self._states: deque[Any] = deque(maxlen=3)  # after each of the latest batches

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet set while this object is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._states.append(copy.deepcopy(self.loader.state_dict()))
        self.position.epoch, first = epoch_position(self.trainer)
        for batch in self.position.read(self.loader, first):
            self._states.append(copy.deepcopy(self.loader.state_dict()))
            yield batch

    def state_dict(self) -> Any:
        """Return the position before the batches that are fetched but not trained on."""
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        fetcher = data_fetcher(self.trainer)  # None after training
        ahead = fetcher.fetched - progress.processed if fetcher else 0
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
        is_grouped: Whether to shard the samples of ``source``, torch's ``BatchSampler``, before they are grouped, by
            the batch size that it has when an epoch begins.
        stage: ``train``, ``val``, ``test`` or ``predict``.
        loader_number: Number of the loader, among several of the stage.
        shared: Number of loaders before this one that use the same generator.
        own_rank: Rank of this process also where the sampler has sharded the samples already.
        repeats: Returns whether the batches begin anew in an epoch, as of the shorter of several loaders.
        in_process: Whether this process reads the samples, not a worker.
        ahead: Number of batches that workers are asked for in advance.
        seed_samples: Seeds what draws random numbers for samples in this process.
    """

    source: Any
    _: KW_ONLY
    seed: int
    rank: int
    world_size: int
    training: bool
    is_grouped: bool = False
    stage: str = "train"
    loader_number: int = 0
    shared: int = 0
    own_rank: int | None = None
    in_process: bool = True
    ahead: int = 0
    repeats: Callable[[], bool] = bool
    seed_samples: SampleSeeds = field(default_factory=SampleSeeds)

    def __post_init__(self) -> None:
        self.batches = self.source if self.is_grouped else None
        self.source = self.source.sampler if self.batches is not None else self.source
        self.follows_epochs = self.training
        self._recorded: deque[tuple[int, list[Any]]] = deque(maxlen=self.ahead + 2)
        self.recent = deque(maxlen=self.ahead + 2 + MAX_READ_AHEAD)
        self._saved: dict[str, Any] = {}
        self._told: int | None = None  # the epoch that the sampler was called with
        self.changes = SamplerChanges(self.source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("source", "batches"):  # not yet set while this object is copied
            raise AttributeError(name)
        return getattr(self.source if self.batches is None else self.batches, name)

    @property
    def batch_size(self) -> Any:
        """Batch size of the loader, which may change; that of the next epoch counts."""
        return getattr(self.source if self.batches is None else self.batches, "batch_size", None)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        (self.source if self.batches is None else self.batches).batch_size = size

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out."""
        return bool(getattr(self.source if self.batches is None else self.batches, "drop_last", False))

    @property
    def entries_per_batch(self) -> int:
        """Entries of ``source`` in a batch of one rank."""
        return 1 if self.batches is None else int(self.batches.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next; Lightning has called the same of the loader's sampler, if it has one."""
        super().set_epoch(epoch)
        self._told = epoch if self.batches is not None else None

    def __len__(self) -> int:
        length, size = len(self.source), self.entries_per_batch
        if self.training or length < self.world_size:
            length = -(-length // self.world_size)
        else:
            length = len(range(self.rank, length, self.world_size))
        return length // size if self.drop_last else -(-length // size)

    def __iter__(self) -> Iterator[Any]:
        first, self.start, self.used = self.start, 0, True
        saved, self._saved = self._saved, {}
        size = self._size = int(saved.get("entries", self.entries_per_batch))
        if first and self.repeats() and sized_len(self):
            first %= len(self)
        self._recorded.clear()
        self.changes.begin()
        place = self.place | {"shared": self.shared, "sampler_epoch": self.sampler_epoch}
        place["is_told"] = self._told == (self.epoch if self.sampler_epoch is None else self.sampler_epoch)
        self._told = None
        groups = draw_groups(self.source, size * self.world_size, seed=self.seed, **place)
        rank = self.rank if self.own_rank is None else self.own_rank
        drawn_before = dict(saved.get("drawn", ()))
        for number, group in enumerate(groups):
            self.changes.end()
            if number < first:
                continue
            if self.training and not draws_at_once(self.source):
                group = drawn_before.get(number, group)
                self._recorded.append((number, group))
            entries = self._of_rank(group, padded=self.training or (not number and len(group) < self.world_size))
            if not entries or (self.drop_last and len(entries) < size):
                return
            batch = entries if self.batches is not None else entries[0]
            if self.recent is not None:
                self.recent.append((number, 1, entries if batch is entries else entries[:1]))
            key = self.stream(Purpose.SAMPLES, position=number, rank=rank)
            if self.in_process:
                self.seed_samples(key)
            yield batch if self.in_process else Seeded(batch, key)

    def _of_rank(self, group: list[Any], *, padded: bool) -> list[Any]:
        """This rank's entries of those that all ranks have together."""
        if padded and len(group) % self.world_size:
            group = (group * self.world_size)[: len(group) + -len(group) % self.world_size]
        return group[self.rank :: self.world_size]

    def state_dict(self) -> dict[str, Any]:
        """The batch size of the epoch, and what a sampler that follows training has drawn in advance, or draws with."""
        drawn = [(number, group) for number, group in self._recorded if _is_plain(group)]
        size = getattr(self, "_size", self.entries_per_batch)
        return {"loader": self.loader_number, "entries": size, "drawn": drawn, "changes": self.changes.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: ``restore`` does it before, as Lightning forgets the states of loaders that it has asked for."""

    def restore(self, states: Sequence[Any]) -> None:
        """Continue the epoch of a checkpoint."""
        found = (s for s in states if isinstance(s, dict) and s.get("loader") == self.loader_number and "drawn" in s)
        saved = next(found, {})
        self.changes.restore(saved.get("changes"), within_epoch=bool(self.start))
        if self.start:
            self._saved = saved


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint can have a value."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in (int, str, bool, float)
