"""Rows of a table in a file without a name, so that memory does not grow with their number."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from boltcutter.protocols import gather_objects
from boltcutter.report.csv_table import Table, count_rows

ROWS_AT_ONCE = 10_000  # whose type is changed, 80 MB of 1,000 columns


class Spool:
    """Rows of a table in a file without a name, which goes with the process.

    Args:
        folder: On whose disk the file is, as that of temporary files may be in memory. Made with the first row.

    Attributes:
        dtype: Of a row: a field for each column that all appended tables have, of the type that holds its values.
        dropped: Names of the other columns.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dtype: np.dtype[Any] | None = None
        self.dropped: set[str] = set()
        self._length = 0
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def append(self, table: Table) -> None:
        """Append the rows of a table, which has at least one column."""
        before, own = self.dtype, np.dtype([(name, column.dtype) for name, column in table.items()])
        self.dtype = row_type([before, own]) if before else own
        self.dropped |= {*table, *(before.names or () if before else ())}.difference(self.dtype.names or ())
        if self._file is None:
            self._file = self._open()
        elif before != self.dtype:
            self._convert(before)
        self._file.write(to_rows(table, self.dtype).tobytes())
        self._length += count_rows(table)

    def read(self, rows: npt.NDArray[np.int64] | slice, names: Sequence[str] | None = None) -> Table:
        """Return columns of some rows, by default all."""
        names = (self.dtype.names or ()) if self.dtype and names is None else names or ()
        if not self._length or not names:
            return {name: np.empty(0, self.dtype[name]) for name in names if self.dtype}
        found = self._map(self.dtype)
        return {name: np.array(found[name][rows]) for name in names}

    def close(self) -> None:
        """Remove the file."""
        if self._file:
            self._file.close()

    def _map(self, dtype: Any) -> Any:
        """Map the file, anew each time: pages that were read count as memory of the process until it is closed."""
        assert self._file
        self._file.flush()
        return np.memmap(self._file, dtype, "r", shape=(self._length,))

    def _open(self) -> IO[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self.folder)

    def _convert(self, before: Any) -> None:
        """Write the rows again, with another type."""
        assert self.dtype
        new = self._open()
        for begin in range(0, self._length if before.itemsize else 0, ROWS_AT_ONCE):
            rows = self._map(before)[begin : begin + ROWS_AT_ONCE]
            new.write(to_rows({name: rows[name] for name in before.names}, self.dtype).tobytes())
        self.close()
        self._file = new


class GatheredRows:
    """The rows of the spools of all ranks, those of the first rank first.

    Args:
        spool: Of this rank.
        dtype: Of the rows of all ranks.
        lengths: Numbers of rows of ranks that have samples of their own.
        rank: Of this process.
        every: Number of successive ranks that process the same samples; those of the first one are read.
    """

    def __init__(self, spool: Spool, dtype: np.dtype[Any], lengths: Sequence[int], rank: int, every: int) -> None:
        self.spool, self.dtype, self.every = spool, dtype, every
        self.rank = -1 if rank % every else rank // every
        self._ends = np.cumsum([0, *lengths])

    def read(self, places: npt.NDArray[np.int64]) -> Table:
        """Return some rows; all ranks must ask for the same."""
        owners = np.searchsorted(self._ends, places, side="right") - 1
        mine = np.flatnonzero(owners == self.rank)
        own = self.spool.read(places[mine] - self._ends[self.rank], self.dtype.names) if len(mine) else {}
        found = np.empty(len(places), self.dtype)
        for rows, part in gather_objects((mine, own))[:: self.every]:
            for name, column in part.items():
                found[name][rows] = column
        return {name: found[name] for name in self.dtype.names or ()}


def row_type(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """A field for each one that all dtypes have, of the type that holds the values of all."""
    names = [name for name in dtypes[0].names or () if all(name in (dtype.names or ()) for dtype in dtypes)]
    return np.dtype([(name, np.result_type(*(dtype[name] for dtype in dtypes))) for name in names])


def to_rows(table: Table, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Rows with a field for each of some columns of a table."""
    rows = np.empty(count_rows(table), dtype)
    for name in dtype.names or ():
        rows[name] = table[name]
    return rows
