"""Tables of NumPy columns, written to CSV files."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boltcutter import files
from boltcutter.formatting import as_cell

Table = dict[str, npt.NDArray[Any]]  # columns of the same length, by name

CELLS_AT_ONCE = 100_000  # as text, of 128 bytes each
MAX_COLUMNS = 1000  # per entry of an output, in the tables of a test and of predictions


def count_rows(table: Mapping[str, Sequence[Any] | npt.NDArray[Any]]) -> int:
    """Number of rows; 0 without columns."""
    return len(next(iter(table.values()), ()))


def write_csv(path: Path, table: Mapping[str, Sequence[Any] | npt.NDArray[Any]], folder: Path | None = None) -> None:
    """Write a table with a header; numbers have as many digits as their dtype needs.

    Args:
        path: Of the file.
        table: Columns.
        folder: Folder of a run, out of which no link in it leads the file; None for a path of the user.
    """
    write_parts(path, [table], folder)


def write_parts(
    path: Path, parts: Iterable[Mapping[str, Sequence[Any] | npt.NDArray[Any]]], folder: Path | None = None
) -> None:
    """Write a table of which each part has the same columns and some of the rows, as ``write_csv`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = files.opener(folder) if folder else files.without_blocking
    with open(path, "w", newline="", encoding="utf-8", opener=opener) as file:
        os.set_blocking(file.fileno(), True)  # only opening a FIFO that nobody reads must not block
        writer = csv.writer(file, lineterminator="\n")
        for number, table in enumerate(parts):
            if not number:
                writer.writerow(map(as_cell, table))
            columns = [np.asarray(column) for column in table.values()]
            rows = max(1, CELLS_AT_ONCE // max(1, len(columns)))
            for begin in range(0, count_rows(table), rows):
                cells = (column[begin : begin + rows] for column in columns)
                texts = (map(as_cell, part) if part.dtype.kind in "OU" else part.astype(str) for part in cells)
                writer.writerows(zip(*texts, strict=True))


def spread(name: str, values: npt.NDArray[Any]) -> Table:
    """The column of values of shape (N,) or (N, 1), or the numbered columns of those of shape (N, C)."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return {name: values} if values.ndim == 1 else {f"{name}_{t}": values[:, t] for t in range(values.shape[1])}
