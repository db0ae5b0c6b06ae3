"""The order of samples stays the same from version to version, so that runs can be resumed and reproduced."""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from boltcutter.data.augment import uniform
from boltcutter.data.digits import Digits
from boltcutter.data.folds import fold_indices, split_off_groups
from boltcutter.data.hooks import shard_loaders
from boltcutter.data.module import DataModule, Splits
from boltcutter.data.permutation import permute
from boltcutter.data.sampler import LAZY_ABOVE, Batch, BatchSampler
from boltcutter.data.text import Text

FOLDS: list[dict[str, Any]] = [{}, {"num_folds": 3, "fold": 0}, {"num_folds": 3, "fold": 2}]


def digits(folder: Path, **settings: Any) -> DataModule:
    return Digits(batch_size=100, **settings)


def text(folder: Path, **settings: Any) -> DataModule:
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"document {number:02}\n" * (20 + number))
    return Text(path=str(folder), cache_dir=folder / ".cache", shape=(32,), batch_size=20, **settings)


def hash_batches(data: DataModule) -> bytes:
    """Hash of the batches of two epochs."""
    data.prepare_data()
    data.setup("fit")
    digest, epochs = hashlib.sha256(), set()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for epoch in range(2):
            loader.epoch_sampler.set_epoch(epoch)
            found = b"".join(tensor.numpy().tobytes() for batch in loader for tensor in batch)
            digest.update(found)
            epochs.add(found)
    assert len(epochs) == 3  # only train differs from epoch to epoch
    return digest.digest()


@pytest.mark.parametrize(
    ("make", "seed", "expected"),
    [
        (digits, 0, "39385b2e70283f17"),
        (digits, 1, "8c6cc0f4f3a6b5c0"),
        (digits, 2, "254dc3e85124231e"),
        (text, 0, "8c53c40575036c75"),
        (text, 1, "c8148dc80c17fde5"),
        (text, 2, "bb6a4b17ea3b5e48"),
    ],
)
def test_the_order_of_samples_stays_the_same(
    make: Callable[..., DataModule], seed: int, expected: str, tmp_path: Path
) -> None:
    found = [hash_batches(make(tmp_path, seed=seed, **fold)) for fold in FOLDS]
    assert hashlib.sha256(b"".join(found)).hexdigest()[:16] == expected


class Noisy(Dataset[Tensor]):
    """Samples of their index and random numbers of each generator."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, int(1000 * torch.rand(1)), random.randrange(1000), np.random.randint(1000)])


class Fetched(Noisy):
    """Batches, for a sampler of batches without automatic batching."""

    def __getitem__(self, index: Any) -> Tensor:
        return torch.stack([super(Fetched, self).__getitem__(i) for i in index])


class Streamed(IterableDataset[Tensor]):
    """The same as a stream; its order is random, and its shards have different lengths."""

    def __init__(self, indices: Sequence[int] = range(23)) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Tensor]:
        yield from map(Noisy().__getitem__, random.sample(self.indices, len(self.indices)))


class Divided(Streamed):
    def shard(self, num_shards: int, index: int) -> Streamed:
        return Streamed(self.indices[index::num_shards])


class Native(DataModule):
    def __init__(self, dataset: Any, sampled: bool = False, **settings: Any) -> None:
        super().__init__(batch_size=4, seed=3, **settings)
        self.dataset, self.sampled = dataset, sampled

    def load(self) -> Splits:
        return Splits(self.dataset, self.dataset)

    def sampler(self, dataset: Any) -> Sampler[int] | None:
        return RandomSampler(dataset, generator=torch.Generator().manual_seed(7)) if self.sampled else None


class Pairs(Sampler[list[int]]):
    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([2 * index, 2 * index + 1] for index in torch.randperm(11).tolist())


def native(rank: int, world_size: int, kind: str) -> Iterator[Any]:
    """Two epochs of train, and val, of a data module of the library."""
    options: Any = {"workers": {"num_workers": 2}, "sampler": {"sampled": True}}.get(kind, {})
    data = Native({"stream": Streamed, "divided": Divided}.get(kind, Noisy)(), **options)
    data.trainer = SimpleNamespace(strategy=strategy(rank, world_size))  # type: ignore[assignment]
    for split in ("train", "val"):
        loader = data.loader(split, shuffle=split == "train")
        for epoch in range(2):
            loader.epoch_sampler.set_epoch(epoch)
            yield from loader


def foreign(rank: int, world_size: int, kind: str) -> Iterator[Any]:
    """Two epochs of training and validation with a loader that the library shards and seeds."""
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    shard_loaders(trainer, 3)
    trainer._accelerator_connector.strategy = strategy(rank, world_size)
    options: dict[str, dict[str, Any]] = {
        "shuffled": {"batch_size": 4, "shuffle": True},
        "dropped": {"batch_size": 4, "shuffle": True, "drop_last": True},
        "workers": {"batch_size": 4, "shuffle": True, "num_workers": 2},
        "generator": {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(7)},
        "buckets": {"batch_sampler": Pairs()},
        "unbatched": {"batch_size": None, "shuffle": True},
        "fetched": {"batch_size": None, "sampler": TorchBatchSampler(RandomSampler(range(23)), 4, drop_last=False)},
        "stream": {"dataset": Streamed(), "batch_size": 4},
    }
    for mode in (RunningStage.TRAINING, RunningStage.VALIDATING, RunningStage.TESTING):
        made: Any = DataLoader(**{"dataset": Fetched() if kind == "fetched" else Noisy()} | options[kind])
        loader: Any = trainer._data_connector._prepare_dataloader(made, shuffle=False, mode=mode)
        for epoch in range(2):
            _set_sampler_epoch(loader, epoch)
            yield from loader


def strategy(rank: int, world_size: int) -> Any:
    return SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": world_size}, is_global_zero=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("make", "kind", "expected"),
    [
        (native, "map", "f4759bde37bd9dfa"),
        (native, "workers", "f4759bde37bd9dfa"),
        (native, "sampler", "b0aa23200bf173d7"),
        (native, "stream", "c729f899404b976d"),
        (native, "divided", "af4d89516ad2edd2"),
        (foreign, "shuffled", "bbdec74a0fe8f2ce"),
        (foreign, "dropped", "44123b4cdf8d8e8c"),
        (foreign, "workers", "bbdec74a0fe8f2ce"),
        (foreign, "generator", "65688b8e74d6e138"),
        (foreign, "buckets", "206d32628c0c0da8"),
        (foreign, "unbatched", "aa95d41c7c4a4f81"),
        (foreign, "fetched", "38b99215b0ace9e3"),  # batches that a sampler yields are not divided
        (foreign, "stream", "9020f690dd63d5bb"),
    ],
)
def test_samples_and_their_randomness_stay_the_same(make: Callable[..., Any], kind: str, expected: str) -> None:
    digest = hashlib.sha256()
    for rank, world_size in ((0, 1),) if kind == "stream" and make is foreign else ((0, 1), (0, 2), (1, 2)):
        for batch in make(rank, world_size, kind):
            digest.update(f"{batch.tolist()}".encode())
    assert digest.hexdigest()[:16] == expected


def test_a_large_permutation_stays_the_same() -> None:
    order = BatchSampler(LAZY_ABOVE + 5, 64, seed=3, shuffle=True).order
    found = np.concatenate([order(1, 0, 1000), order(2, LAZY_ABOVE - 500, LAZY_ABOVE + 5)])
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == "a7b7819e15ea3c81"


def hash_arrays(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:16]


def test_the_order_of_a_large_data_set_stays_the_same() -> None:
    """Its permutation is computed, not drawn."""
    found = [permute(np.arange(5000), 5000, seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1)]
    assert hash_arrays(*found) == "b248c98a0c2bc141"
    assert hash_arrays(*(permute(np.arange(length), length, 3, 1) for length in range(1, 60))) == "6cd9939ee4ce6614"
    assert LAZY_ABOVE == 4_194_304
    large, small = (BatchSampler(LAZY_ABOVE + more, 8, seed=7, shuffle=True) for more in (1, 0))
    assert hash_arrays(large.order(1, 0, 64)) == "776ee51ff2bbb073"
    assert hash_arrays(small.order(1, 0, 64)) == "ee9981ad65ec8dec"


def test_the_random_numbers_of_augmentation_stay_the_same() -> None:
    batches = [Batch([0, 1, 5, 10**12], seed=seed, epoch=epoch) for seed in (0, 1, 2) for epoch in (0, 1)]
    assert hash_arrays(*(uniform(batch, count) for batch in batches for count in (1, 3))) == "5797ccd99e0cbaf1"


def test_the_folds_of_groups_stay_the_same() -> None:
    samples = np.arange(0, 400, 2)
    groups, labels = np.arange(400) * 7919 % 400 // 9, np.arange(400) % 7 // 4
    for given, expected in (
        ((None, None), "777127b812f34c2c"),
        ((labels, None), "71a06762bb1cf40a"),
        ((None, groups), "8140f20a44032701"),
        ((labels, groups), "82af57429b9183ae"),
    ):
        folds = [fold_indices(samples, 4, fold, seed, *given) for seed in (0, 1, 2) for fold in (0, 3)]
        assert hash_arrays(*(part for parts in folds for part in parts)) == expected
    for given, expected in ((None, "87a37bc23f26fd7e"), (labels, "caf6c64fd2cdfb0f")):
        sides = [split_off_groups(samples, fraction, 1, groups, given) for fraction in (0.15, 0.3, 0.5, 0.9)]
        assert hash_arrays(*(part for parts in sides for part in parts)) == expected
