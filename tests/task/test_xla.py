import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import QUICK, Script, max_difference, require, saved_weights
from torch import Tensor, nn

from boltcutter.model.convnet import ConvNet
from boltcutter.model.gpt import GPT
from boltcutter.model.mlp import MLP
from boltcutter.task import xla
from boltcutter.task.errors import CompilerError
from boltcutter.task.xla import XLA

if sys.version_info >= (3, 11):
    require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="torchax")
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="torchax needs Python 3.11")
OVERRIDES = [*QUICK, "model=mlp", "test=false", "task.compile=xla"]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: MLP((1, 8, 8), 10, norm="layernorm"), lambda: torch.randint(256, (12, 1, 8, 8), dtype=torch.uint8)),
    "convnet": (lambda: ConvNet((1, 8, 8), 10, dropout=0.0), lambda: torch.rand(12, 1, 8, 8)),
    "gpt": (lambda: GPT((16,), 31, num_layers=1, hidden_size=16, num_heads=2), lambda: torch.randint(31, (4, 16))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_buffers_match_eager(name: str) -> None:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    eager = make()
    model = copy.deepcopy(eager)
    compiled = XLA(model)
    for _ in range(2):
        inputs = draw()
        there, here = eager(inputs), compiled(inputs)
        assert float((there - here).detach().abs().max()) < 1e-6
        for outputs in (there, here):
            outputs.square().mean().backward()
    gradients = [(p.grad, q.grad) for p, q in zip(eager.parameters(), model.parameters(), strict=True)]
    assert all((p is None) == (q is None) for p, q in gradients)
    assert max(float((p - q).abs().max()) for p, q in gradients if p is not None and q is not None) < 1e-6
    for one, other in zip(eager.buffers(), model.buffers(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert compiled.recompile_reasons() == []


def test_dropout_depends_on_the_torch_seed() -> None:
    compiled = XLA(nn.Dropout(0.25))
    inputs = torch.ones(20_000)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return compiled(inputs)

    first = draw(1)
    assert first.equal(draw(1))
    assert not first.equal(draw(2))
    assert first.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.02)


def test_recompilations_and_frozen_parameters() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    compiled = XLA(model)
    for rows in (4, 4, 2):
        compiled(torch.ones(rows, 3)).sum().backward()
    assert compiled.recompile_reasons() == ["inputs (2, 3) of float32, previously inputs (4, 3) of float32"]
    assert model.bias.grad is None
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[10.0] * 3] * 2


def test_equal_gradients_do_not_share_memory() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + self.one + self.other

    model = Twice()
    XLA(model)(torch.ones(2, 3)).sum().backward()
    assert model.one.grad is not None
    assert model.other.grad is not None
    model.one.grad.mul_(0)
    assert model.other.grad.tolist() == [2.0] * 3


def test_models_that_cannot_be_traced() -> None:
    class Branch(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs if inputs.sum() > 0 else -inputs

    with pytest.raises(CompilerError, match=r"^task.compile=xla: Branch .*; try task.compile=true") as error:
        XLA(Branch())(torch.ones(3))
    assert "\n" not in str(error.value)


def test_float64() -> None:
    model = nn.Linear(3, 2).double()
    compiled, inputs = XLA(model), torch.rand(4, 3, dtype=torch.float64)
    outputs = compiled(inputs)
    assert outputs.dtype == torch.float64
    assert torch.allclose(outputs, model(inputs), atol=1e-14)
    outputs.sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float64


def test_no_torch_accelerator_is_registered() -> None:
    XLA(nn.Linear(3, 2))(torch.ones(1, 3))
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is None or accelerator.type == "cuda"  # a build with CUDA has it, also without a GPU


def test_copies_compile_their_own_programs() -> None:
    compiled = XLA(nn.Linear(3, 2))
    outputs = compiled(torch.ones(1, 3))
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert torch.equal(other(torch.ones(1, 3)), outputs)
        assert other.model is not compiled.model


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "find_spec", lambda name: None)
    with pytest.raises(CompilerError, match=r"^task.compile=xla: torchax .* pip install"):
        XLA(nn.Linear(3, 2))


@pytest.mark.slow
def test_runs_match_eager_and_resume_bitwise_identically(script: Script, tmp_path: Path) -> None:
    steps = ["trainer.accumulate_grad_batches=2", "optimizer=sgd", "scheduler=constant", "model.norm=batchnorm"]
    dropped = ["model.dropout=0.1", "optimizer=adamw"]  # with other random numbers than in eager mode
    for name, overrides in {
        "eager": ["task.compile=false"],
        "alike": [],
        "complete": dropped,
        "resumed": [*dropped, "trainer.max_epochs=1"],
    }.items():
        done = script("train", *OVERRIDES, *steps, *overrides, f"folder={tmp_path}/{name}")
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "eager", tmp_path / "alike") < 1e-5
    assert "recompiles" in (tmp_path / "alike" / "metrics.csv").read_text().splitlines()[0]
    assert "recompiles" not in (tmp_path / "eager" / "metrics.csv").read_text().splitlines()[0]
    done = script("train", f"resume={tmp_path}/resumed", "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "complete", tmp_path / "resumed") == 0
    assert list(saved_weights(tmp_path / "alike")) == list(saved_weights(tmp_path / "eager"))


def test_mixed_precision_is_refused(script: Script, tmp_path: Path) -> None:
    done = script("train", *OVERRIDES, "trainer.precision=bf16-mixed", f"folder={tmp_path}/run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error: task.compile=xla does not support trainer.precision=bf16-mixed" in done.stderr
