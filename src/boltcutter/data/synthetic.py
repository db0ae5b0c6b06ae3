"""Random samples of any shape and number, for benchmarks."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boltcutter.data.augment import uniform_at
from boltcutter.data.files import strided_windows
from boltcutter.data.loader import Pair
from boltcutter.data.module import BatchedTensorDataset, DataModule, Kind, Splits
from boltcutter.data.sampler import Batch
from boltcutter.data.streams import STAGES, Purpose, stream

POOL = 1 << 22  # random values that samples are windows of; at most as many as ``uniform_at`` has distinct values


class NoiseDataset:
    """Random samples that are computed from their index and a key: the seed, and the split.

    Each is a window of ``POOL`` random values at an offset that depends on its index, so very large datasets contain
    duplicates.
    """

    def __init__(
        self, num_samples: int, shape: tuple[int, ...], num_classes: int, kind: str, dtype: str, key: tuple[int, str]
    ) -> None:
        self.num_samples, self.shape, self.num_classes = num_samples, shape, num_classes
        self.kind, self.dtype, self.key = kind, dtype, key
        pool, self.offsets = (stream(Purpose.SYNTHETIC, key[0], stage=key[1], position=number) for number in (0, 1))
        random, width = np.random.default_rng(pool), math.prod(shape)
        inputs = POOL + width
        self.inputs: npt.NDArray[Any] = (
            random.integers(0, 256, inputs, np.uint8)
            if dtype == "uint8"
            else random.standard_normal(inputs, np.float32)
        )
        self.numbers = random.standard_normal(POOL + num_classes, np.float32) if kind == "regression" else None

    def __len__(self) -> int:
        return self.num_samples

    is_pure = True  # draws from no global random generator

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs and targets of the samples in ``batch``."""
        drawn = uniform_at(self.offsets, batch.indices, 2)
        inputs = _windows(self.inputs, drawn[:, 0], math.prod(self.shape)).reshape(-1, *self.shape)
        if self.numbers is not None:
            return inputs, _windows(self.numbers, drawn[:, 1], self.num_classes)
        classes = np.minimum(drawn[:, 1].astype(np.float64) * self.num_classes, self.num_classes - 1).astype(np.int64)
        return inputs, torch.from_numpy(classes)

    def fingerprint(self) -> bytes:
        """Hash of the arguments, which determine all samples."""
        arguments = (self.key, self.num_samples, self.shape, self.num_classes, self.kind, self.dtype)
        return hashlib.sha256(repr(arguments).encode()).digest()


def _windows(pool: npt.NDArray[Any], offsets: npt.NDArray[np.float32], width: int) -> Tensor:
    """Windows of the pool, shape (N, width), at relative offsets in [0, 1)."""
    chosen = strided_windows(pool, 0, POOL, width)[(offsets.astype(np.float64) * POOL).astype(np.int64)]
    return torch.from_numpy(chosen.view(pool.dtype).reshape(-1, width))


class Synthetic(DataModule):
    """Noise with random targets, deterministic by seed. Memory does not depend on the number of samples.

    Args:
        shape: Shape of one sample.
        num_classes: Number of classes; of target columns for regression.
        kind: ``classification`` (class indices) or ``regression`` (float targets).
        dtype: Dtype of inputs: uint8 from 0 to 255, or float32 with mean 0 and standard deviation 1.
        num_samples: Number of training samples; val and test have a tenth of it each.
        in_memory: Whether to generate all samples in advance and keep them in memory.
        batch_size: Global batch size: samples in one step over all devices.
        seed: Seed of samples and order.
        num_workers: DataLoader workers per device.
        classes: Names of the classes; None: their numbers.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...] = (1, 28, 28),
        num_classes: int = 10,
        kind: Kind = "classification",
        dtype: Literal["uint8", "float32"] = "uint8",
        num_samples: int = 10_000,
        in_memory: bool = False,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
        classes: list[str] | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, num_workers=num_workers, classes=classes)
        if not shape or min(shape) < 1:
            raise ValueError(f"data.shape={list(shape)} must be sizes of 1 or more; try [1, 28, 28]")
        for setting, value in (("num_classes", num_classes), ("num_samples", num_samples)):
            if value < 1:
                raise ValueError(f"data.{setting}={value} must be 1 or more; try 10")
        self.shape, self.num_classes, self.kind = shape, num_classes, kind
        self.dtype, self.num_samples, self.in_memory = dtype, num_samples, in_memory
        if kind == "classification":
            self.classes = [str(number) for number in range(num_classes)]

    def load(self) -> Splits:
        """Generate the splits."""
        tenth = max(1, self.num_samples // 10)
        splits: list[Any] = []
        for split, count in zip(STAGES, (self.num_samples, tenth, tenth), strict=False):
            noise = NoiseDataset(count, self.shape, self.num_classes, self.kind, self.dtype, (self.seed, split))
            pair = noise.__getitems__(Batch(range(count))) if self.in_memory else None
            splits.append(BatchedTensorDataset(*pair) if pair else noise)
        return Splits(*splits)
