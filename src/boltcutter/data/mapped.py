"""Adapter that fetches map-style datasets of ``torch.utils.data`` a whole batch at a time."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from boltcutter.data.sampler import Batch
from boltcutter.data.seeding import SampleSeeds, seeded_generators
from boltcutter.data.streams import Purpose, stream

FINGERPRINT_SAMPLES = 16  # samples that are hashed into a dataset's fingerprint


class BatchedMapDataset:
    """A map-style dataset with ``__getitem__``, and optionally ``__getitems__``, fetched a batch at a time.

    All generators, also those that the dataset and its transforms hold, are seeded before each sample by its position
    in the order of the epoch, so that random transforms do not depend on workers, ranks or batches.

    Args:
        dataset: Map-style dataset with a length.
        collate: Collates a list of samples into a batch; None means ``default_collate``.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset, self.collate = dataset, collate
        self.seed = SampleSeeds(dataset, collate)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: Batch) -> Any:
        """The samples in ``batch``, collated."""
        if type(self.dataset) is TensorDataset and self.collate is None:
            rows = torch.from_numpy(batch.indices)
            return [tensor[rows] for tensor in self.dataset.tensors]
        if hasattr(self.dataset, "__getitems__") and not isinstance(self.dataset, Subset):
            indices: list[int] = batch.indices.tolist()
            self.seed(batch.stream(int(batch.positions[0])))
            samples = self.dataset.__getitems__(indices)
        else:
            samples = []
            for index, position in zip(batch.indices.tolist(), batch.positions.tolist(), strict=True):
                self.seed(batch.stream(position))
                samples.append(self.dataset[index])
        return (self.collate or default_collate)(samples)

    def fingerprint(self) -> bytes:
        """Hash of the dataset's contents, or of its length and a few samples; see ``fingerprint``."""
        return fingerprint(self.dataset)


def fingerprint(dataset: Any) -> bytes:
    """Hash a dataset without reading all of it.

    Uses the dataset's own ``fingerprint()`` if it has one, all of a ``TensorDataset``, and otherwise the length and
    16 samples.
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
        for index in np.unique(np.linspace(0, len(dataset) - 1, FINGERPRINT_SAMPLES).astype(np.int64)).tolist():
            with seeded_generators(stream(Purpose.FINGERPRINT, 0, position=index)):
                sample = cast(Any, dataset)[index]
            try:
                parts.append(hash_batch(sample))
            except ValueError:  # not picklable
                parts.append(type(sample).__qualname__.encode())
    return hashlib.sha256(b"".join(parts)).digest()


def hash_batch(batch: Any) -> bytes:
    """Hash the contents of a batch.

    Raises:
        ValueError: The batch cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(batch)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"data: cannot tell whether all ranks read the same batches ({error}); set is_sharded on the loader"
        ) from error
    return hashlib.sha256(file.getvalue()).digest()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            values = value.detach().cpu().contiguous()
            return bytes, (
                str((values.dtype, *values.shape)).encode() + values.view(-1).view(torch.uint8).numpy().tobytes(),
            )
        return NotImplemented
