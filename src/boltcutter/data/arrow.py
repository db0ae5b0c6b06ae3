"""Samples of a Hugging Face ``Dataset``, read directly from its memory-mapped Arrow table."""

from __future__ import annotations

import hashlib
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boltcutter.data.augment import Augment
from boltcutter.data.files import PAGE_BYTES, strided_windows
from boltcutter.data.image_io import is_encoded_image, read_image, read_image_shape
from boltcutter.data.loader import Pair
from boltcutter.data.sampler import Batch

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
FINGERPRINT_SAMPLES = 64


class ArrowDataset:
    """Inputs from columns of a Hugging Face ``Dataset``, fetched a whole batch at a time.

    Numbers are copied from views of the memory-mapped table. ``Dataset.__getitem__`` takes several times as long: it
    slices the table for each sample and converts numbers to Python objects.

    Args:
        dataset: A ``datasets.Dataset``.
        columns: An image column, a column of lists or bytes, or several columns of numbers, which are concatenated.
        targets: Class indices (N,) or regression targets (N, T) of all rows of ``dataset``.
        shape: Shape of one input. Images are resized and cropped to it.
        dtype: Dtype of numbers that are stored as bytes.
        indices: Rows of this split; None: all.
        augment: Random transform of a batch of inputs.
    """

    read_bytes = PAGE_BYTES

    def __init__(
        self,
        dataset: Any,
        columns: list[str],
        targets: Tensor,
        shape: tuple[int, ...],
        *,
        dtype: str = "uint8",
        indices: Indices | None = None,
        augment: Augment | None = None,
    ) -> None:
        self.dataset, self.columns, self.shape, self.dtype = dataset, columns, shape, dtype
        self.indices, self.augment = indices, augment
        self.targets: Array = targets.numpy() if indices is None else targets.numpy()[indices]
        self.is_image = is_image(dataset, columns)
        self._chunks: list[Any] | None = None  # arrays of numbers (N, …), or Arrow arrays of images
        self._windows: npt.NDArray[np.void] | None = None  # see _map_windows
        self._starts: Indices  # of each chunk: its first row, the row after its last, its address
        self._ends: Indices
        self._addresses: Indices

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs and targets of the samples in ``batch``.

        Raises:
            ValueError: A sample is damaged, missing, or has another shape.
        """
        rows = batch.indices if self.indices is None else self.indices.take(batch.indices)
        inputs = self._read(rows)
        targets = torch.from_numpy(self.targets.take(batch.indices, axis=0))
        return self.augment(inputs, batch) if self.augment else inputs, targets

    def read_all(self) -> Tensor:
        """Inputs of all samples, shape (N, …)."""
        return self._read(np.arange(len(self)) if self.indices is None else self.indices)

    def fingerprint(self) -> bytes:
        """Hash of all targets and of some inputs, independent of where files and cache are."""
        digest = hashlib.sha256(repr((self.columns, self.shape, self.targets.shape)).encode())
        digest.update(self.targets.tobytes())
        chosen = np.unique(np.linspace(0, len(self) - 1, FINGERPRINT_SAMPLES).astype(np.int64))
        digest.update(self._read(chosen if self.indices is None else self.indices[chosen]).numpy().tobytes())
        return digest.digest()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_chunks": None, "_windows": None}  # worker processes map the files themselves

    def _read(self, rows: Indices) -> Tensor:
        """Read the inputs of some rows of the table, shape (N, …)."""
        if self._chunks is None:
            self._chunks = self._open()
            sizes = np.array([len(chunk) for chunk in self._chunks])
            self._ends = np.cumsum(sizes)
            self._starts = self._ends - sizes
        if len(self._chunks) == 1 and not self.is_image:
            return self._reshape(self._chunks[0].take(rows, axis=0))
        owners = np.searchsorted(self._ends, rows, side="right")
        local = rows - self._starts[owners]
        if self._windows is None:
            places = zip(owners.tolist(), local.tolist(), rows.tolist(), strict=True)
            images = (_image_source(self._chunks[o][i].as_py(), self.columns[0], row) for o, i, row in places)
            shape = (self.shape[0], self.shape[1], self.shape[2])
            return torch.stack([read_image(path, shape, contents) for path, contents in images])
        found = self._windows[self._addresses[owners] + local * self._windows.itemsize]
        return self._reshape(found.view(self._chunks[0].dtype).reshape(len(rows), -1))

    def _open(self) -> list[Any]:
        """Open the chunks of the table; several columns become one chunk."""
        if self.is_image:
            return [chunk for chunk in arrow_column(self.dataset, self.columns[0]).chunks if len(chunk)]
        columns = [number_chunks(self.dataset, name, self.dtype) for name in self.columns]
        if len(columns) > 1:
            return [np.concatenate([np.concatenate(chunks).astype(np.float32) for chunks in columns], axis=1)]
        self._map_windows(columns[0])
        return columns[0]

    def _map_windows(self, chunks: list[Array]) -> None:
        """View the memory from the first to the last chunk as windows of one sample at each address.

        One NumPy indexing then copies samples of any chunks, in half the time of a copy for each sample. Memory between
        chunks may not be mapped, but only windows that begin at samples are read.
        """
        import pyarrow as pa

        addresses: Indices = np.array([chunk.ctypes.data for chunk in chunks], np.int64)
        low, high = int(addresses.min()), max(chunk.ctypes.data + chunk.nbytes for chunk in chunks)
        memory = np.frombuffer(pa.foreign_buffer(low, high - low, base=chunks), np.uint8)
        size = chunks[0][:1].nbytes
        self._windows, self._addresses = strided_windows(memory, 0, len(memory) - size + 1, size), addresses - low

    def _reshape(self, inputs: Array) -> Tensor:
        if inputs[0].size != math.prod(self.shape):
            raise ValueError(
                f"data.shape={list(self.shape)}, but data.input={','.join(self.columns)} has {inputs[0].size} numbers; "
                "correct one of them"
            )
        found = inputs if inputs.dtype == np.uint8 else inputs.astype(np.float32, copy=False)
        return torch.from_numpy(found.reshape(-1, *self.shape))


def arrow_column(dataset: Any, name: str) -> Any:
    """Return a column as a ``pyarrow.ChunkedArray``, without decoding it."""
    return dataset.data.column(name)


def is_image(dataset: Any, columns: list[str]) -> bool:
    """Whether inputs are encoded images: of type ``Image``, or bytes that begin like an image file."""
    import datasets

    if len(columns) != 1:
        return False
    if isinstance(dataset.features[columns[0]], datasets.Image):
        return True
    first = arrow_column(dataset, columns[0])[0].as_py()
    return isinstance(first, bytes) and is_encoded_image(first)


def infer_shape(dataset: Any, columns: list[str], dtype: str) -> tuple[int, ...]:
    """Return the shape of the first input: channels, height and width of an image, or the number of numbers."""
    if not is_image(dataset, columns):
        return (sum(number_chunks(dataset, name, dtype)[0].shape[1] for name in columns),)
    return read_image_shape(*_image_source(arrow_column(dataset, columns[0])[0].as_py(), columns[0], 0))


def _image_source(value: Any, column: str, row: int) -> tuple[Path, io.BytesIO | None]:
    """Path of an image, or its row, and its contents if they are in the table."""
    contents, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if contents is None and path is None:
        raise ValueError(f"data.input={column}: row {row} has no image; remove or replace it")
    return Path(path or f"row {row}"), None if contents is None else io.BytesIO(contents)


def number_chunks(dataset: Any, name: str, dtype: str) -> list[Array]:
    """View the chunks of a column of numbers as arrays (N, width)."""
    try:
        chunks = [view_array(chunk, dtype) for chunk in arrow_column(dataset, name).chunks if len(chunk)]
        _check_equal(np.array([chunk.shape[1] for chunk in chunks]), "numbers")
    except ValueError as error:
        raise ValueError(f"data: column {name}: {error}") from None
    return chunks


def class_names(dataset: Any, name: str, num_classes: int | None) -> list[str]:
    """Return the names of a ``ClassLabel``, the sorted texts of a column, or its integers up to the largest.

    Raises:
        ValueError: The column has other types, or another number of classes than ``num_classes``.
    """
    import datasets
    import pyarrow.compute as pc
    import pyarrow.types as types

    feature, column = dataset.features[name], arrow_column(dataset, name)
    if isinstance(feature, datasets.ClassLabel):
        names = list(feature.names)
    elif types.is_integer(column.type):
        names = [str(number) for number in range(num_classes or int(pc.max(column).as_py() or 0) + 1)]
    elif types.is_string(column.type) or types.is_large_string(column.type) or types.is_boolean(column.type):
        names = sorted(pc.unique(column.drop_null().cast("string")).to_pylist())
    else:
        raise ValueError(
            f"data.target={name}: a column of {column.type} has no classes; give one of integers or text, or set "
            "data.kind=regression"
        )
    if num_classes not in (None, len(names)):
        raise ValueError(
            f"data.num_classes={num_classes}, but data.target={name} has {len(names)} classes; set it to null"
        )
    return names


def class_indices(dataset: Any, name: str, names: list[str]) -> Tensor:
    """Return the class index of each row, shape (N,)."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    column = arrow_column(dataset, name)
    indices = column if types.is_integer(column.type) else pc.index_in(column.cast("string"), pa.array(names))
    found = pc.fill_null(indices, -1).to_numpy().astype(np.int64)
    unknown = np.flatnonzero((found < 0) | (found >= len(names)))
    if unknown.size:
        first = column[int(unknown[0])].as_py()
        raise ValueError(
            f"data.target={name}: {unknown.size} samples have an unknown class ({first}), but there are {len(names)} "
            "classes; correct them, or choose another split"
        )
    return torch.from_numpy(found)


def view_array(column: Any, dtype: str = "uint8") -> Array:
    """View an Arrow array of numbers, lists or bytes of ``dtype`` as an array (N, …), without a copy where possible."""
    import pyarrow as pa
    import pyarrow.types as types

    values, num_rows = column, len(column)
    while True:
        if isinstance(values, pa.ExtensionArray):  # such as Array2D
            values = values.storage
        if values.null_count:
            raise ValueError(f"{values.null_count} values are missing; remove or complete these rows")
        if types.is_list(values.type) or types.is_large_list(values.type):
            _check_equal(np.diff(values.offsets.to_numpy()), "numbers")
        elif not types.is_fixed_size_list(values.type):
            break
        values = values.flatten()
    kind = values.type
    if types.is_binary(kind) or types.is_large_binary(kind):
        _, offsets, contents = values.buffers()
        ends = np.frombuffer(offsets, np.int64 if types.is_large_binary(kind) else np.int32)
        ends = ends[values.offset : values.offset + len(values) + 1]
        _check_equal(np.diff(ends), "bytes")
        found: Array = np.frombuffer(contents, np.uint8)[ends[0] : ends[-1]].view(dtype)
    elif types.is_fixed_size_binary(kind):
        width = kind.byte_width
        found = np.frombuffer(values.buffers()[1], np.uint8)
        found = found[values.offset * width : (values.offset + len(values)) * width].view(dtype)
    elif types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        found = values.to_numpy(zero_copy_only=False)
    else:
        raise ValueError(f"a column of {kind}; images, numbers, lists of numbers or bytes are needed")
    return found.reshape(num_rows, -1)


def _check_equal(sizes: Array, unit: str) -> None:
    if sizes.size and sizes.min() != sizes.max():
        raise ValueError(f"rows of {sizes.min()} to {sizes.max()} {unit}; all need the same number")
