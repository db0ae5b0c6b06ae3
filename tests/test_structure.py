from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence

from boltcutter.structure import (
    BatchError,
    count_samples,
    first_tensor,
    flatten,
    inputs_of,
    is_alike,
    make_batch,
    map_tensors,
    named_tensors,
    outline,
    split_batch,
    take_rows,
    targets_of,
    tensor_names,
    tensors,
    with_tensors,
)

SEVEN = torch.zeros(7, 2)
JAGGED = torch.nested.nested_tensor([torch.zeros(n) for n in (3, 1, 4, 1, 5, 9, 2)], layout=torch.jagged)
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
        {"x": [torch.zeros(length) for length in (3, 1, 4, 1, 5, 9, 2)], "label": torch.zeros(7)},
        ({"x": [torch.zeros(length) for length in (3, 1, 4, 1, 5, 9, 2)], "n": None}, torch.zeros(7)),
        ({"x": [torch.zeros(4)] * 7, "n": None}, torch.zeros(7)),
        {"ids": [[1, 2]] * 7, "label": [0] * 7},
        (JAGGED, SEVEN),
        (torch.zeros(20, 7, 3), SEVEN[:, 0] if SEVEN.ndim > 1 else SEVEN, torch.zeros(7, 2)),  # time first
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


PACKED = pack_sequence([torch.ones(length, 1) * length for length in (2, 3, 1)], enforce_sorted=False)


@dataclass(frozen=True)
class Frozen:
    audio: Tensor
    mask: Tensor | None = None


def test_a_packed_sequence_contains_its_data() -> None:
    batch = {"x": PACKED, "label": torch.arange(3)}
    assert [list(tensor.shape) for tensor in tensors(batch)] == [[6, 1], [3]]
    changed = map_tensors(batch, lambda tensor: tensor + 1)["x"]
    assert changed.batch_sizes is PACKED.batch_sizes
    assert changed.data.sum() == PACKED.data.sum() + 6
    padded, lengths = pad_packed_sequence(take_rows(batch, [1, 1, 2], 3)["x"], batch_first=True)
    assert padded[..., 0].tolist() == [[3, 3, 3], [3, 3, 3], [1, 0, 0]]
    assert lengths.tolist() == [3, 3, 1]
    with pytest.raises(BatchError, match="a batch is a PackedSequence"):
        split_batch(PACKED)


@pytest.mark.parametrize(
    "value", [Frozen(SEVEN), UserDict({"audio": SEVEN, "mask": None}), OrderedDict(audio=SEVEN, mask=None)]
)
def test_containers_of_any_class_are_changed_alike(value: Any) -> None:
    taken = take_rows(value, torch.tensor([0, 3]), 7)
    assert type(taken) is type(value)
    assert [len(part) for part in tensors(taken)] == [2]
    assert tensors(value)[0] is SEVEN
    assert flatten(value)[1] is None


def test_a_nested_tensor_contains_its_values() -> None:
    batch = {"x": JAGGED, "label": LABELS}
    assert [len(tensor) for tensor in tensors(batch)] == [25, 7]
    changed = map_tensors(batch, lambda tensor: tensor + 1)["x"]
    assert [len(part) for part in changed.unbind()] == [3, 1, 4, 1, 5, 9, 2]
    assert changed.values().tolist() == [1] * 25
    assert [name for name, _ in named_tensors(batch)] == ["['x'][0]", "['label']"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_strided_nested_tensor_contains_its_samples() -> None:
    strided = torch.nested.nested_tensor([torch.zeros(length) for length in (3, 1, 2)])
    assert count_samples((strided, LABELS[:3])) == 3
    assert [len(part) for part in tensors(strided)] == [3, 1, 2]
    assert [len(part) for part in map_tensors(strided, lambda tensor: tensor + 1).unbind()] == [3, 1, 2]
    assert [len(part) for part in take_rows(strided, [2, 0], 3).unbind()] == [2, 3]


def test_rows_of_nested_tensors_and_lists_are_taken() -> None:
    samples = [torch.full((length,), float(length)) for length in (3, 1, 2)]
    nested = torch.nested.nested_tensor(samples, layout=torch.jagged)
    assert [len(part) for part in take_rows((nested, LABELS[:3]), [2, 0], 3)[0].unbind()] == [2, 3]
    assert [len(part) for part in take_rows((samples, LABELS[:3]), [2, 0], 3)[0]] == [2, 3]
    assert take_rows((("one", "two", "three"), LABELS[:3]), [2, 0], 3)[0] == ("three", "one")


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"x": [SEVEN, Pair(SEVEN, None)]}, ["['x'][0]", "['x'][1].inputs"]),
        ((Frozen(SEVEN, MASK), LABELS), ["[0].audio", "[0].mask", "[1]"]),
        (SEVEN, [""]),
    ],
)
def test_tensors_are_named_by_the_expression_that_selects_them(batch: Any, names: list[str]) -> None:
    assert [name for name, _ in named_tensors(batch)] == names
    assert all(eval(f"batch{name}", {"batch": batch}) is tensor for name, tensor in named_tensors(batch))


def test_the_outline_of_inputs() -> None:
    value = {"a": [SEVEN, (LABELS, None)], "b": Frozen(SEVEN)}
    frozen = {"_target_": f"{__name__}.Frozen", "audio": "float32", "mask": "NoneType"}
    assert outline(value) == {"a": ["float32", ["int64", "NoneType"]], "b": frozen}
    assert is_alike({"a": [SEVEN, [SEVEN, None]], "b": Frozen(MASK)}, outline(value))
    for other in (SEVEN, {"a": SEVEN, "b": Frozen(SEVEN)}, {"a": [SEVEN], "b": Frozen(SEVEN)}, {"a": value["a"]}):
        assert not is_alike(other, outline(value))


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
