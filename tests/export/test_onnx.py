from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from boltcutter.export.command import quiet
from boltcutter.export.onnx import ONNX, Calibration, Int4, StaticInt8, choose_nodes
from boltcutter.export.program import TaskProgram
from boltcutter.export.runner import load_onnx, sha256
from boltcutter.export.settings import ExportError
from boltcutter.model.convnet import ConvNet
from boltcutter.model.gpt import GPT
from boltcutter.model.mlp import MLP
from boltcutter.task.classification import Classification
from boltcutter.task.language import LanguageModeling

ADAM = partial(torch.optim.Adam, lr=0.1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def language() -> TaskProgram:
    model = GPT((16,), 64, num_layers=1, hidden_size=128, bias=True, tie_embeddings=False)
    tokens = torch.randint(0, 64, (4, 16))
    return TaskProgram(LanguageModeling(model, optimizer=ADAM), (tokens, tokens), {})


def write(form: Any, program: TaskProgram, path: Path) -> float:
    """Return the norm of the error of the outputs, relative to that of the outputs."""
    inputs = program.with_cache(program.example)
    with quiet():
        form.write(program, path, lambda: iter([inputs]))
    call = load_onnx(path, 1, sha256(path))
    with torch.no_grad():
        (expected,) = program(*program.example)
    found, *_ = call(*(tensor.numpy() for tensor in inputs))
    assert call(*(tensor[:1].numpy() for tensor in inputs))[0].shape == (1, *expected.shape[1:])
    return float(np.linalg.norm(found - expected.numpy()) / np.linalg.norm(expected.numpy()))


@pytest.mark.slow
def test_linear_layers_are_packed_in_int4(language: TaskProgram, tmp_path: Path) -> None:
    assert write(ONNX(), language, tmp_path / "float32.onnx") < 1e-5
    assert write(Int4(), language, tmp_path / "int4.onnx") < 0.2
    graph = onnx.load(tmp_path / "int4.onnx").graph
    packed = {name for node in graph.node if node.op_type == "MatMulNBits" for name in node.input[1:4]}
    size = sum(numpy_helper.to_array(tensor).nbytes for tensor in graph.initializer if tensor.name in packed)
    linear = [part for part in language.core.modules() if isinstance(part, torch.nn.Linear)]
    assert len([node for node in graph.node if node.op_type == "MatMulNBits"]) == len(linear)
    assert size < 0.2 * sum(part.weight.numel() * 4 for part in linear)


@pytest.mark.slow
def test_products_of_activations_stay_in_float32(language: TaskProgram, tmp_path: Path) -> None:
    write(ONNX(), language, tmp_path / "float32.onnx")
    types, excluded = choose_nodes(tmp_path / "float32.onnx")
    assert types == ["Conv", "Gemm", "MatMul"]
    assert len([name for name in excluded if "MatMul" in name or "attention" in name]) == 2
    assert write(StaticInt8(), language, tmp_path / "int8.onnx") < 0.1


@pytest.mark.slow
def test_a_convolutional_network_computes_in_int8(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (8, 1, 16, 16), dtype=torch.uint8)
    task = Classification(ConvNet((1, 16, 16), 5), optimizer=ADAM)
    program = TaskProgram(task, (images, torch.zeros(8)), {})
    assert write(StaticInt8(), program, tmp_path / "int8.onnx") < 0.05
    nodes = onnx.load(tmp_path / "int8.onnx").graph.node
    assert [node.op_type for node in nodes].count("QuantizeLinear") >= 4
    assert nodes[-1].op_type == "Softmax"  # in float32


@pytest.mark.slow
def test_rare_activations_do_not_widen_the_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = torch.randint(0, 32, (64, 1, 16, 16), dtype=torch.uint8)
    program = TaskProgram(Classification(ConvNet((1, 16, 16), 5), optimizer=ADAM), (images, torch.zeros(64)), {})
    images[0, 0, 0, 0] = 255
    StaticInt8().write(program, tmp_path / "int8.onnx", lambda: iter([(images[:32],), (images[32:],)]))
    graph = onnx.load(tmp_path / "int8.onnx").graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    first = next(node for node in graph.node if node.op_type == "QuantizeLinear")
    assert constants[first.input[1]] * 255 == pytest.approx(31 / 255, rel=0.05)
    assert "histogram" not in capsys.readouterr().out


def test_layers_with_bias_are_split_for_int4(tmp_path: Path) -> None:
    task = Classification(MLP((64,), 5, hidden_sizes=[64]), optimizer=ADAM)
    program = TaskProgram(task, (torch.randn(4, 64), torch.zeros(4)), {})
    assert write(Int4(), program, tmp_path / "int4.onnx") < 0.15
    assert (tmp_path / "int4.onnx").stat().st_size < 0.4 * sum(p.numel() * 4 for p in program.core.parameters())


class Sort(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x[:, :, None] * x[:, None, :]) * self.weight


def test_an_operation_without_equivalent_is_named(tmp_path: Path) -> None:
    program = TaskProgram(Classification(Sort(), optimizer=ADAM), (torch.randn(3, 4), torch.zeros(3)), {})
    with pytest.raises(ExportError, match=r"Sort cannot be converted to ONNX: .*eigh?.*; use export=torch") as caught:
        write(ONNX(), program, tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)


def test_batches_are_calibrated_one_at_a_time() -> None:
    found = Calibration(["x"], ((torch.full((4, 2), number),) for number in range(3)))
    assert len(found) == 3
    for first in (0, 1):
        found.set_range(first, 3)
        for number in range(first, 3):
            feed = found.get_next()
            assert feed is not None
            assert (feed["x"] == number).all()
        assert found.get_next() is None
