from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from boltcutter.structure import (
    BatchError,
    count_samples,
    first_tensor,
    inputs_of,
    make_batch,
    split_batch,
    targets_of,
    tensor_names,
    tensors,
    with_tensors,
)

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


class Padded(NamedTuple):
    audio: Tensor
    mask: Tensor


@dataclass
class Clip:
    audio: Tensor
    labels: Tensor


@dataclass
class Inputs:
    audio: Tensor
    mask: Tensor


LABELS = torch.arange(7)
MASK = torch.ones(7, 2)


@pytest.mark.parametrize(
    ("batch", "inputs"),
    [
        ((SEVEN, LABELS), SEVEN),
        ([SEVEN, MASK, LABELS], (SEVEN, MASK)),
        (({"audio": SEVEN, "mask": MASK}, LABELS), {"audio": SEVEN, "mask": MASK}),
        ({"audio": SEVEN, "labels": LABELS}, SEVEN),
        ({"target": LABELS, "audio": SEVEN, "mask": MASK}, {"audio": SEVEN, "mask": MASK}),
        (Pair(Padded(SEVEN, MASK), LABELS), Padded(SEVEN, MASK)),
        (Clip(SEVEN, LABELS), SEVEN),
    ],
    ids=repr,
)
def test_inputs_and_targets(batch: Any, inputs: Any) -> None:
    found, targets = split_batch(batch)
    assert targets is LABELS
    assert type(found) is type(inputs)
    assert list(map(id, tensors(found))) == list(map(id, tensors(inputs)))
    assert inputs_of(batch) is not None


@pytest.mark.parametrize("batch", [SEVEN, [SEVEN], {"audio": SEVEN, "mask": MASK}, {"labels": LABELS}, "text", None])
def test_a_batch_without_targets(batch: Any) -> None:
    with pytest.raises(BatchError, match=r"^data: a batch is a .*; return \(inputs, targets\)"):
        split_batch(batch)
    assert inputs_of(batch) is (SEVEN if isinstance(batch, list) else batch)
    assert targets_of(batch) is None


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (SEVEN, ["input"]),
        ({"audio": SEVEN, "more": {"mask": MASK, "text": "a"}}, ["audio", "more_mask"]),
        ((SEVEN, [MASK, MASK]), ["input_0", "input_1_0", "input_1_1"]),
        (Padded(SEVEN, MASK), ["audio", "mask"]),
        (Inputs(SEVEN, MASK), ["audio", "mask"]),
    ],
)
def test_tensors_are_named_and_replaced(value: Any, names: list[str]) -> None:
    assert tensor_names(value) == names
    found = tensors(value)
    new = [tensor + 1 for tensor in found]
    changed = with_tensors(value, new)
    assert type(changed) is type(value)
    assert all(a is b for a, b in zip(tensors(changed), new, strict=True))
    assert all(a is b for a, b in zip(tensors(value), found, strict=True))  # the value is as it was


def test_samples_of_a_list_have_a_tensor_each() -> None:
    ragged = [torch.zeros(length) for length in (3, 1, 4, 1, 5, 9, 2)]
    assert count_samples([ragged, LABELS]) == 7
    boxes = [{"boxes": torch.zeros(number, 4)} for number in (2, 5, 1)]
    assert count_samples(([torch.zeros(3, 8, 8)] * 3, boxes)) == 3


def test_batches_for_prediction() -> None:
    assert inputs_of(make_batch(SEVEN, [0, 2])).shape == (2, 2)
    assert [t.shape[0] for t in inputs_of(make_batch(Padded(SEVEN, MASK), [1]))] == [1, 1]
    samples = [(torch.ones(length), 0) for length in (2, 5)]

    def collate(some: list[Any]) -> tuple[Tensor, Tensor]:
        return pad_sequence([tone for tone, _ in some], True), torch.tensor([kind for _, kind in some])

    assert inputs_of(make_batch(samples, [0, 1], collate)).tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert inputs_of(make_batch([{"x": torch.ones(2)}] * 3, range(3)))["x"].shape == (3, 2)
