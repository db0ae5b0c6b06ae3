"""Row groups of Parquet files."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Kept:
    """The row groups that were used last.

    Args:
        size: How many are held.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: OrderedDict[tuple[Path, int], tuple[Array, Array]] = OrderedDict()

    def get(self, group: RowGroup) -> tuple[Array, Array]:
        """Inputs and targets of a row group, read if it is not held."""
        key = (group.path, group.number)
        if key not in self.held:
            self.held[key] = group.read()
            while len(self.held) > self.size:
                self.held.popitem(last=False)
        self.held.move_to_end(key)
        return self.held[key]


class RowGroup:
    """Rows that Parquet can only read together.

    Args:
        path: Of the file.
        number: Of the row group.
        length: Rows.
        columns: Of inputs, then of targets.
        dtype: Of inputs that are bytes.
        kept: Shared with the others.
    """

    together = True  # reading one sample costs as much as reading all

    def __init__(self, path: Path, number: int, length: int, columns: tuple[str, str], dtype: str, kept: Kept) -> None:
        self.path, self.number, self.length = path, number, length
        self.columns, self.dtype, self.kept = columns, dtype, kept
        self.files = (path,)

    def __len__(self) -> int:
        return self.length

    def rows(self, chosen: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Inputs (N, …) and targets (N, …) of some rows."""
        inputs, targets = self.kept.get(self)
        return inputs.take(chosen, axis=0), targets.take(chosen, axis=0)

    def read(self) -> tuple[Array, Array]:
        """Inputs and targets of all rows.

        Raises:
            ValueError: It is damaged, or an entry is missing or of another length than the others.
        """
        import pyarrow as pa  # a quarter of a second, and only tables need it
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path, memory_map=True) as file:
                table = file.read_row_group(self.number, columns=list(self.columns))
            inputs, targets = (_array(table[name].combine_chunks(), self.dtype) for name in self.columns)
        except (pa.ArrowException, OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{self.path}: row group {self.number} cannot be read ({why}); replace the file") from None
        return inputs, targets


def row_groups(path: Path, columns: tuple[str, str], dtype: str, kept: Kept) -> list[RowGroup]:
    """All of a file, by what its end says of them.

    Raises:
        ValueError: It is no whole Parquet file, or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            about, names = file.metadata, file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path}: not a whole Parquet file ({why}); replace it") from None
    missing = [name for name in columns if name not in names]
    if missing:
        raise ValueError(f"data.columns: {path} has no column {missing[0]}; it has {', '.join(names)}")
    lengths = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
    return [RowGroup(path, n, length, columns, dtype, kept) for n, length in enumerate(lengths) if length]


def _array(column: Any, dtype: str) -> Array:
    """Numbers (N, …) of a column of numbers, of lists, or of bytes; without a copy where Arrow allows it."""
    import pyarrow as pa

    kind = column.type
    if column.null_count:
        raise ValueError(f"{column.null_count} entries are missing")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        values: Array = column.flatten().to_numpy(zero_copy_only=False)
        return _rows(values, len(column))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        wide = np.int64 if pa.types.is_large_binary(kind) else np.int32
        _, places, contents = column.buffers()
        ends = np.frombuffer(places, wide)[column.offset : column.offset + len(column) + 1]
        sizes = np.diff(ends)
        if sizes.size and sizes.min() != sizes.max():
            raise ValueError(f"entries of {sizes.min()} to {sizes.max()} bytes")
        return _rows(np.frombuffer(contents, np.uint8)[ends[0] : ends[-1]].view(dtype), len(column))
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        contents = np.frombuffer(column.buffers()[1], np.uint8)
        return _rows(contents[column.offset * width : (column.offset + len(column)) * width].view(dtype), len(column))
    found: Array = column.to_numpy(zero_copy_only=False)
    if found.dtype.kind not in "iufb":
        raise ValueError(f"a column of {kind}; numbers, lists or bytes are needed")
    return found


def _rows(values: Array, length: int) -> Array:
    if values.size % length:
        raise ValueError("entries of different lengths")
    return values.reshape(length, -1)
