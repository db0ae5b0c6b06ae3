"""Image folders: one folder per class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from boltcutter.data.augment import Augment
from boltcutter.data.files import ordinary
from boltcutter.data.image_io import (
    SUFFIXES,
    check_image_shape,
    is_image_file,
    list_files,
    read_image,
    read_images,
    warn_left_out,
)
from boltcutter.data.loader import Pair
from boltcutter.data.module import DataModule, Splits
from boltcutter.data.sampler import Batch
from boltcutter.data.splits import Indices, check_split, split_indices

MISSING = "remove this link, or list the folder again"


class ImageFolderDataset:
    """Images of class indices ``labels`` (N,), which are read from their files on access, resized and cropped."""

    def __init__(
        self,
        root: Path,
        files: Sequence[Path],
        labels: Indices,
        shape: tuple[int, int, int],
        augment: Augment | None = None,
    ) -> None:
        self.root, self.shape, self.augment = root, shape, augment
        self.names = [file.relative_to(root).as_posix() for file in files]  # strings pickle faster than paths
        self.targets = torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self.names)

    def __getitems__(self, batch: Batch) -> Pair:
        """uint8 images (N, C, H, W) and class indices (N,) of the samples in ``batch``."""
        inputs = torch.stack([read_image(self.root / self.names[index], self.shape) for index in batch])
        return self.augment(inputs, batch) if self.augment else inputs, self.targets[torch.from_numpy(batch.indices)]

    def fingerprint(self) -> bytes:
        """Hash of names, classes, file sizes and shape, but not of contents, which may be many gigabytes."""
        digest = hashlib.sha256(str(self.shape).encode())
        for name, target in zip(self.names, self.targets.tolist(), strict=True):
            digest.update(f"{name}\0{target}\0{ordinary(self.root / name, MISSING).stat().st_size}\0".encode())
        return digest.digest()


class Images(DataModule):
    """Images of any size, in ``folder/<class>`` or in ``folder/{train,val,test}/<class>``, also in folders below.

    PNG, JPEG, WebP, BMP, GIF, TIFF and PPM files are read, by the end of their names; files that are not read are
    counted in a warning.

    Args:
        folder: Folder with one folder per class; or with ``train``, and optionally ``val`` and ``test``, that have
            them.
        shape: Channels (1 or 3), height and width to resize and crop each image to.
        num_classes: Number of classes; None: the number of class folders.
        split: Fractions of train, val and test, stratified by class, for splits without a folder.
        augment: Random transform of training images.
        options: Arguments of ``DataModule``, such as ``batch_size``.
    """

    def __init__(
        self,
        *,
        folder: Path,
        shape: tuple[int, int, int] = (3, 64, 64),
        num_classes: int | None = None,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        augment: Augment | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_image_shape(shape)
        self.folder, self.shape, self.num_classes = folder, shape, num_classes
        check_split(split)
        self.split, self.augment = split, augment

    def infer_settings(self) -> dict[str, Any]:
        """Return ``num_classes``, the number of class folders."""
        names = self._class_names()
        if self.num_classes not in (None, len(names)):
            raise ValueError(
                f"data.num_classes={self.num_classes}, but {self._train} has {len(names)} class folders; set it to null"
            )
        return {"num_classes": len(names)}

    def load(self) -> Splits:
        """List all images; split those without a folder off the training images."""
        self.num_classes = self.infer_settings()["num_classes"]
        self.classes = self._class_names()
        self._list_folder()
        files, labels = self._list(self._train)
        existing = {s: self.folder / s for s in ("val", "test") if self._is_split and (self.folder / s).is_dir()}
        count, own = len(labels), set(existing)
        if self.num_folds and "val" in existing:  # folds divide all these samples
            val_files, val_labels = self._list(existing.pop("val"))
            files, labels = files + val_files, np.concatenate([labels, val_labels])
        train, val, test = split_indices(
            count,
            self.split,
            self.seed,
            labels,
            own,
            num_folds=self.num_folds,
            fold=self.fold,
            num_val=len(labels) - count,
        )

        def samples(name: str, chosen: Indices, augment: Augment | None = None) -> ImageFolderDataset:
            if name in existing:
                return ImageFolderDataset(self.folder, *self._list(existing[name]), self.shape)
            return ImageFolderDataset(self.folder, [files[i] for i in chosen], labels[chosen], self.shape, augment)

        return Splits(samples("train", train, self.augment), samples("val", val), samples("test", test))

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Read images, resized and cropped to the same shape."""
        return read_images(paths, self.shape)

    @property
    def _is_split(self) -> bool:
        # A folder "train" with images and without folders is a class: images of trains.
        return bool(_folders(self.folder / "train"))

    @property
    def _train(self) -> Path:
        return self.folder / "train" if self._is_split else self.folder

    def _class_names(self) -> list[str]:
        if not self.folder.is_dir():
            raise ValueError(f"data.folder={self.folder}: no such folder; give one with a folder of images per class")
        names = [folder.name for folder in _folders(self._train)]
        if len(names) < 2:
            found = f"only the class {names[0]}" if names else "no class folder"
            raise ValueError(
                f"data.folder={self.folder}: {found} in {self._train}; at least two class folders are needed"
            )
        return names

    def _list_folder(self) -> None:
        """List the images of each class folder, and warn of what is not read."""
        split, others, outside = self._is_split, [], 0
        self._images: dict[Path, list[Path]] = {}
        try:
            files = list_files(self.folder)
        except ValueError as error:
            raise ValueError(f"data.folder={self.folder}: {error}") from None
        for file in files:
            above = file.relative_to(self.folder).parts[:-1]
            if not is_image_file(file):
                others.append(file)
            elif len(above) < 1 + split or (split and above[0] not in ("train", "val", "test")):
                outside += 1
            else:
                self._images.setdefault(self.folder.joinpath(*above[: 1 + split]), []).append(file)
        warn_left_out(f"data.folder={self.folder}", others)
        if outside:
            layout = f"{{train,val,test}}{os.sep}<class>" if split else "<class>"
            rank_zero_warn(
                f"data.folder={self.folder}: {outside} images are not in {self.folder}{os.sep}{layout}, so they are "
                "not read; move or remove them"
            )

    def _list(self, folder: Path) -> tuple[list[Path], Indices]:
        """Files of all classes under ``folder``, and their class indices."""
        files: list[Path] = []
        labels: list[int] = []
        for class_folder in _folders(folder):
            if class_folder.name not in self.classes:
                raise ValueError(f"{class_folder}: not a class of {self._train}; add it there or remove it here")
            found = self._images.get(class_folder, [])
            if not found and folder == self._train:
                raise ValueError(
                    f"data.folder={self.folder}: no image ({', '.join(SUFFIXES)}) in the class folder "
                    f"{class_folder.name}; add some or remove it"
                )
            files += found
            labels += [self.classes.index(class_folder.name)] * len(found)
        if not files:
            raise ValueError(f"{folder}: no image in its class folders; add some or remove it")
        return files, np.asarray(labels, np.int64)


def _folders(folder: Path) -> list[Path]:
    """Return the folders in ``folder``, sorted by name, without hidden ones."""
    if not folder.is_dir():
        return []
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
