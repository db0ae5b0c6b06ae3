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
        length: Number of rows.
        dtype: Of a row: a field for each column that all appended tables have, of the type that holds its values.
        dropped: Names of the other columns.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.length = 0
        self.dtype: np.dtype[Any] | None = None
        self.dropped: set[str] = set()
        self._file: IO[bytes] | None = None

    def append(self, table: Table) -> None:
        """Append the rows of a table, which has at least one column."""
        own = np.dtype([(name, column.dtype) for name, column in table.items()])
        dtype = row_type([self.dtype, own] if self.dtype is not None else [own])
        if self.dtype not in (dtype, None):
            self._convert(dtype)
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
        rows = np.empty(count_rows(table), dtype)
        for name in dtype.names or ():
            rows[name] = table[name]
        self._file.write(rows.tobytes())
        self.dtype, self.length = dtype, self.length + len(rows)
        self.dropped |= table.keys() - {*(dtype.names or ())}

    def read(self, rows: npt.NDArray[np.int64] | slice, names: Sequence[str] | None = None) -> Table:
        """Return columns of some rows, by default all."""
        dtype = self.dtype if self.dtype is not None else np.dtype([])
        names = (dtype.names or ()) if names is None else names
        if not self.length or not names or self._file is None:
            return {name: np.empty(0, dtype[name]) for name in names}
        self._file.flush()
        # Mapped anew each time: pages that were read count as memory of the process until the map is closed.
        found = np.memmap(self._file, dtype, "r", shape=(self.length,))
        return {name: np.array(found[name][rows]) for name in names}

    def close(self) -> None:
        """Remove the file."""
        if self._file:
            self._file.close()

    def _convert(self, dtype: np.dtype[Any]) -> None:
        """Write all rows again, as another type."""
        new, names, length = Spool(self.folder), dtype.names or (), self.length
        for begin in range(0, length if names else 0, ROWS_AT_ONCE):
            part = self.read(slice(begin, begin + ROWS_AT_ONCE), names)
            new.append({name: column.astype(dtype[name]) for name, column in part.items()})
        self.close()
        self._file = new._file
        self.dropped |= {*(self.dtype.names or () if self.dtype else ())}.difference(names)


def row_type(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """A field for each one that all dtypes have, of the type that holds the values of all."""
    names = [name for name in dtypes[0].names or () if all(name in (dtype.names or ()) for dtype in dtypes)]
    return np.dtype([(name, np.result_type(*(dtype[name] for dtype in dtypes))) for name in names])


def gather_rows(
    spool: Spool, dtype: np.dtype[Any], lengths: Sequence[int], places: npt.NDArray[np.int64], rank: int, every: int
) -> Table:
    """Return some rows of the spools of all ranks, those of the first rank first; all ranks must ask for the same.

    Args:
        spool: Of this rank.
        dtype: Of the rows of all ranks.
        lengths: Numbers of rows of the ranks that have samples of their own.
        places: Of the rows.
        rank: Of this process.
        every: Number of successive ranks that process the same samples; the first of them is asked.
    """
    ends = np.cumsum([0, *lengths])
    owners = np.searchsorted(ends, places, side="right") - 1
    mine = np.flatnonzero(owners * every == rank)
    own = spool.read(places[mine] - ends[rank // every], dtype.names) if len(mine) else {}
    found = np.empty(len(places), dtype)
    for rows, part in gather_objects((mine, own))[::every]:
        for name, column in part.items():
            found[name][rows] = column
    return {name: found[name] for name in dtype.names or ()}
