from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boltcutter.data.table import RowGroupCache, open_row_groups


def read(path: Path, column: Any) -> Any:
    pq.write_table(pa.table({"input": column, "target": list(range(len(column)))}), path, row_group_size=2)
    return [group.read() for group in open_row_groups(path, ("input", "target"), "int16", RowGroupCache(2))]


def test_row_groups_are_arrays(tmp_path: Path) -> None:
    groups = read(tmp_path / "a.parquet", [[1, 2], [3, 4], [5, 6]])
    assert [inputs.tolist() for inputs, _ in groups] == [[[1, 2], [3, 4]], [[5, 6]]]
    assert [targets.tolist() for _, targets in groups] == [[0, 1], [2]]
    (inputs, _) = read(tmp_path / "b.parquet", [np.array([7, 8], np.int16).tobytes()])[0]
    assert inputs.tolist() == [[7, 8]]


def test_the_row_groups_used_last_are_kept(tmp_path: Path) -> None:
    read(tmp_path / "a.parquet", list(range(10)))
    cache = RowGroupCache(2)
    groups = open_row_groups(tmp_path / "a.parquet", ("input", "target"), "uint8", cache)
    for number in (0, 1, 0, 2):
        groups[number].rows(np.array([0]))
    assert [number for _, number in cache.cached] == [0, 2]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([[1, 2], [3]], "a.parquet: row group 0 cannot be read .values of different lengths.; replace the file"),
        ([b"ab", b"abcd"], "row group 0 cannot be read .values of 2 to 4 bytes."),
        ([[1, 2], None], "row group 0 cannot be read .1 values are missing."),
        (["a", "b"], "row group 0 cannot be read .a column of string; numbers, lists or bytes are needed."),
    ],
)
def test_entries_that_are_no_arrays_are_told(tmp_path: Path, column: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.parquet", column)


def test_damaged_files_and_missing_columns_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    read(path, list(range(10)))
    with pytest.raises(ValueError, match=r"^data.columns: .*a.parquet has no column x; it has input, target$"):
        open_row_groups(path, ("x", "target"), "uint8", RowGroupCache(1))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.parquet: not a valid Parquet file \(.*\); replace it$") as error:
        open_row_groups(path, ("input", "target"), "uint8", RowGroupCache(1))
    assert "\n" not in str(error.value)
