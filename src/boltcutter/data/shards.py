"""Samples in many files that together are larger than memory: arrays, tables, archives."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boltcutter.data.archive import Archive
from boltcutter.data.augment import Augment
from boltcutter.data.files import PAGE, find, sampled
from boltcutter.data.loader import Pair
from boltcutter.data.module import DataModule, Kind, Splits, check_shares
from boltcutter.data.picture import read_pictures
from boltcutter.data.sampler import TOGETHER, Batch, scattered
from boltcutter.data.table import Kept, row_groups

Array = npt.NDArray[Any]
ORDERED = 1 << 20  # numbers of an order that are kept
ENDINGS = (".npy", ".parquet", ".tar")
Shard = Any  # has __len__, and ``rows`` as Arrays has it


class Arrays:
    """One shard of two ``.npy`` files, mapped: inputs, and the targets beside them.

    Args:
        path: Of the inputs; its name has ``inputs`` where that of the targets has ``targets``.

    Raises:
        ValueError: One is missing or damaged, or they have not the same length.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path, path.with_name(path.name.replace("inputs", "targets")))
        self.inputs, self.targets = (_map(file) for file in self.files)
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"{path}: {len(self.inputs)} inputs, but {len(self.targets)} targets in {self.files[1].name}; "
                "write both again"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, chosen: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Inputs (N, …) and targets (N, …) of some samples."""
        return take(self.inputs, chosen), take(self.targets, chosen)


class ShardSamples:
    """Samples of many shards in one row, of which a split has some.

    Args:
        shards: Each with ``len`` and ``rows``.
        shape: Of one input.
        kind: Whether targets are classes or numbers.
        num_classes: Number of classes, or of numbers in a target.
        part: First and last place of this split, among all samples in random order; none means all as they stand. Of
            more than a million, some neighbours stay together, so that the order takes little memory.
        seed: Of that order.
        augment: Changes inputs at random.

    Attributes:
        blocks: Lengths of stretches that are best read one after another; none where any order will do.
        read_bytes: What the disk reads for a sample, at least.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
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
        self.together = -(-self.ends[-1] // ORDERED)  # neighbours
        count = self.ends[-1] // self.together
        self.order = np.random.default_rng(seed).permutation(count) if part else None
        self.mine = self.order[slice(*part)] if part and self.together == 1 and self.order is not None else None
        together = any(getattr(shard, "together", False) for shard in shards)
        self.read_bytes = 2 * PAGE  # at least, of inputs and targets
        self.blocks = [len(shard) for shard in shards] if together else None

    def __len__(self) -> int:
        return self.part[1] - self.part[0]

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs and targets of the samples in ``batch``.

        Raises:
            ValueError: A sample is damaged, has another shape, or is of no class that there is.
        """
        places = self._places(batch.array)
        inputs, targets = self._rows(0, places) if len(self.shards) == 1 else self._of_several(places)
        x = torch.from_numpy(inputs.reshape(-1, *self.shape))
        return self.augment(x, batch) if self.augment else x, self._targets(targets, places)

    def fingerprint(self) -> bytes:
        """Of size, time of change, and some blocks of each file, which may be too large to be read in whole."""
        files = dict.fromkeys(file for shard in self.shards for file in shard.files)
        return hashlib.sha256(b"".join(map(sampled, files)) + repr((self.part, self.order is None)).encode()).digest()

    def _rows(self, owner: int, places: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Inputs and targets that are all in one shard."""
        shard = self.shards[owner]
        inputs, targets = shard.rows(places - self.ends[owner - 1] if owner else places)
        if inputs[0].size != math.prod(self.shape):
            shape = list(inputs.shape[1:])
            raise ValueError(f"{shard.path}: inputs of shape {shape}, but data.shape={list(self.shape)}")
        return inputs, targets

    def _of_several(self, places: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Inputs and targets from several shards, in the order of their places."""
        owners = np.searchsorted(self.ends, places, side="right")
        made: list[Array] = []
        for owner in set(owners.tolist()):
            mine = np.flatnonzero(owners == owner)
            found = self._rows(owner, places[mine])
            made = made or [np.empty((len(places), *part.shape[1:]), part.dtype) for part in found]
            for whole, part in zip(made, found, strict=True):
                whole[mine] = part.reshape(len(mine), *whole.shape[1:])
        return made[0], made[1]

    def _places(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where samples of this split stand among all."""
        if self.order is None:
            return chosen
        if self.mine is not None:
            return self.mine.take(chosen)
        places = chosen + self.part[0]
        blocks, rest = places // self.together, places % self.together
        whole = blocks < len(self.order)  # the last block may have less, and stays where it is
        return np.where(whole, self.order[np.where(whole, blocks, 0)] * self.together + rest, places)

    def _targets(self, targets: Array, places: npt.NDArray[np.int64]) -> Tensor:
        if self.kind == "classification":
            classes = targets.astype(np.int64, copy=False).reshape(-1)
            # One below zero is a large number then.
            if np.maximum.reduce(classes.view(np.uint64)) >= self.num_classes:
                odd = np.flatnonzero((classes >= self.num_classes) | (classes < 0))[0]
                path = self.shards[np.searchsorted(self.ends, places[odd], side="right")].path
                raise ValueError(
                    f"{path}: class {classes[odd]}, but data.num_classes={self.num_classes}; give the number of classes"
                )
            return torch.from_numpy(classes)
        return torch.from_numpy(targets.astype(np.float32).reshape(len(targets), -1))


class Shards(DataModule):
    """Files of samples that are read as they are needed; nothing is loaded, whatever their size.

    ``.npy``: ``inputs*.npy`` of shape (N, …) beside ``targets*.npy`` of shape (N,) or (N, T), mapped.
    ``.parquet``: a column of inputs, each a list or bytes, and one of targets. A row group can only be read as a whole,
    so the order of an epoch takes 16 of them at random, mixes their rows, and goes on to the next; and a row
    group belongs to one split.
    ``.tar``: WebDataset's files, ``<key>.npy``, ``.png`` or ``.jpg`` beside ``<key>.cls``; their places are looked up
    once and kept in ``index``.

    Args:
        path: A file, a folder, or a pattern such as ``data/train-*.tar``.
        val: Likewise; none takes a share of ``path``, at random.
        test: Likewise.
        split: Shares of train, val and test, for those without files.
        kind: Whether targets are classes or numbers.
        columns: Of Parquet files: inputs, then targets.
        dtype: Of inputs that a Parquet file has as bytes.
        index: Folder for the places of what is in ``.tar`` files.
        augment: Changes training pictures at random.
        shape: Of one input.
        num_classes: Number of classes, or of numbers in a target.
        batch_size: Samples in one step over all devices.
        seed: What split and order depend on.
        num_workers: Processes for each device that prepare batches.
    """

    def __init__(
        self,
        *,
        path: str,
        val: str | None = None,
        test: str | None = None,
        split: tuple[float, float, float] = (0.9, 0.05, 0.05),
        kind: Kind = "classification",
        columns: tuple[str, str] = ("input", "target"),
        dtype: str = "uint8",
        index: Path = Path("data/shards"),
        augment: Augment | None = None,
        shape: tuple[int, ...],
        num_classes: int,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, num_workers=num_workers)
        check_shares(split)
        try:
            np.dtype(dtype)
        except TypeError:
            raise ValueError(f"data.dtype={dtype} is no kind of number; try uint8 or float32") from None
        self.paths = {"train": path, "val": val, "test": test}
        self.split, self.columns, self.dtype = split, columns, dtype
        self.kind: Kind = kind
        self.index, self.augment, self.shape, self.num_classes = Path(index), augment, shape, num_classes
        if kind == "classification":
            self.classes = [str(number) for number in range(num_classes)]

    def load(self) -> Splits:
        """Open all shards."""
        shards = {name: self._open(name, pattern) for name, pattern in self.paths.items() if pattern}
        cut = {n: s for n, s in zip(self.paths, self.split, strict=True) if n == "train" or n not in shards}
        parts: dict[str, tuple[int, int]] = {}
        if len(cut) > 1 and any(getattr(shard, "together", False) for shard in shards["train"]):
            count = len(shards["train"])
            mixed = [shards["train"][place] for place in scattered(np.arange(count), count, self.seed)]
            shards |= {name: mixed[slice(*ends)] for name, ends in _ends(cut, len(mixed)).items()}
        elif len(cut) > 1:
            parts = _ends(cut, sum(map(len, shards["train"])))
            shards |= dict.fromkeys(cut, shards["train"])
        made = {}
        for name, found in shards.items():
            if cut.get(name) == 0:
                continue
            if not sum(map(len, found)) or (name in parts and parts[name][0] == parts[name][1]):
                raise ValueError(f"data.split={list(self.split)}: nothing is left for {name}; set data.{name} to files")
            augment = self.augment if name == "train" else None
            made[name] = ShardSamples(
                found, self.shape, self.kind, self.num_classes, part=parts.get(name), seed=self.seed, augment=augment
            )
        return Splits(**made)

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Pictures (channels, height, width), or ``.npy`` files of one sample each."""
        if all(path.suffix == ".npy" for path in paths):
            return torch.stack([torch.from_numpy(np.array(_map(path)).reshape(self.shape)) for path in paths]), [
                str(path) for path in paths
            ]
        if len(self.shape) != 3:
            raise ValueError(f"input={paths[0]}: data.shape={list(self.shape)} is no picture's; give .npy files")
        return read_pictures(paths, (self.shape[0], self.shape[1], self.shape[2]))

    def _open(self, name: str, pattern: str) -> list[Shard]:
        setting = "data.path" if name == "train" else f"data.{name}"
        files = [file for file in find(pattern, setting, ENDINGS) if not file.name.startswith("targets")]
        made: list[Shard] = []
        kept = Kept(2 * TOGETHER)  # a batch may have rows of what is mixed now and of what comes next
        for file in files:
            if file.suffix == ".npy":
                made.append(Arrays(file))
            elif file.suffix == ".parquet":
                made += row_groups(file, self.columns, self.dtype, kept)
            elif file.suffix == ".tar":
                made.append(Archive(file, self.shape, self.index))
            else:
                raise ValueError(f"{setting}={file}: expected a name that ends in {', '.join(ENDINGS)}")
        return [shard for shard in made if len(shard)]


def take(rows: Array, chosen: npt.NDArray[np.int64]) -> Array:
    """Some rows, copied; of an array in the usual order in half the time that indexing takes."""
    found: Array = rows.take(chosen, axis=0) if rows.flags.c_contiguous else rows[chosen]
    return found


def _ends(shares: dict[str, float], length: int) -> dict[str, tuple[int, int]]:
    """First and last place of each share of ``length``."""
    ends = np.round(np.cumsum([0.0, *shares.values()]) / sum(shares.values()) * length).astype(int).tolist()
    return dict(zip(shares, pairwise(ends), strict=True))


def _map(path: Path) -> Array:
    try:
        found: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; inputs*.npy needs a targets*.npy beside it") from None
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: not a whole .npy file ({' '.join(str(error).split())}); replace it") from None
    return np.asarray(found)
