from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from boltcutter_logging.batches import count_samples, first_tensor

SEVEN = torch.zeros(7, 2)
Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass
class Fields:
    name: str
    inputs: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        SEVEN,
        [SEVEN, torch.zeros(7)],
        {"x": (SEVEN, 3)},
        UserDict({"name": "a", "x": SEVEN}),
        ({"x": SEVEN}, (torch.zeros(7, 3), None)),
        [None, SEVEN],
        Pair(SEVEN, torch.zeros(7)),
        Fields("a", SEVEN),
        SimpleNamespace(num_graphs=7, x=torch.zeros(40, 2)),
        Pair(SimpleNamespace(num_graphs=7), torch.zeros(40)),
        ["a"] * 7,
        (pack_sequence([torch.zeros(length, 2) for length in (3, 1, 4, 1, 5, 9, 2)], enforce_sorted=False), SEVEN),
    ],
    ids=repr,
)
def test_count_samples(batch: Any) -> None:
    assert count_samples(batch) == 7


@pytest.mark.parametrize("batch", [None, object(), {}, [], "seven", {"x": object()}])
def test_unknown_batch_size(batch: Any) -> None:
    assert count_samples(batch) in (None, 0)


def test_the_first_tensor() -> None:
    assert first_tensor({"name": "a", "x": [SEVEN]}) is SEVEN
    assert first_tensor([SEVEN, 3]) is SEVEN
    assert first_tensor(object()) is None
