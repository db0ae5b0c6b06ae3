from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from boltcutter.export.program import ModuleProgram, TaskProgram, select_inputs
from boltcutter.export.settings import ExportError
from boltcutter.model.gpt import GPT
from boltcutter.model.mlp import MLP
from boltcutter.task.classification import Classification
from boltcutter.task.language import LanguageModeling
from boltcutter.task.regression import Regression

ADAM = partial(torch.optim.Adam, lr=0.1)
IMAGES = torch.randint(0, 256, (6, 1, 4, 4), dtype=torch.uint8)


def test_images_become_probabilities_for_any_batch_size() -> None:
    task = Classification(MLP((1, 4, 4), 3, dropout=0.5), optimizer=ADAM)
    program = TaskProgram(task, (IMAGES, torch.zeros(6, dtype=torch.int64)), {})
    captured: Any = program.capture().module()
    for size in (1, 6):
        expected = task.eval().predict_step(IMAGES[:size], 0)
        assert torch.allclose(captured(IMAGES[:size])[0], expected)
    assert program.split((IMAGES, torch.ones(6)))[0][0] is IMAGES
    assert torch.allclose(program.convert(torch.bfloat16)(IMAGES)[0], expected, atol=0.02)
    assert next(program.core.parameters()).dtype == torch.float32


def test_values_are_in_the_unit_of_the_target() -> None:
    statistics = {"columns": ["a", "b"], "numbers": {"a": [0.0, 5.0, 2.0], "b": [0.0, -1.0, 4.0]}, "categories": {}}
    task = Regression(MLP((2,), 1, hidden_sizes=[8]), optimizer=ADAM)
    task.mean.fill_(100.0)
    task.std.fill_(20.0)
    features = torch.randn(5, 2)
    program = TaskProgram(task, (features, torch.zeros(5, 1)), statistics)
    (rows,), _ = program.split((features, torch.zeros(5, 1)))
    assert torch.allclose(rows[:, 0].float(), features[:, 0] * 2 + 5)
    captured: Any = program.capture().module()
    assert torch.allclose(captured(rows)[0], task.predict_step(features, 0), atol=1e-4)
    assert abs(program.convert(torch.bfloat16)(rows)[0].mean() - 100) < 40  # mean and deviation stay in float32


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_length_of_a_text_is_dynamic(position: Any) -> None:
    task = LanguageModeling(GPT((8,), 16, num_layers=1, hidden_size=16, position=position), optimizer=ADAM)
    tokens = torch.randint(0, 16, (3, 8), dtype=torch.int32)
    program = TaskProgram(task, (tokens, tokens), {})
    captured: Any = program.capture().module()
    assert program.dimensions == [{0: "batch", 1: "length"}]
    assert program.graph_outputs == ["logits", "present.0.key", "present.0.value"]
    for length in (1, 5, 8):
        found, *cache = captured(*program.with_cache((tokens[:1, :length].long(),)))
        assert torch.allclose(found, task.model(tokens[:1, :length]), atol=1e-5)
        assert all(tensor.shape == (1, 4, length, 4) for tensor in cache)
    found, *cache = captured(*program.with_cache((tokens[:, :4].long(),)))
    for part in tokens[:, 4:].long().split([1, 3], dim=1):
        logits, *cache = captured(part, *cache)
        found = torch.cat([found, logits], dim=1)
    assert torch.allclose(found, task.model(tokens), atol=1e-5)


class Recurrent(nn.Module):
    """A language model that caches its state."""

    supports_cache, context_length = True, 8

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        states = self.embedding(tokens.long()).cumsum(dim=1) + (cache[0] if cache else 0)
        if cache is not None:
            cache[:] = [states[:, -1:]]
        return self.layer(states)


def test_a_cache_of_another_structure_is_not_exported() -> None:
    task, tokens = LanguageModeling(Recurrent(), optimizer=ADAM), torch.randint(0, 16, (3, 8))
    program = TaskProgram(task, (tokens, tokens), {})
    captured: Any = program.capture().module()
    assert program.graph_inputs == ["tokens"]
    assert torch.allclose(captured(tokens[:, :5])[0], task.model(tokens[:, :5]))


class Step(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        scores = self.layer(batch["x"]) * batch["weight"][:, None]
        return {"score": scores[:, 0], "best": scores.argmax(dim=1)}


def test_a_predict_step_takes_the_tensors_that_it_uses() -> None:
    batch = {"name": ["a", "b", "c"], "x": torch.randn(3, 4), "weight": torch.rand(3), "y": torch.zeros(3)}
    program = ModuleProgram(Step(), batch)
    assert (program.inputs, program.outputs) == (["input_0", "input_1"], ["score", "best"])
    (x, weight), targets = program.split(batch)
    assert x is batch["x"]
    assert weight is batch["weight"]
    assert targets is batch["y"]
    captured: Any = program.capture().module()
    found = captured(x[:1], weight[:1])
    expected = program.task.predict_step({"x": x[:1], "weight": weight[:1]}, 0)
    assert torch.allclose(found[0], expected["score"])
    assert found[1].dtype == torch.int64
    card = {"takes": program.takes, "leaves": 4, "inputs": [{"leaf": leaf} for leaf in program.used]}
    assert [tensor is given for tensor, given in zip(select_inputs(batch, card), (x, weight), strict=True)] == [
        True
    ] * 2


class Forward(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.example_input_array = (torch.zeros(2, 4), torch.zeros(2, 2))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.layer(x) + shift


def test_forward_takes_the_structure_of_the_example() -> None:
    task, x, shift = Forward(), torch.randn(5, 4), torch.randn(5, 2)
    program = ModuleProgram(task, [x, shift])
    captured: Any = program.capture().module()
    assert torch.allclose(captured(x, shift)[0], task(x, shift))
    assert program.split([x, shift])[0] == (x, shift)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def test_code_that_cannot_be_captured_is_named() -> None:
    task = Classification(Branch(), optimizer=ADAM)
    with pytest.raises(ExportError) as caught:
        TaskProgram(task, (torch.randn(3, 4), torch.zeros(3)), {}).capture()
    message = str(caught.value)
    assert message.startswith("export: Branch cannot be captured by torch.export: ")
    assert "test_program.py:" in message
    assert "\n" not in message


class Padded(NamedTuple):
    audio: Tensor
    mask: Tensor


@dataclass
class Clip:
    audio: Tensor
    mask: Tensor


class Mean(nn.Module):
    """The mean over the steps that are no padding, of inputs of any structure."""

    def __init__(self, read: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.read, self.layer = read, nn.Linear(1, 3)

    def forward(self, inputs: Any) -> Tensor:
        audio, mask = self.read(inputs)
        return self.layer((audio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True))  # (B, 3)


def pad(count: int, length: int) -> tuple[Tensor, Tensor]:
    lengths = torch.arange(count) % length + 1
    return torch.rand(count, length), (torch.arange(length) < lengths[:, None]).float()


STRUCTURES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "dict": (lambda audio, mask: {"audio": audio, "mask": mask}, lambda x: (x["audio"], x["mask"])),
    "tuple": (lambda audio, mask: (audio, mask), tuple),
    "list": (lambda audio, mask: [audio, mask], tuple),
    "named tuple": (Padded, tuple),
    "dataclass": (Clip, lambda x: (x.audio, x.mask)),
    "nested": (lambda audio, mask: {"a": [audio, {"b": mask, "c": "text"}]}, lambda x: (x["a"][0], x["a"][1]["b"])),
    "steps first": (lambda audio, mask: (audio.T, mask.T), lambda x: (x[0].T, x[1].T)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_inputs_of_any_structure_and_length(structure: str) -> None:
    make, read = STRUCTURES[structure]
    batches: list[Any] = [(make(*pad(*size)), torch.zeros(size[0])) for size in ((5, 11), (2, 4), (2, 6))]
    task = Classification(Mean(read), optimizer=ADAM).eval()
    program = TaskProgram(task, batches[0], {}, batches[1:])
    first, second = ("length", "batch") if structure == "steps first" else ("batch", "length")
    assert program.dimensions == [{0: first, 1: second}] * 2
    captured: Any = program.capture().module()
    for size in ((1, 2), (5, 11), (3, 200)):
        batch = make(*pad(*size)), torch.zeros(size[0])
        inputs, targets = program.split(batch)
        assert targets is batch[1]
        assert program.count(inputs) == size[0]
        expected = task.predict_step(batch, 0)
        assert torch.allclose(captured(*inputs)[0], expected, atol=1e-6)
        assert torch.allclose(captured(*program.select([0], inputs))[0], expected[:1], atol=1e-6)


@pytest.mark.parametrize("kind", ["PackedSequence", "nested tensor"])
def test_inputs_without_a_dimension_for_lengths_are_refused(kind: str) -> None:
    def inputs() -> Any:
        samples = [torch.rand(length) for length in (3, 2)]
        return {
            "audio": pack_sequence(samples)
            if kind == "PackedSequence"
            else torch.nested.nested_tensor(samples, layout=torch.jagged)
        }

    task = Classification(nn.Identity(), optimizer=ADAM)
    with pytest.raises(ExportError, match=rf"are a {kind}, .*; return padded tensors from collate_fn"):
        TaskProgram(task, (inputs(), torch.zeros(2)), {}, [])


def test_a_list_with_a_tensor_for_each_sample_has_no_fixed_number_of_inputs() -> None:
    batches = [([torch.rand(length) for length in range(1, count)], torch.zeros(count - 1)) for count in (5, 3)]
    task = Classification(Mean(tuple), optimizer=ADAM)
    with pytest.raises(ExportError, match=r"2 tensors as inputs, and another one 4, .*; pad and stack the samples"):
        TaskProgram(task, batches[0], {}, batches[1:])
