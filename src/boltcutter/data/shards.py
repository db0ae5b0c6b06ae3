"""Sharded datasets larger than memory, in ``.npy`` files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boltcutter.data.augment import Augment
from boltcutter.data.files import PAGE_BYTES, consecutive_ranges, find_files, map_npy, sampled_hash
from boltcutter.data.image_io import read_images
from boltcutter.data.loader import Pair
from boltcutter.data.module import DataModule, Kind, Splits
from boltcutter.data.sampler import Batch
from boltcutter.data.splits import Indices, check_split
from boltcutter.data.streams import Purpose, stream

Array = npt.NDArray[Any]
MAX_PERMUTATION = 1 << 20  # entries of the permutation that are stored


class NpyShard:
    """A shard of two memory-mapped ``.npy`` files, of inputs and of targets.

    Args:
        path: File of the inputs; the name of the targets' file has ``targets`` instead of ``inputs``.

    Raises:
        ValueError: A file is missing or damaged, or the lengths differ.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path, path.with_name(path.name.replace("inputs", "targets")))
        self.inputs, self.targets = (map_npy(file, "each inputs*.npy needs a targets*.npy") for file in self.files)
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"{path}: {len(self.inputs)} inputs, but {len(self.targets)} targets in {self.files[1].name}; "
                "write both again"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, chosen: Indices) -> tuple[Array, Array]:
        """Return inputs (N, …) and targets (N, …) of some samples."""
        return take_rows(self.inputs, chosen), take_rows(self.targets, chosen)


class ShardedDataset:
    """The samples of one split, in a concatenation of shards.

    Args:
        shards: The shards.
        shape: Shape of one input.
        kind: ``classification`` (class indices) or ``regression`` (float targets).
        num_classes: Number of classes; of target columns for regression.
        part: Range of this split in a random permutation of all samples; None: all samples in their order. Of more
            than a million samples, neighbours are permuted together, so that the permutation takes little memory.
        seed: Seed of that permutation.
        augment: Random transform of a batch of inputs.

    Attributes:
        read_bytes: Bytes that the disk reads at least for a sample.
    """

    def __init__(
        self,
        shards: Sequence[NpyShard],
        shape: tuple[int, ...],
        kind: Kind,
        num_classes: int,
        *,
        part: tuple[int, int] | None = None,
        seed: int = 0,
        augment: Callable[[Tensor, Batch], Tensor] | None = None,
    ) -> None:
        self.shards, self.shape, self.kind, self.num_classes = list(shards), shape, kind, num_classes
        self.ends = np.cumsum([len(shard) for shard in shards]).tolist()
        self.part, self.augment = part or (0, self.ends[-1]), augment
        self.order: Indices | None = None
        self.indices: Indices | None = None
        self.neighbours = -(-self.ends[-1] // MAX_PERMUTATION)  # samples that are permuted together
        self.identity = repr((self.part, part is None)).encode()  # of the samples that this split has
        if part:
            key = stream(Purpose.SPLIT, seed)
            self.order = np.random.default_rng(key).permutation(self.ends[-1] // self.neighbours)
            if self.neighbours == 1:
                self.indices = self.order[slice(*part)]
        self.read_bytes = 2 * PAGE_BYTES  # of inputs and targets

    def __len__(self) -> int:
        return self.part[1] - self.part[0]

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs and targets of the samples in ``batch``."""
        rows = self._global_indices(batch.indices)
        inputs, targets = self._read(0, rows) if len(self.shards) == 1 else self._gather(rows)
        x = torch.from_numpy(inputs.reshape(-1, *self.shape))
        return self.augment(x, batch) if self.augment else x, self._targets(targets, rows)

    def fingerprint(self) -> bytes:
        """Hash of size, modification time and some blocks of each file, which may be too large to be read whole."""
        files = dict.fromkeys(file for shard in self.shards for file in shard.files)
        return hashlib.sha256(b"".join(map(sampled_hash, files)) + self.identity).digest()

    def _read(self, owner: int, rows: Indices) -> tuple[Array, Array]:
        """Read inputs and targets from one shard."""
        shard = self.shards[owner]
        inputs, targets = shard.rows(rows - self.ends[owner - 1] if owner else rows)
        if inputs[0].size != math.prod(self.shape):
            shape = list(inputs.shape[1:])
            raise ValueError(f"{shard.path}: inputs of shape {shape}, but data.shape={list(self.shape)}")
        return inputs, targets

    def _gather(self, rows: Indices) -> tuple[Array, Array]:
        """Read inputs and targets from several shards, in the order of ``rows``."""
        owners = np.searchsorted(self.ends, rows, side="right")
        gathered: list[Array] = []
        for owner in set(owners.tolist()):
            positions = np.flatnonzero(owners == owner)
            found = self._read(owner, rows[positions])
            gathered = gathered or [np.empty((len(rows), *values.shape[1:]), values.dtype) for values in found]
            for whole, values in zip(gathered, found, strict=True):
                whole[positions] = values.reshape(len(positions), *whole.shape[1:])
        return gathered[0], gathered[1]

    def _global_indices(self, indices: Indices) -> Indices:
        """Map indices of this split to indices into the concatenated shards."""
        if self.indices is not None:
            return self.indices.take(indices)
        if self.order is None:
            return indices
        positions = indices + self.part[0]
        groups, rest = positions // self.neighbours, positions % self.neighbours
        whole = groups < len(self.order)  # an incomplete last group keeps its position
        return np.where(whole, self.order[np.where(whole, groups, 0)] * self.neighbours + rest, positions)

    def _targets(self, targets: Array, rows: Indices) -> Tensor:
        if self.kind == "classification":
            classes = targets.astype(np.int64, copy=False).reshape(-1)
            # Unsigned, a negative class is a large one.
            if np.maximum.reduce(classes.view(np.uint64)) >= self.num_classes:
                invalid = np.flatnonzero((classes >= self.num_classes) | (classes < 0))[0]
                path = self.shards[np.searchsorted(self.ends, rows[invalid], side="right")].path
                raise ValueError(
                    f"{path}: class {classes[invalid]}, but data.num_classes={self.num_classes}; correct it"
                )
            return torch.from_numpy(classes)
        return torch.from_numpy(targets.astype(np.float32).reshape(len(targets), -1))


class Shards(DataModule):
    """Arrays in ``.npy`` files, which are read on demand, whatever their size.

    ``inputs*.npy`` of shape (N, …) and ``targets*.npy`` of shape (N,) or (N, T) are memory-mapped.

    Args:
        path: A file, a folder, or a glob pattern such as ``data/inputs-*.npy``.
        val: Files of the val split, like ``path``; None: a random fraction of ``path``.
        test: Files of the test split, like ``path``; None: a random fraction of ``path``.
        split: Fractions of train, val and test, for splits without files.
        kind: ``classification`` (class indices) or ``regression`` (float targets).
        augment: Random transform of training images.
        shape: Shape of one input.
        num_classes: Number of classes; of target columns for regression.
        options: Arguments of ``DataModule``, such as ``batch_size``.
    """

    def __init__(
        self,
        *,
        path: str,
        val: str | None = None,
        test: str | None = None,
        split: tuple[float, float, float] = (0.9, 0.05, 0.05),
        kind: Kind = "classification",
        augment: Augment | None = None,
        shape: tuple[int, ...],
        num_classes: int,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_split(split)
        self.paths = {"train": path, "val": val, "test": test}
        self.split = split
        self.kind: Kind = kind
        self.augment, self.shape, self.num_classes = augment, shape, num_classes
        if kind == "classification":
            self.classes = [str(number) for number in range(num_classes)]

    def load(self) -> Splits:
        """Open all shards."""
        shards = {name: self._open(name, pattern) for name, pattern in self.paths.items() if pattern}
        # Of the splits that are taken from data.path.
        fractions = {n: f for n, f in zip(self.paths, self.split, strict=True) if n == "train" or n not in shards}
        parts: dict[str, tuple[int, int]] = {}
        if len(fractions) > 1:
            parts = consecutive_ranges(fractions, sum(map(len, shards["train"])))
            shards |= dict.fromkeys(fractions, shards["train"])
        used = {name: files for name, files in shards.items() if fractions.get(name) != 0}
        for name, files in used.items():
            if not sum(map(len, files)) or (name in parts and parts[name][0] == parts[name][1]):
                raise ValueError(f"data.split={list(self.split)}: the {name} split is empty; set data.{name} to files")
        splits = {}
        for name, files in used.items():
            augment = self.augment if name == "train" else None
            settings: Any = {"part": parts.get(name), "seed": self.seed, "augment": augment}
            splits[name] = ShardedDataset(files, self.shape, self.kind, self.num_classes, **settings)
        return Splits(**splits)

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Read images, or ``.npy`` files of one sample each."""
        if all(path.suffix == ".npy" for path in paths):
            arrays = [map_npy(path) for path in paths]
            for path, array in zip(paths, arrays, strict=True):
                if array.size != math.prod(self.shape):
                    found = f"{list(array.shape)}, but a sample has {list(self.shape)}"
                    raise ValueError(f"input={path}: an array of shape {found}; give a file for each sample")
            samples = [torch.from_numpy(np.array(array).reshape(self.shape)) for array in arrays]
            return torch.stack(samples), [str(path) for path in paths]
        if len(self.shape) != 3:
            raise ValueError(f"input={paths[0]}: data.shape={list(self.shape)} is not an image shape; give .npy files")
        return read_images(paths, (self.shape[0], self.shape[1], self.shape[2]))

    def _open(self, name: str, pattern: str) -> list[NpyShard]:
        setting = "data.path" if name == "train" else f"data.{name}"
        files = find_files(pattern, setting, (".npy",))
        if others := [file for file in files if file.suffix != ".npy"]:
            raise ValueError(f"{setting}={others[0]} is not a .npy file; data=huggingface reads other formats")
        shards = [NpyShard(file) for file in files if not file.name.startswith("targets")]
        return [shard for shard in shards if len(shard)]


def take_rows(rows: Array, chosen: Indices) -> Array:
    """Copy some rows; ``take`` needs half the time of indexing, but would copy an array that is not C-contiguous."""
    found: Array = rows.take(chosen, axis=0) if rows.flags.c_contiguous else rows[chosen]
    return found
