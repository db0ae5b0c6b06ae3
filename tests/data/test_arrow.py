from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

from boltcutter.data.arrow import ArrowDataset, view_array
from boltcutter.data.sampler import Batch

ROWS = [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(ROWS, pa.list_(pa.int16())),
        pa.array(ROWS, pa.large_list(pa.int16())),
        pa.array(ROWS, pa.list_(pa.int16(), 2)),
        pa.array([[[a], [b]] for a, b in ROWS], pa.list_(pa.list_(pa.int16()))),
        pa.array([np.array(row, np.int16).tobytes() for row in ROWS], pa.binary()),
        pa.array([np.array(row, np.int16).tobytes() for row in ROWS], pa.large_binary()),
        pa.array([np.array(row, np.int16).tobytes() for row in ROWS], pa.binary(4)),
    ],
    ids=lambda column: str(column.type),
)
def test_lists_and_bytes_are_viewed_as_rows(column: Any) -> None:
    assert view_array(column, "int16").tolist() == ROWS
    assert view_array(column, "int16").dtype == np.int16
    assert view_array(column[1:], "int16").tolist() == ROWS[1:]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1, 2], [3]]), "rows of 1 to 2 numbers"),
        (pa.array([[1], [1, 2, 3]]), "rows of 1 to 3 numbers"),
        (pa.array([b"ab", b"abcd"]), "rows of 2 to 4 bytes"),
        (pa.array([[1, 2], None]), "1 values are missing"),
        (pa.array([[1, None]]), "1 values are missing"),
        (pa.array(["a", "b"]), "a column of string; images, numbers, lists of numbers or bytes are needed"),
    ],
)
def test_other_columns_are_an_error(column: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        view_array(column)


def chunked(*chunks: list[Any]) -> Any:
    """A dataset with a column of these chunks."""
    return datasets.Dataset(pa.table({"x": pa.chunked_array(list(map(pa.array, chunks)))}))


def test_rows_of_several_chunks_are_read_in_order() -> None:
    found = ArrowDataset(chunked([[1, 2], [3, 4]], [[5, 6]]), ["x"], torch.arange(3), (2,))
    inputs, targets = found.__getitems__(Batch([2, 0, 1, 2]))
    assert inputs.tolist() == [[5, 6], [1, 2], [3, 4], [5, 6]]
    assert targets.tolist() == [2, 0, 1, 2]


def test_a_damaged_image_is_named_by_its_row_in_the_table() -> None:
    images = chunked([b"\x89PNG", b"\x89PNG"], [b"\x89PNG", b"damaged"])
    with pytest.raises(ValueError, match=r"^row 3: not a valid image"):
        ArrowDataset(images, ["x"], torch.zeros(4), (1, 2, 2)).__getitems__(Batch([3]))
