"""Samples in tar files, as WebDataset writes them."""

from __future__ import annotations

import hashlib
import io
import math
import secrets
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter.data.files import stretches
from boltcutter.data.picture import read_picture

Array = npt.NDArray[Any]
INPUTS = ("npy", "png", "jpg", "jpeg")
HEADER = 128  # bytes, in which nearly all headers of .npy files end
READ_VERSION: Any = np.lib.format.read_magic
READERS: dict[Any, Any] = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


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
        key = hashlib.sha256(f"2 {path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
        known = index / f"{key}.npz"
        if not known.is_file():
            _write(known, look_up(path))
        with np.load(known, allow_pickle=False) as file:
            self.offsets, self.sizes = file["offsets"], file["sizes"]
            self.targets, self.forms, self.dtypes = file["targets"], file["forms"], file["dtypes"].tolist()
        # Numbers of one dtype and length, which are copied without a look at each.
        self.alike = bool(
            (self.forms >= 0).all() and all((part == part[:1]).all() for part in (self.forms, self.sizes))
        )
        self._raw: Array | None = None
        self._bodies: Array | None = None  # one for each place where a sample's numbers might begin

    def __len__(self) -> int:
        return len(self.offsets)

    def rows(self, chosen: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Inputs (N, …) and classes (N,) of some samples.

        Raises:
            ValueError: One is damaged.
        """
        if self._raw is None:
            self._raw = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
            if self.alike and len(self):
                size = int(self.sizes[0])
                self._bodies = stretches(self._raw, 0, len(self._raw) - size + 1, size)
        return self._arrays(chosen), self.targets.take(chosen)

    def _arrays(self, chosen: npt.NDArray[np.int64]) -> Array:
        if self._bodies is None:
            return np.stack([self._input(place) for place in chosen.tolist()])
        found: Array = self._bodies[self.offsets.take(chosen)].view(self.dtypes[int(self.forms[0])])
        return found.reshape(len(chosen), -1)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_raw": None, "_bodies": None}  # another process maps the file itself

    def _input(self, place: int) -> Array:
        assert self._raw is not None
        begin, form = int(self.offsets[place]), int(self.forms[place])
        contents = self._raw[begin : begin + int(self.sizes[place])]
        if form >= 0:
            return contents.view(self.dtypes[form])
        if len(self.shape) != 3:
            raise ValueError(f"data.shape={list(self.shape)}: {self.path} has pictures; try [3, 64, 64]")
        where = Path(f"{self.path}, sample {place}")
        shape = (self.shape[0], self.shape[1], self.shape[2])
        return read_picture(where, shape, io.BytesIO(contents.tobytes())).numpy()


def look_up(path: Path) -> dict[str, Array]:
    """Where each input is, of what form, and which class it has, in the order of the file.

    Of ``.npy`` it is the numbers alone, and their form a place in ``dtypes``; that of a picture is -1.

    Raises:
        ValueError: The file is damaged, or a key lacks input or class.
    """
    inputs: dict[str, tuple[int, int, int]] = {}
    classes: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    headers: dict[bytes, tuple[int, int, str]] = {}
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                if member.offset_data + member.size > size:
                    raise ValueError(f"{member.name} is cut short")
                if member.isfile() and ending.lower() in INPUTS:
                    begin, form = 0, -1
                    if ending.lower() == "npy":
                        begin, dtype = _numbers(member, archive.fileobj, headers)
                        form = dtypes.setdefault(dtype, len(dtypes))
                    inputs[f"{folder}/{key}"] = (member.offset_data + begin, member.size - begin, form)
                elif member.isfile() and ending == "cls":
                    opened: Any = archive.extractfile(member)
                    classes[f"{folder}/{key}"] = int(opened.read())
    except (tarfile.TarError, ValueError, OSError) as error:
        raise ValueError(f"{path}: not a whole tar file of samples ({error}); replace it") from None
    if alone := sorted(inputs.keys() ^ classes.keys()):
        lacks = "class (.cls)" if alone[0] in inputs else f"input ({', '.join(INPUTS)})"
        raise ValueError(f"{path}: {alone[0].lstrip('/')} has no {lacks}; write the file again")
    offsets, sizes, forms = np.array(list(inputs.values()), np.int64).reshape(-1, 3).T
    targets = np.array([classes[key] for key in inputs], np.int64)
    return {"offsets": offsets, "sizes": sizes, "forms": forms, "targets": targets, "dtypes": np.array([*dtypes], str)}


def _numbers(member: tarfile.TarInfo, file: Any, known: dict[bytes, tuple[int, int, str]]) -> tuple[int, str]:
    """Where the numbers of a ``.npy`` begin in it, and of which dtype they are.

    Raises:
        ValueError: It is damaged, or has something else.
    """
    file.seek(member.offset_data)
    start = file.read(min(member.size, HEADER))
    if start not in known:
        opened = io.BytesIO(start + file.read(min(member.size - len(start), 1 << 16)))
        try:
            read = READERS[READ_VERSION(opened)]
            shape, columns_first, dtype = read(opened)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{member.name} is no whole .npy file: {' '.join(str(error).split())}") from None
        if dtype.kind not in "iufb" or (columns_first and len(shape) > 1):
            raise ValueError(f"{member.name} has {dtype} in an order of its own; numbers, row by row, are needed")
        known[start] = (opened.tell(), math.prod(shape) * dtype.itemsize, dtype.str)
    begin, size, kind = known[start]
    if begin + size != member.size:
        raise ValueError(f"{member.name} is cut short")
    return begin, kind


def _write(path: Path, found: dict[str, Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with open(draft, "wb") as file:
        np.savez(file, allow_pickle=False, **found)
    draft.replace(path)
