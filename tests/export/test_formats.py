from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from boltcutter.export.formats import Int8, SafeTensors, TorchExport, fold_batch_norms, quantize_weights
from boltcutter.export.program import Program, TaskProgram
from boltcutter.export.runner import load_torch, sha256
from boltcutter.model.convnet import ConvNet
from boltcutter.model.gpt import GPT
from boltcutter.task.classification import Classification
from boltcutter.task.language import LanguageModeling

ADAM = partial(torch.optim.Adam, lr=0.1)
IMAGES = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)


def classifier(model: nn.Module) -> Program:
    return TaskProgram(Classification(model, optimizer=ADAM), (IMAGES, torch.zeros(4)), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "tolerance"),
    [(TorchExport(), 1e-6), (TorchExport("bfloat16"), 0.02), (Int8(), 0.01), (Int8(dynamic=True), 0.01)],
    ids=["float32", "bfloat16", "int8", "int8-dynamic"],
)
def test_a_file_gives_nearly_the_same_outputs(form: Any, tolerance: float, tmp_path: Path) -> None:
    program = classifier(ConvNet((3, 16, 16), 5))
    before = {name: weight.clone() for name, weight in program.state_dict().items()}
    form.write(program, tmp_path / "model.pt2", lambda: iter(()))
    assert all(torch.equal(weight, before[name]) for name, weight in program.state_dict().items())
    call = load_torch(tmp_path / "model.pt2", None, sha256(tmp_path / "model.pt2"))
    for size in (1, 4):
        (found,) = call(IMAGES[:size].numpy())
        assert torch.allclose(torch.from_numpy(found), program(IMAGES[:size])[0], atol=tolerance)
    assert b"convnet.py" not in (tmp_path / "model.pt2").read_bytes()  # no traces of the code


def test_int8_weights_are_a_quarter_of_the_size_also_in_a_small_model(tmp_path: Path) -> None:
    program = classifier(ConvNet((3, 16, 16), 5))
    generator = torch.Generator().manual_seed(0)
    for weight in program.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)  # as after training
    Int8().write(program, tmp_path / "model.pt2", lambda: iter(()))
    assert (tmp_path / "model.pt2").stat().st_size < 0.28 * sum(4 * weight.numel() for weight in program.parameters())


class Normalized(nn.Module):
    """Two convolutions with BatchNorm: one with a bias; the other applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        for norm in self.norms:
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                nn.init.uniform_(tensor, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.first(x.float() / 255))
        return self.norms[2](self.second(self.norms[1](self.second(x)))).mean((2, 3))


def test_batch_norms_are_folded_into_convolutions_that_are_used_once() -> None:
    program = classifier(Normalized())
    folded = program.clone()
    fold_batch_norms(folded, program.capture())
    assert [name for name, part in folded.core.named_modules() if isinstance(part, nn.BatchNorm2d)] == [
        "norms.1",
        "norms.2",
    ]
    assert torch.allclose(folded(IMAGES)[0], program(IMAGES)[0], atol=1e-6)


def test_tied_weights_are_quantized_once() -> None:
    model = GPT((8,), 64, num_layers=1, hidden_size=32, tie_embeddings=False).eval()
    assert model.head is not None
    model.head.weight = model.token_embedding.weight
    tokens = torch.randint(0, 64, (2, 8))
    expected = model(tokens)
    quantize_weights(model, (nn.Embedding, nn.Linear))
    assert model.token_embedding.weight_int8 is model.head.weight_int8
    assert torch.allclose(model(tokens), expected, atol=0.05)


def test_plain_weights_are_bitwise_equal(tmp_path: Path) -> None:
    task = LanguageModeling(GPT((8,), 64, num_layers=1, hidden_size=32), optimizer=ADAM)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    SafeTensors().write(TaskProgram(task, (tokens, tokens), {}), tmp_path / "model.safetensors", lambda: iter(()))
    found = load_file(tmp_path / "model.safetensors")
    expected = task.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
