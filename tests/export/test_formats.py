from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from boltcutter.export.formats import Int8, SafeTensors, TorchExport, quantize_weights
from boltcutter.export.program import Program, TaskProgram
from boltcutter.export.runner import load_torch, read_tensors
from boltcutter.model.convnet import ConvNet
from boltcutter.model.gpt import GPT
from boltcutter.model.resnet import ResNet
from boltcutter.task.classification import Classification
from boltcutter.task.language import LanguageModeling

ADAM = partial(torch.optim.Adam, lr=0.1)
IMAGES = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)


def classifier(model: nn.Module) -> Program:
    return TaskProgram(Classification(model, optimizer=ADAM), (IMAGES, torch.zeros(4)), {})


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
    call = load_torch(tmp_path / "model.pt2", None)
    for size in (1, 4):
        (found,) = call(IMAGES[:size].numpy())
        assert torch.allclose(torch.from_numpy(found), program(IMAGES[:size])[0], atol=tolerance)
    assert b"convnet.py" not in (tmp_path / "model.pt2").read_bytes()  # no traces of the code


@pytest.mark.slow
def test_int8_weights_are_a_quarter_of_the_size(tmp_path: Path) -> None:
    program = classifier(ResNet((3, 16, 16), 5))
    TorchExport().write(program, tmp_path / "float32.pt2", lambda: iter(()))
    Int8().write(program, tmp_path / "int8.pt2", lambda: iter(()))
    assert (tmp_path / "int8.pt2").stat().st_size < 0.28 * (tmp_path / "float32.pt2").stat().st_size


def test_a_tied_embedding_is_quantized() -> None:
    model = GPT((8,), 64, num_layers=1, hidden_size=32).eval()
    tokens = torch.randint(0, 64, (2, 8))
    expected = model(tokens)
    quantize_weights(model)
    assert model.token_embedding.weight_int8.dtype == torch.int8
    assert torch.allclose(model(tokens), expected, atol=0.05)


def test_plain_weights_are_bitwise_equal(tmp_path: Path) -> None:
    task = LanguageModeling(GPT((8,), 64, num_layers=1, hidden_size=32), optimizer=ADAM)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    SafeTensors().write(TaskProgram(task, (tokens, tokens), {}), tmp_path / "model.safetensors", lambda: iter(()))
    found = read_tensors(tmp_path / "model.safetensors")
    expected = task.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name] == weight.numpy().tobytes() for name, weight in expected.items())
