"""Row groups of Parquet files."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class RowGroupCache:
    """Least-recently-used cache of row groups.

    Args:
        size: Maximum number of row groups.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.cached: OrderedDict[tuple[Path, int], tuple[Array, Array]] = OrderedDict()

    def get(self, group: RowGroup) -> tuple[Array, Array]:
        """Return inputs and targets of a row group, reading it if it is not cached."""
        key = (group.path, group.number)
        if key not in self.cached:
            self.cached[key] = group.read()
            while len(self.cached) > self.size:
                self.cached.popitem(last=False)
        self.cached.move_to_end(key)
        return self.cached[key]


class RowGroup:
    """A row group of a Parquet file, which can only be read as a whole.

    Args:
        path: The file.
        number: Number of the row group in the file.
        num_rows: Number of rows.
        columns: Names of the columns of inputs and targets.
        dtype: Dtype of inputs that are stored as bytes.
        cache: Cache shared with the other row groups.
    """

    is_block = True  # reading one sample costs as much as reading all

    def __init__(
        self, path: Path, number: int, num_rows: int, columns: tuple[str, str], dtype: str, cache: RowGroupCache
    ) -> None:
        self.path, self.number, self.num_rows = path, number, num_rows
        self.columns, self.dtype, self.cache = columns, dtype, cache
        self.files = (path,)

    def __len__(self) -> int:
        return self.num_rows

    def rows(self, chosen: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Return inputs (N, …) and targets (N, …) of some rows."""
        inputs, targets = self.cache.get(self)
        return inputs.take(chosen, axis=0), targets.take(chosen, axis=0)

    def read(self) -> tuple[Array, Array]:
        """Read inputs and targets of all rows.

        Raises:
            ValueError: The row group is damaged, or values are missing or differ in length.
        """
        import pyarrow as pa  # imported here: takes 0.25 s
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path, memory_map=True) as file:
                table = file.read_row_group(self.number, columns=list(self.columns))
            inputs, targets = (_array(table[name].combine_chunks(), self.dtype) for name in self.columns)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.path}: row group {self.number} cannot be read ({reason}); replace the file"
            ) from None
        return inputs, targets


def open_row_groups(path: Path, columns: tuple[str, str], dtype: str, cache: RowGroupCache) -> list[RowGroup]:
    """List the row groups of a Parquet file from its footer, without reading them.

    Raises:
        ValueError: The file is damaged, has no such column, or pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise ValueError(f"{path}: pyarrow is not installed; pip install 'boltcutter[tabular]'") from None
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            metadata, names = file.metadata, file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a valid Parquet file ({reason}); replace it") from None
    missing = [name for name in columns if name not in names]
    if missing:
        raise ValueError(f"data.columns: {path} has no column {missing[0]}; it has {', '.join(names)}")
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return [RowGroup(path, n, size, columns, dtype, cache) for n, size in enumerate(sizes) if size]


def _array(column: Any, dtype: str) -> Array:
    """Convert a column of numbers, lists or bytes to an array (N, …), without a copy where Arrow allows it."""
    import pyarrow as pa

    kind = column.type
    if column.null_count:
        raise ValueError(f"{column.null_count} values are missing")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        values: Array = column.flatten().to_numpy(zero_copy_only=False)
        return _rows(values, len(column))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        offset_dtype = np.int64 if pa.types.is_large_binary(kind) else np.int32
        _, offsets, contents = column.buffers()
        ends = np.frombuffer(offsets, offset_dtype)[column.offset : column.offset + len(column) + 1]
        sizes = np.diff(ends)
        if sizes.size and sizes.min() != sizes.max():
            raise ValueError(f"values of {sizes.min()} to {sizes.max()} bytes")
        return _rows(np.frombuffer(contents, np.uint8)[ends[0] : ends[-1]].view(dtype), len(column))
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        contents = np.frombuffer(column.buffers()[1], np.uint8)
        return _rows(contents[column.offset * width : (column.offset + len(column)) * width].view(dtype), len(column))
    found: Array = column.to_numpy(zero_copy_only=False)
    if found.dtype.kind not in "iufb":
        raise ValueError(f"a column of {kind}; numbers, lists or bytes are needed")
    return found


def _rows(values: Array, num_rows: int) -> Array:
    if values.size % num_rows:
        raise ValueError("values of different lengths")
    return values.reshape(num_rows, -1)
