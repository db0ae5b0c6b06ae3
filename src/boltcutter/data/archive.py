"""Random access to samples in tar files, as WebDataset writes them."""

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

from boltcutter.data.files import strided_windows
from boltcutter.data.image_io import read_image

Array = npt.NDArray[Any]
INPUT_SUFFIXES = ("npy", "png", "jpg", "jpeg")
HEADER_BYTES = 128  # size of nearly all .npy headers
READ_VERSION: Any = np.lib.format.read_magic
READERS: dict[Any, Any] = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class TarShard:
    """One tar file with an input, ``<key>.npy``, ``.png`` or ``.jpg``, and a class, ``<key>.cls``, for each key.

    An index of all offsets is built once from the headers and cached; then any sample can be read directly.

    Args:
        path: The file, uncompressed.
        shape: Shape of one input; images are resized and cropped to it.
        cache_dir: Folder for the index.

    Raises:
        ValueError: The file is damaged, or a key has no input or no class.

    Source: Aizman et al., High Performance I/O for Large Scale Deep Learning, 2019 (WebDataset); POSIX.1-2001, pax.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], cache_dir: Path) -> None:
        self.path, self.shape, self.files = path, shape, (path,)
        stat = path.stat()
        key = hashlib.sha256(f"3 {path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
        index = cache_dir / f"{key}.npz"
        if not index.is_file():
            _write(index, build_index(path))
        with np.load(index, allow_pickle=False) as file:
            self.offsets, self.sizes = file["offsets"], file["sizes"]
            self.targets, self.dtype_indices, self.dtypes = (
                file["targets"],
                file["dtype_indices"],
                file["dtypes"].tolist(),
            )
        # Arrays of one dtype and size are read together.
        self.is_uniform = bool(
            (self.dtype_indices >= 0).all()
            and all((values == values[:1]).all() for values in (self.dtype_indices, self.sizes))
        )
        self._raw: Array | None = None
        self._bodies: Array | None = None  # strided windows: one for each offset where an array might begin

    def __len__(self) -> int:
        return len(self.offsets)

    def rows(self, chosen: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Read inputs (N, …) and class indices (N,) of some samples.

        Raises:
            ValueError: A sample is damaged.
        """
        if self._raw is None:
            self._raw = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
            if self.is_uniform and len(self):
                size = int(self.sizes[0])
                self._bodies = strided_windows(self._raw, 0, len(self._raw) - size + 1, size)
        return self._arrays(chosen), self.targets.take(chosen)

    def _arrays(self, chosen: npt.NDArray[np.int64]) -> Array:
        if self._bodies is None:
            return np.stack([self._input(index) for index in chosen.tolist()])
        found: Array = self._bodies[self.offsets.take(chosen)].view(self.dtypes[int(self.dtype_indices[0])])
        return found.reshape(len(chosen), -1)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_raw": None, "_bodies": None}  # worker processes map the file themselves

    def _input(self, index: int) -> Array:
        assert self._raw is not None
        begin, dtype_index = int(self.offsets[index]), int(self.dtype_indices[index])
        contents = self._raw[begin : begin + int(self.sizes[index])]
        if dtype_index >= 0:
            return contents.view(self.dtypes[dtype_index])
        if len(self.shape) != 3:
            raise ValueError(f"data.shape={list(self.shape)}, but {self.path} has images; try [3, 64, 64]")
        where = Path(f"{self.path}, sample {index}")
        shape = (self.shape[0], self.shape[1], self.shape[2])
        return read_image(where, shape, io.BytesIO(contents.tobytes())).numpy()


def build_index(path: Path) -> dict[str, Array]:
    """Index the samples of a tar file, in the order of the file.

    Returns:
        ``offsets`` and ``sizes`` in bytes (of ``.npy``, without the header), ``targets``, ``dtype_indices`` into
        ``dtypes`` (-1 for images), and ``dtypes``.

    Raises:
        ValueError: The file is damaged, or a key has no input or no class.
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
                key, _, suffix = name.partition(".")
                if member.offset_data + member.size > size:
                    raise ValueError(f"{member.name} is truncated")
                if member.isfile() and suffix.lower() in INPUT_SUFFIXES:
                    begin, dtype_index = 0, -1
                    if suffix.lower() == "npy":
                        begin, dtype = _parse_npy(member, archive.fileobj, headers)
                        dtype_index = dtypes.setdefault(dtype, len(dtypes))
                    inputs[f"{folder}/{key}"] = (member.offset_data + begin, member.size - begin, dtype_index)
                elif member.isfile() and suffix == "cls":
                    opened: Any = archive.extractfile(member)
                    classes[f"{folder}/{key}"] = int(opened.read())
    except (tarfile.TarError, ValueError, OSError) as error:
        raise ValueError(f"{path}: not a valid tar file of samples ({error}); replace it") from None
    if unpaired := sorted(inputs.keys() ^ classes.keys()):
        missing = "class (.cls)" if unpaired[0] in inputs else f"input ({', '.join(INPUT_SUFFIXES)})"
        raise ValueError(f"{path}: {unpaired[0].lstrip('/')} has no {missing}; write the file again")
    offsets, sizes, dtype_indices = np.array(list(inputs.values()), np.int64).reshape(-1, 3).T
    targets = np.array([classes[key] for key in inputs], np.int64)
    return {
        "offsets": offsets,
        "sizes": sizes,
        "dtype_indices": dtype_indices,
        "targets": targets,
        "dtypes": np.array([*dtypes], str),
    }


def _parse_npy(member: tarfile.TarInfo, file: Any, known: dict[bytes, tuple[int, int, str]]) -> tuple[int, str]:
    """Parse the header of a ``.npy`` member: the size of the header, and the dtype.

    Raises:
        ValueError: The member is damaged, or is not a C-contiguous array of numbers.
    """
    file.seek(member.offset_data)
    start = file.read(min(member.size, HEADER_BYTES))
    if start not in known:
        opened = io.BytesIO(start + file.read(min(member.size - len(start), 1 << 16)))
        try:
            read = READERS[READ_VERSION(opened)]
            shape, fortran_order, dtype = read(opened)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{member.name} is not a valid .npy file: {' '.join(str(error).split())}") from None
        if dtype.kind not in "iufb" or (fortran_order and len(shape) > 1):
            order = "Fortran" if fortran_order else "C"
            raise ValueError(f"{member.name} has {dtype} in {order} order; numbers in C order are needed")
        known[start] = (opened.tell(), math.prod(shape) * dtype.itemsize, dtype.str)
    begin, size, name = known[start]
    if begin + size != member.size:
        raise ValueError(f"{member.name} is truncated")
    return begin, name


def _write(path: Path, index: dict[str, Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with open(draft, "wb") as file:
        np.savez(file, allow_pickle=False, **index)
    draft.replace(path)
