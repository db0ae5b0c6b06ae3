"""Samples of the loaders of a run, read by index as its loaders read them: for probes and ``audit``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from boltcutter.data.mapped import BatchedMapDataset
from boltcutter.data.sampler import Batch
from boltcutter.diagnosis.probe import seeded
from boltcutter.structure import flatten, inputs_of, targets_of

MOST = 20_000  # samples of a split that are read
SECONDS = 20.0  # for which a split is read
BUCKETS = 512  # of tokens
NUMBERS: Any = Tensor | np.ndarray | np.generic | int | float
CHUNK = 256  # samples that a dataset of batches is asked for together


class Splits:
    """The loaders of a run, and the samples that they read.

    Args:
        loaders: By the name of the split: ``train``, ``validation`` and ``test``, where there is one.
    """

    def __init__(self, loaders: Mapping[str, Any]) -> None:
        self.loaders = {name: loader for name, loader in loaders.items() if loader is not None}
        self._datasets: dict[str, Any] = {}
        self._samples: dict[str, list[Any]] = {}
        self.baselines: dict[str, Any] = {}  # by the split on which they are measured
        self.remarks: list[Any] | None = None  # on values while samples of training are made; None before they were

    @property
    def train(self) -> Any:
        """The loader of training; None if there is none."""
        return self.loaders.get("train")

    def dataset(self, name: str) -> Any:
        """The dataset of a split, or the part of it that its sampler reads; None if there is none."""
        if name not in self._datasets:
            self._datasets[name] = dataset_of(self.loaders.get(name))
        return self._datasets[name]

    def samples(self, name: str) -> list[Any]:
        """Samples of a split, evenly spread over it, with their transforms; empty if they cannot be read."""
        if name not in self._samples:
            with seeded(0):
                self._samples[name] = [*read_batches(self.loaders.get(name), MOST, SECONDS)]
        return self._samples[name]

    def features(self, name: str) -> tuple[Tensor, Tensor] | None:
        """As ``table``; of tokens, how often each is in a sample, whose numbers are taken modulo ``BUCKETS``."""
        if (table := self.table(name)) is not None:
            return table
        parts = [(inputs_of(sample), targets_of(sample)) for sample in self.samples(name)]
        if not parts or not all(isinstance(x, Tensor | np.ndarray) and isinstance(y, NUMBERS) for x, y in parts):
            return None
        x, y = ([torch.as_tensor(pair[i]) for pair in parts] for i in range(2))
        if any(v.ndim != 1 or v.is_floating_point() or v.dtype == torch.bool for v in x) or any(
            v.numel() != 1 for v in y
        ):
            return None
        counts = [(v.long() % BUCKETS).bincount(minlength=BUCKETS) for v in x]
        return torch.stack(counts).double(), torch.stack([v.reshape(()) for v in y])

    def table(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Inputs (N, F) and targets (N,) of a split, in float64; None if samples are no such pairs."""
        parts = [(inputs_of(sample), targets_of(sample)) for sample in self.samples(name)]
        if not parts or not all(isinstance(part, NUMBERS) for pair in parts for part in pair):
            return None
        x, y = ([torch.as_tensor(pair[i]) for pair in parts] for i in range(2))
        is_numeric = x[0].is_floating_point() or x[0].dtype == torch.uint8  # pixels; other integers are tokens
        if any(v.shape != x[0].shape for v in x) or any(v.numel() != 1 for v in y) or not is_numeric:
            return None
        return torch.stack(x).reshape(len(x), -1).double(), torch.stack([v.reshape(()) for v in y])


def dataset_of(loader: Any) -> Any:
    """The dataset of a loader; its Subset where a sampler such as SubsetRandomSampler has the indices of one."""
    dataset, indices = getattr(loader, "dataset", None), getattr(getattr(loader, "sampler", None), "indices", None)
    if not isinstance(dataset, Dataset) or isinstance(dataset, IterableDataset) or not isinstance(indices, Iterable):
        return dataset
    return Subset(dataset, sorted({int(i) for i in indices}))


def read_batches(loader: Any, most: int, seconds: float) -> Iterator[Any]:
    """Samples of a loader, evenly spread."""
    dataset = dataset_of(loader)
    if dataset is None:
        return
    end = monotonic() + seconds
    if isinstance(dataset, IterableDataset):
        yield from islice(iter(dataset), most)
        return
    is_of_batches = getattr(loader, "batch_size", 1) is None and getattr(loader, "batch_sampler", None) is None
    if is_of_batches or not hasattr(dataset, "__len__"):
        return
    indices = range(0, len(dataset), max(1, -(-len(dataset) // most)))
    for start in range(0, len(indices), CHUNK):
        if monotonic() > end:
            return
        yield from items(dataset, indices[start : start + CHUNK])


def items(dataset: Any, indices: Sequence[int]) -> Iterator[Any]:
    """Samples of a dataset, also of one that is only fetched a batch at a time."""
    if isinstance(dataset, BatchedMapDataset):
        dataset = dataset.dataset  # whose samples are not collated
    if hasattr(type(dataset), "__getitem__"):
        yield from (dataset[i] for i in indices)
    else:
        batch = dataset.__getitems__(Batch([*indices]))
        yield from zip(*batch, strict=True) if isinstance(batch, tuple) else batch


def first_leaf(sample: Any) -> Tensor | None:
    """The first tensor of a sample's inputs; None if they are something else."""
    leaf = next(iter(flatten(inputs_of(sample))), None)
    return torch.as_tensor(leaf) if isinstance(leaf, Tensor | np.ndarray) else None


def digest(sample: Any) -> bytes:
    """Hash of the tensors, arrays and numbers of a sample."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in flatten(sample):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous()
            leaf = leaf.float() if leaf.dtype == torch.bfloat16 else leaf
            found.update(leaf.numpy().tobytes())
        else:
            found.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return found.digest()


def digests(dataset: Any, count: int) -> list[bytes] | None:
    """Hashes of the first samples; None if they cannot be read by index."""
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    with seeded(0):
        return [digest(sample) for sample in items(dataset, range(min(count, len(dataset))))]
