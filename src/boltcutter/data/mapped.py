"""Ordinary map-style data sets, as ``torch.utils.data`` has them, fetched a whole batch at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from boltcutter.data.sampler import Batch
from boltcutter.seeding import seed_generators, seeded_generators
from boltcutter.stream import hash_batch

LOOKED_AT = 16  # samples of a data set that its fingerprint is made of


class MapSamples:
    """Samples of a data set that has ``__getitem__``, and perhaps ``__getitems__``.

    All generators are seeded before each sample by (seed, epoch, index), so that its random changes depend neither on
    workers nor on ranks or batches.

    Args:
        dataset: Map-style, with a length.
        collate: Makes a batch of a list of samples; none means torch's own way.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: Batch) -> Any:
        """The samples in ``batch``, collated."""
        if type(self.dataset) is TensorDataset and self.collate is None:
            indices = torch.from_numpy(batch.array)
            return [tensor[indices] for tensor in self.dataset.tensors]
        if hasattr(self.dataset, "__getitems__") and not isinstance(self.dataset, Subset):
            several: list[int] = batch.array.tolist()
            seed_generators(batch.seed, batch.epoch, several[0])
            samples = self.dataset.__getitems__(several)
        else:
            samples = [self._sample(index, batch) for index in batch.array.tolist()]
        return (self.collate or default_collate)(samples)

    def fingerprint(self) -> bytes:
        """Hash of what is in the data set, or of its length and a few samples where that would take too long."""
        return fingerprint(self.dataset)

    def _sample(self, index: int, batch: Batch) -> Any:
        seed_generators(batch.seed, batch.epoch, index)
        return self.dataset[index]


def fingerprint(dataset: Any) -> bytes:
    """What changes whenever the contents do, as far as that can be seen without reading all of a data set.

    Its own ``fingerprint()`` if it has one; all of a ``TensorDataset``; of others their length and 16 samples.
    """
    if callable(own := getattr(dataset, "fingerprint", None)):
        found = own()
        return found if isinstance(found, bytes) else str(found).encode()
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    parts = [f"{name} {len(dataset) if isinstance(dataset, Sized) else None}".encode()]
    if type(dataset) is TensorDataset:
        parts.append(hash_batch(dataset.tensors))
    elif type(dataset) is Subset:
        parts += [np.asarray(dataset.indices, np.int64).tobytes(), fingerprint(dataset.dataset)]
    elif type(dataset) is ConcatDataset:
        parts += [fingerprint(part) for part in dataset.datasets]
    elif isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        for index in np.unique(np.linspace(0, len(dataset) - 1, LOOKED_AT).astype(np.int64)).tolist():
            with seeded_generators(index):
                sample = cast(Any, dataset)[index]
            try:
                parts.append(hash_batch(sample))
            except ValueError:  # it cannot be pickled
                parts.append(type(sample).__qualname__.encode())
    return hashlib.sha256(b"".join(parts)).digest()
