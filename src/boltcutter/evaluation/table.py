"""Tables of NumPy columns, and the CSV files that they are written to."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Table = dict[str, npt.NDArray[Any]]  # columns of the same length, by name

ROWS_AT_ONCE = 10_000


def count_rows(table: Mapping[str, Sequence[Any] | npt.NDArray[Any]]) -> int:
    """Number of rows; 0 without columns."""
    return len(next(iter(table.values()), ()))


def select_rows(table: Table, rows: Sequence[int] | npt.NDArray[Any]) -> Table:
    """The given rows, in this order."""
    chosen = np.asarray(rows, np.int64)
    return {name: column[chosen] for name, column in table.items()}


def concatenate(tables: Sequence[Table]) -> Table:
    """The rows of all tables, with the columns that all of them have."""
    common = [name for name in (tables[0] if tables else ()) if all(name in table for table in tables)]
    return {name: np.concatenate([table[name] for table in tables]) for name in common}


def write_csv(path: Path, table: Mapping[str, Sequence[Any] | npt.NDArray[Any]]) -> None:
    """Write a table with a header; numbers have as many digits as their dtype needs."""
    columns = [np.asarray(column) for column in table.values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        for begin in range(0, count_rows(table), ROWS_AT_ONCE):
            texts = (column[begin : begin + ROWS_AT_ONCE].astype(str) for column in columns)
            writer.writerows(zip(*texts, strict=True))
