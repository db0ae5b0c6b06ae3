from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from boltcutter.replay.batches import IndivisibleBatchError, take_rows, without_rows
from boltcutter.structure import tensors

X, Y = torch.arange(12.0).reshape(4, 3), torch.arange(4)
Pair = namedtuple("Pair", "x y")


@dataclass
class Both:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    "batch", [(X, Y), [X, Y], {"x": X, "y": Y}, Pair(X, Y), Both(X, Y), {"x": X, "y": Y, "weight": torch.tensor(0.5)}]
)
def test_rows_are_taken_out_of_batches_of_any_structure(batch: Any) -> None:
    left = without_rows(batch, [1])
    assert type(left) is type(batch)
    assert tensors(left)[0].tolist() == X[[0, 2, 3]].tolist()
    assert tensors(left)[1].tolist() == [0, 2, 3]
    assert tensors(take_rows(batch, [2, 2]))[1].tolist() == [2, 2]


def test_lists_of_samples_are_divided() -> None:
    batch = [[torch.zeros(n) for n in (2, 5, 3)], torch.tensor([7, 8, 9])]
    left = without_rows(batch, [0])
    assert [len(each) for each in left[0]] == [5, 3]
    assert left[1].tolist() == [8, 9]


def test_what_cannot_be_divided_is_said() -> None:
    with pytest.raises(IndivisibleBatchError, match="alone"):
        without_rows((X[:1], Y[:1]), [0])
    with pytest.raises(IndivisibleBatchError, match="told apart"):
        take_rows(object(), [0])
