"""Samples in tar files, as WebDataset writes them."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter.data.picture import read_picture

Array = npt.NDArray[Any]
INPUTS = ("npy", "png", "jpg", "jpeg")


class Archive:
    """One tar file: an input and a class for each key, ``<key>.npy``, ``.png`` or ``.jpg`` and ``<key>.cls``.

    Where each is stands in an index, which is made once by going through the headers; after that any sample is read by
    itself.

    Args:
        path: Of the file, not packed.
        shape: Of one input; pictures are scaled and cut to it.
        index: Folder where indices are kept.

    Raises:
        ValueError: The file is damaged, or a key lacks one of the two.

    Source: Aizman et al., High Performance I/O for Large Scale Deep Learning, 2019 (WebDataset); POSIX.1-2001, pax.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], index: Path) -> None:
        self.path, self.shape, self.files = path, shape, (path,)
        stat = path.stat()
        key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
        known = index / f"{key}.npz"
        if not known.is_file():
            _write(known, look_up(path))
        with np.load(known, allow_pickle=False) as file:
            self.offsets, self.sizes = file["offsets"], file["sizes"]
            self.targets, self.endings = file["targets"], file["endings"]
        self._raw: Array | None = None
        self._header: tuple[Array, str] | None = None  # of the .npy looked at last, and its dtype

    def __len__(self) -> int:
        return len(self.offsets)

    def rows(self, chosen: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Inputs (N, …) and classes (N,) of some samples.

        Raises:
            ValueError: One is damaged.
        """
        if self._raw is None:
            self._raw = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
        return self._arrays(chosen), self.targets[chosen]

    def _arrays(self, chosen: npt.NDArray[np.int64]) -> Array:
        sizes = self.sizes[chosen]
        if self._header is None or self.endings[chosen].any() or sizes.min() != sizes.max():
            return np.stack([self._input(place) for place in chosen.tolist()])
        assert self._raw is not None
        header, dtype, size = *self._header, int(sizes[0])
        found = np.empty((len(chosen), size), np.uint8)
        for row, begin in zip(found, self.offsets[chosen].tolist(), strict=True):
            row[:] = self._raw[begin : begin + size]
        same = size > len(header) and bool((found[:, : len(header)] == header).all())
        return found[:, len(header) :].view(dtype) if same else np.stack([self._input(p) for p in chosen.tolist()])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_raw": None}  # another process maps the file itself

    def _input(self, place: int) -> Array:
        assert self._raw is not None
        begin = int(self.offsets[place])
        contents = self._raw[begin : begin + int(self.sizes[place])]
        if self.endings[place]:
            if len(self.shape) != 3:
                raise ValueError(f"data.shape={list(self.shape)}: {self.path} has pictures; try [3, 64, 64]")
            where = Path(f"{self.path}, sample {place}")
            shape = (self.shape[0], self.shape[1], self.shape[2])
            return read_picture(where, shape, io.BytesIO(contents.tobytes())).numpy()
        file = io.BytesIO(contents.tobytes())
        try:
            found: Array = np.load(file, allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{self.path}: sample {place} is not a whole .npy file ({why}); replace it") from None
        # Others will have the same, and then need not be looked at one by one.
        self._header = (contents[: len(contents) - found.nbytes], found.dtype.str)
        return found.reshape(-1)


def look_up(path: Path) -> dict[str, Array]:
    """Where each input is and which class it has, in the order of the file.

    Raises:
        ValueError: The file is damaged, or a key lacks input or class.
    """
    inputs: dict[str, tuple[int, int, int]] = {}
    classes: dict[str, int] = {}
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                if member.offset_data + member.size > size:
                    raise ValueError(f"{member.name} is cut short")
                if member.isfile() and ending.lower() in INPUTS:
                    inputs[f"{folder}/{key}"] = (member.offset_data, member.size, INPUTS.index(ending.lower()))
                elif member.isfile() and ending == "cls":
                    opened: Any = archive.extractfile(member)
                    classes[f"{folder}/{key}"] = int(opened.read())
    except (tarfile.TarError, ValueError, OSError) as error:
        raise ValueError(f"{path}: not a whole tar file of samples ({error}); replace it") from None
    if alone := sorted(inputs.keys() ^ classes.keys()):
        lacks = "class (.cls)" if alone[0] in inputs else f"input ({', '.join(INPUTS)})"
        raise ValueError(f"{path}: {alone[0].lstrip('/')} has no {lacks}; write the file again")
    offsets, sizes, endings = np.array(list(inputs.values()), np.int64).reshape(-1, 3).T
    targets = np.array([classes[key] for key in inputs], np.int64)
    return {"offsets": offsets, "sizes": sizes, "endings": endings.astype(np.uint8), "targets": targets}


def _write(path: Path, found: dict[str, Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(draft, "wb") as file:
        np.savez(file, allow_pickle=False, **found)
    draft.replace(path)
