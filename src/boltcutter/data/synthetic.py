"""Random samples of any size, to measure speed with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from boltcutter.data.module import DataModule, Kind, Splits, TensorSamples


class Synthetic(DataModule):
    """Noise with random targets; the same for the same seed.

    Args:
        shape: Of one sample.
        outputs: Number of classes, or of numbers in a target.
        kind: Whether targets are classes or numbers.
        dtype: Bytes from 0 to 255, or numbers of mean 0 and deviation 1.
        length: Training samples; val and test have a tenth of it each.
        batch_size: Samples in one step over all devices.
        seed: What samples and order depend on.
        workers: Processes for each device that prepare batches.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...] = (1, 28, 28),
        outputs: int = 10,
        kind: Kind = "classes",
        dtype: Literal["uint8", "float32"] = "uint8",
        length: int = 10_000,
        batch_size: int = 64,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, workers=workers)
        if not shape or min(shape) < 1:
            raise ValueError(f"data.shape={list(shape)}: sizes of 1 or more are needed; try [1, 28, 28]")
        for setting, value in (("outputs", outputs), ("length", length)):
            if value < 1:
                raise ValueError(f"data.{setting}={value} is not a number of anything; try 10")
        self.shape, self.outputs, self.kind, self.dtype, self.length = shape, outputs, kind, dtype, length
        if kind == "classes":
            self.classes = [str(number) for number in range(outputs)]

    def load(self) -> Splits:
        """Make all samples, in memory."""
        tenth = max(1, self.length // 10)
        return Splits(*(self._make(split, length) for split, length in enumerate((self.length, tenth, tenth))))

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """One sample (shape) or many (N, shape) from each ``.npy`` file; of many, each is named ``file:index``."""
        inputs: list[Tensor] = []
        names: list[str] = []
        for path in paths:
            try:
                found = np.load(path, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise ValueError(f"input={path}: not a .npy file of numbers ({error}); replace it") from None
            shape, dtype = getattr(found, "shape", ()), getattr(found, "dtype", None)
            if shape[-len(self.shape) :] != self.shape or len(shape) > len(self.shape) + 1 or dtype != self.dtype:
                wanted = f"{list(self.shape)} or [N, …] of {self.dtype}"
                raise ValueError(f"input={path}: {list(shape)} of {dtype}, expected {wanted}; convert it")
            inputs.append(torch.from_numpy(found.reshape(-1, *self.shape)))
            single = len(shape) == len(self.shape)
            names += [str(path)] if single else [f"{path}:{index}" for index in range(len(found))]
        return torch.cat(inputs), names

    def _make(self, split: int, length: int) -> TensorSamples:
        random = np.random.default_rng([self.seed, split])
        size = (length, *self.shape)
        inputs = (
            random.integers(0, 256, size, np.uint8)
            if self.dtype == "uint8"
            else random.standard_normal(size, np.float32)
        )
        targets = (
            random.integers(0, self.outputs, length, np.int64)
            if self.kind == "classes"
            else random.standard_normal((length, self.outputs), np.float32)
        )
        return TensorSamples(torch.from_numpy(inputs), torch.from_numpy(targets))
