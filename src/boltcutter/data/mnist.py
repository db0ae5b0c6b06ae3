"""Images in IDX files: MNIST, Fashion-MNIST, and other datasets of this format."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from boltcutter.data.augment import Augment
from boltcutter.data.download import download_file
from boltcutter.data.files import MAX_EXPANSION, ExpansionError, expansion_limit, read_gzip
from boltcutter.data.image_io import read_images
from boltcutter.data.module import BatchedTensorDataset, DataModule, Splits
from boltcutter.data.splits import split_indices

Prefix = Literal["train", "t10k"]  # of file names


class MNIST(DataModule):
    """Greyscale images of ten classes, downloaded once.

    Args:
        folder: Folder of the IDX files, compressed (``.gz``) or not.
        mirrors: Base URLs to download the files from.
        checksums: File name to ``sha256:…`` of the compressed file; verified after a download.
        train: Prefix of the files to take the train and val splits from.
        test: Prefix of the files to test on; if it equals ``train``, the test split is split off the same images.
        val_fraction: Fraction of the training files for the val split, stratified by class; also of the test split
            if ``test`` equals ``train``.
        shape: Shape of one sample: channels, height, width.
        num_classes: Number of classes.
        augment: Random transform of training images.
        options: Arguments of ``DataModule``, such as ``batch_size``.

    Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998; Xiao et al., Fashion-MNIST: a
    Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017.
    """

    def __init__(
        self,
        *,
        folder: Path,
        mirrors: Sequence[str] = (),
        checksums: Mapping[str, str | None] | None = None,
        train: Prefix = "train",
        test: Prefix = "t10k",
        val_fraction: float = 0.1,
        shape: tuple[int, int, int] = (1, 28, 28),
        num_classes: int = 10,
        augment: Augment | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not 0 < val_fraction < 0.5:
            raise ValueError(f"data.val_fraction={val_fraction} is not in (0, 0.5); try 0.1")
        self.folder, self.mirrors, self.checksums = folder, list(mirrors), dict(checksums or {})
        self.train, self.test, self.val_fraction = train, test, val_fraction
        self.shape, self.num_classes, self.augment = shape, num_classes, augment
        self.classes = [*map(str, range(num_classes))]

    def prepare_data(self) -> None:
        """Download missing files."""
        for name in _names(self.train) + _names(self.test):
            if find_idx(self.folder, name) is None:
                download_file(name, self.mirrors, self.folder / name, self.checksums.get(name))

    def load(self) -> Splits:
        """Read all files, and split off val, and test if it has no files."""
        images, labels = self._read_pair(self.train)
        fraction, has_files = self.val_fraction, self.train != self.test
        fractions = (1 - fraction, fraction, 0.0) if has_files else (1 - 2 * fraction, fraction, fraction)
        train, val, rest = split_indices(
            len(labels), fractions, self.seed, labels.numpy(), num_folds=self.num_folds, fold=self.fold
        )
        return Splits(
            BatchedTensorDataset(images[train], labels[train], self.augment),
            BatchedTensorDataset(images[val], labels[val]),
            BatchedTensorDataset(*self._read_pair(self.test) if has_files else (images[rest], labels[rest])),
        )

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Read images of one object each, light on dark."""
        return read_images(paths, self.shape)

    def _read_pair(self, prefix: Prefix) -> tuple[Tensor, Tensor]:
        """Read uint8 images (N, 1, H, W) and class indices (N,) of the files with ``prefix``."""
        files = []
        for name in _names(prefix):
            file = find_idx(self.folder, name)
            if file is None:
                raise ValueError(f"data.folder={self.folder} has no {name}; put it there")
            files.append(file)
        images, labels = read_idx(files[0], 3), read_idx(files[1], 1)
        if (1, *images.shape[1:]) != self.shape:
            raise ValueError(
                f"data.shape={list(self.shape)}, but {files[0]} has {[1, *images.shape[1:]]}; make them agree"
            )
        if len(images) != len(labels):
            raise ValueError(f"{files[0]} has {len(images)} images, but {files[1]} {len(labels)} labels; replace both")
        if labels.max() >= self.num_classes:
            raise ValueError(
                f"data.num_classes={self.num_classes}, but {files[1]} has class {int(labels.max())}; increase it"
            )
        return images[:, None], labels.long()


def _names(prefix: Prefix) -> list[str]:
    return [f"{prefix}-{file_type}.gz" for file_type in ("images-idx3-ubyte", "labels-idx1-ubyte")]


def find_idx(folder: Path, name: str) -> Path | None:
    """Return the file ``name``, compressed or not."""
    return next(filter(Path.is_file, (folder / name, folder / name.removesuffix(".gz"))), None)


def read_idx(path: Path, ndim: int) -> Tensor:
    """Read an IDX file of bytes with ``ndim`` dimensions, compressed or not.

    Raises:
        ValueError: The file is damaged, truncated, or of another format.

    Source: LeCun, The MNIST Database of Handwritten Digits (the file format).
    """
    remedy = "delete it to download it again, or replace it"
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b" or path.suffix == ".gz":
        try:
            raw = read_gzip(path, expansion_limit(path))
        except ExpansionError:
            raise ValueError(
                f"{path}: expands to more than {MAX_EXPANSION:g} times its size; decompress it yourself if that "
                "is right"
            ) from None
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip file ({error}); {remedy}") from None
    header = 4 + 4 * ndim
    if raw[:4] != bytes((0, 0, 8, ndim)) or len(raw) < header:
        begin = raw[:4].hex() or "nothing"
        raise ValueError(
            f"{path}: begins with {begin}, so it is truncated or not an IDX file of {ndim} dimensions; {remedy}"
        )
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, header, 4)]
    if len(raw) != header + math.prod(shape) or not math.prod(shape):
        raise ValueError(f"{path}: {len(raw) - header} bytes of data, but its header says {shape}; {remedy}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).view(shape)
