"""Pictures in IDX files: MNIST, Fashion-MNIST, and what else comes in that form."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from boltcutter.data.augment import Augment
from boltcutter.data.download import fetch
from boltcutter.data.module import DataModule, Splits, TensorSamples, cut, split_indices
from boltcutter.data.picture import read_pictures

Part = Literal["train", "t10k"]
KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


class MNIST(DataModule):
    """Small grey pictures of ten classes, downloaded once.

    Args:
        folder: Where the files are or go, with ``.gz`` or unpacked, under their own names.
        mirrors: URLs of folders that have the files.
        checksums: File name to ``sha256:…`` or ``md5:…`` of the packed file; checked after a download.
        class_names: In the order of their numbers.
        train: Which files to train on and to take the val split from.
        test: Which files to test on; where it equals ``train``, the test split is cut from the same pictures.
        val: Share of the training files, stratified by class; of the test split too if that is cut.
        shape: Of one sample: channels, height, width.
        num_classes: Number of classes.
        augment: Changes training pictures at random.
        batch_size: Samples in one step over all devices.
        seed: What split and order depend on.
        num_workers: Processes for each device that prepare batches.

    Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998; Xiao et al., Fashion-MNIST: a
    Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017.
    """

    def __init__(
        self,
        *,
        folder: Path,
        mirrors: Sequence[str] = (),
        checksums: Mapping[str, str | None] | None = None,
        class_names: Sequence[str] | None = None,
        train: Part = "train",
        test: Part = "t10k",
        val: float = 0.1,
        shape: tuple[int, int, int] = (1, 28, 28),
        num_classes: int = 10,
        augment: Augment | None = None,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, num_workers=num_workers)
        if not 0 < val < 0.5:
            raise ValueError(f"data.val={val} is not a share in (0, 0.5); try 0.1")
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(
                f"data.class_names has {len(class_names)} names, but data.num_classes={num_classes}; make them agree"
            )
        self.folder, self.mirrors, self.checksums = folder, list(mirrors), dict(checksums or {})
        self.train, self.test, self.val = train, test, val
        self.shape, self.num_classes, self.augment = shape, num_classes, augment
        self.classes = list(class_names or map(str, range(num_classes)))

    def prepare_data(self) -> None:
        """Download what the folder lacks."""
        for part in dict.fromkeys((self.train, self.test)):
            for kind in KINDS:
                name = f"{part}-{kind}.gz"
                if find(self.folder, name) is None:
                    try:
                        fetch(name, self.mirrors, self.folder / name, self.checksums.get(name))
                    except OSError as error:
                        raise OSError(f"{error}{self._hint(part)}") from None

    def load(self) -> Splits:
        """Read all files; cut val, and test where it has no files of its own."""
        images, labels = self._pair(self.train)
        everything, numbers = np.arange(len(labels)), labels.numpy()
        if self.train == self.test:
            shares = (1 - 2 * self.val, self.val, self.val)
            trained, validated, tested = split_indices(len(labels), shares, self.seed, numbers)
            test = TensorSamples(images[tested], labels[tested])
        else:
            trained, validated = cut(everything, self.val, self.seed, numbers)
            test = TensorSamples(*self._pair(self.test))
        train = TensorSamples(images[trained], labels[trained], self.augment)
        return Splits(train, TensorSamples(images[validated], labels[validated]), test)

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Pictures of one thing each, light on dark."""
        return read_pictures(paths, self.shape)

    def _pair(self, part: Part) -> tuple[Tensor, Tensor]:
        """Bytes (N, 1, H, W) and class numbers (N,) of the ``part`` files."""
        files = []
        for kind in KINDS:
            file = find(self.folder, f"{part}-{kind}.gz")
            if file is None:
                raise ValueError(f"data.folder={self.folder} has no {part}-{kind}.gz; put it there{self._hint(part)}")
            files.append(file)
        images, labels = read_idx(files[0], 3), read_idx(files[1], 1)
        if (1, *images.shape[1:]) != self.shape:
            raise ValueError(
                f"data.shape={list(self.shape)}, but {files[0]} has {[1, *images.shape[1:]]}; make them agree"
            )
        if len(images) != len(labels):
            raise ValueError(
                f"{files[0]} has {len(images)} pictures, but {files[1]} {len(labels)} labels; replace both"
            )
        if labels.max() >= self.num_classes:
            raise ValueError(
                f"data.num_classes={self.num_classes}, but {files[1]} has class {int(labels.max())}; give more"
            )
        return images[:, None], labels.long()

    def _hint(self, part: Part) -> str:
        """How to do with the other pair of files, where that is there."""
        other = "t10k" if part == "train" else "train"
        setting = "train" if part == self.train else "test"
        there = all(find(self.folder, f"{other}-{kind}.gz") for kind in KINDS)
        return f", or use the {other} files that are there by data.{setting}={other}" if there else ""


def find(folder: Path, name: str) -> Path | None:
    """The file of that name, packed or not, also with a dot before ``idx`` as some unpackers write it."""
    plain = name.removesuffix(".gz")
    names = (name, plain, name.replace("-idx", ".idx"), plain.replace("-idx", ".idx"))
    return next((folder / n for n in names if (folder / n).is_file()), None)


def read_idx(path: Path, ndim: int) -> Tensor:
    """Bytes of an IDX file, packed or not, with ``ndim`` dimensions.

    Raises:
        ValueError: The file is damaged, cut short, or something else.

    Source: LeCun, The MNIST Database of Handwritten Digits (the file format).
    """
    remedy = "delete it, so that it is downloaded again, or replace it"
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b" or path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip file ({error}); {remedy}") from None
    header = 4 + 4 * ndim
    if raw[:4] != bytes((0, 0, 8, ndim)) or len(raw) < header:
        begin = raw[:4].hex() or "nothing"
        raise ValueError(
            f"{path}: begins with {begin}, so it is no IDX file of {ndim} dimensions, or cut short; {remedy}"
        )
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, header, 4)]
    if len(raw) != header + math.prod(shape) or not math.prod(shape):
        raise ValueError(f"{path}: {len(raw) - header} bytes of data, but its header says {shape}; {remedy}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).view(shape)
