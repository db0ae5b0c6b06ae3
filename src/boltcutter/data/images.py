"""Pictures in a folder for each class."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boltcutter.data.augment import Augment
from boltcutter.data.loader import Pair
from boltcutter.data.module import DataModule, Indices, Splits, check_shares, cut, split_indices
from boltcutter.data.picture import check_picture_shape, find_pictures, read_picture, read_pictures
from boltcutter.data.sampler import Batch


class PictureSamples:
    """Pictures that are read from their files when they are asked for.

    Args:
        root: What the files' names are relative to.
        files: One for each sample.
        labels: Class numbers, shape (N,).
        shape: Channels, height, width that each picture is brought to.
        augment: Changes a batch of inputs at random.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[Path],
        labels: Indices,
        shape: tuple[int, int, int],
        augment: Augment | None = None,
    ) -> None:
        self.root, self.shape, self.augment = root, shape, augment
        self.names = [file.relative_to(root).as_posix() for file in files]  # texts cost workers less than paths
        self.targets = torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self.names)

    def __getitems__(self, batch: Batch) -> Pair:
        """Bytes (N, C, H, W) and class numbers (N,) of the samples in ``batch``."""
        inputs = torch.stack([read_picture(self.root / self.names[index], self.shape) for index in batch])
        return self.augment(inputs, batch) if self.augment else inputs, self.targets[torch.from_numpy(batch.array)]

    def fingerprint(self) -> bytes:
        """Hash of names, classes, sizes in bytes, and shape; not of contents, which may be many gigabytes."""
        digest = hashlib.sha256(str(self.shape).encode())
        for name, target in zip(self.names, self.targets.tolist(), strict=True):
            digest.update(f"{name}\0{target}\0{(self.root / name).stat().st_size}\0".encode())
        return digest.digest()


class Images(DataModule):
    """PNG and JPEG pictures of any size, in ``folder/class`` or in ``folder/{train,val,test}/class``.

    Args:
        folder: With a folder for each class; or with ``train``, and perhaps ``val`` and ``test``, that hold those.
        shape: Channels (1 or 3), height, width that each picture is scaled and cut to.
        num_classes: Number of classes; found where it is not given.
        split: Shares of train, val and test, stratified by class; for what has no folder of its own.
        augment: Changes training pictures at random.
        batch_size: Samples in one step over all devices.
        seed: What split and order depend on.
        num_workers: Processes for each device that read pictures.
    """

    def __init__(
        self,
        *,
        folder: Path,
        shape: tuple[int, int, int] = (3, 64, 64),
        num_classes: int | None = None,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        augment: Augment | None = None,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, num_workers=num_workers)
        check_picture_shape(shape)
        self.folder, self.shape, self.num_classes = folder, shape, num_classes
        check_shares(split)
        self.split, self.augment = split, augment

    def sizes(self) -> dict[str, Any]:
        """``num_classes``, the number of class folders."""
        names = self._class_names()
        if self.num_classes not in (None, len(names)):
            raise ValueError(
                f"data.num_classes={self.num_classes}, but {self._train} has {len(names)} class folders; give null"
            )
        return {"num_classes": len(names)}

    def load(self) -> Splits:
        """List all pictures; cut what has no folder of its own from the training pictures."""
        self.num_classes = self.sizes()["num_classes"]
        self.classes = self._class_names()
        files, labels = self._list(self._train)
        train: Indices = np.arange(len(labels))
        val: Indices | None = None
        test: Indices | None = None
        own = {s: self.folder / s for s in ("val", "test") if self._is_split and (self.folder / s).is_dir()}
        if not own:
            train, val, test = split_indices(len(labels), self.split, self.seed, labels)
        elif "val" not in own:
            train, val = cut(train, self.split[1] / (self.split[0] + self.split[1]), self.seed, labels)
        elif "test" not in own:
            train, test = cut(train, self.split[2] / (self.split[0] + self.split[2]), self.seed, labels)

        def samples(name: str, chosen: Indices | None, augment: Augment | None = None) -> PictureSamples:
            if chosen is None:
                return PictureSamples(self.folder, *self._list(own[name]), self.shape)
            return PictureSamples(self.folder, [files[i] for i in chosen], labels[chosen], self.shape, augment)

        return Splits(samples("train", train, self.augment), samples("val", val), samples("test", test))

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Pictures, brought to the same shape."""
        return read_pictures(paths, self.shape)

    @property
    def _is_split(self) -> bool:
        # A folder "train" with pictures and no folders in it is a class: pictures of trains.
        return bool(_folders(self.folder / "train"))

    @property
    def _train(self) -> Path:
        return self.folder / "train" if self._is_split else self.folder

    def _class_names(self) -> list[str]:
        if not self.folder.is_dir():
            raise ValueError(
                f"data.folder={self.folder}: no such folder; give one with a folder of pictures for each class"
            )
        names = [folder.name for folder in _folders(self._train)]
        if len(names) < 2:
            found = f"only the class {names[0]}" if names else "no class folder"
            raise ValueError(
                f"data.folder={self.folder}: {found} in {self._train}; two or more folders of pictures are needed"
            )
        return names

    def _list(self, folder: Path) -> tuple[list[Path], Indices]:
        """Files of all classes under ``folder``, and their class numbers."""
        files: list[Path] = []
        labels: list[int] = []
        for place in _folders(folder):
            if place.name not in self.classes:
                raise ValueError(f"{place}: a class that {self._train} lacks; add it there or remove it here")
            found = find_pictures(place)
            if not found and folder == self._train:
                raise ValueError(f"{place}: no PNG or JPEG picture in this class folder; add some or remove it")
            files += found
            labels += [self.classes.index(place.name)] * len(found)
        if not files:
            raise ValueError(f"{folder}: no PNG or JPEG picture in its folders; add some or remove it")
        return files, np.asarray(labels, np.int64)


def _folders(folder: Path) -> list[Path]:
    """Folders in ``folder``, sorted by name; hidden ones are left out."""
    if not folder.is_dir():
        return []
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
