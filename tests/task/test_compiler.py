from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import QUICK, Script, max_difference, require, saved_weights
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from boltcutter.task.compiler import Inductor, forbids_graphs

OVERRIDES = [*QUICK, "model=mlp", "test=false", "optimizer=sgd"]
TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]


class Counting(nn.Module):
    """Needs a recompilation in each call, as it has a changing attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs * self.calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within torch's compiler
def test_recompilations_are_counted_with_their_reason() -> None:
    require("g++", install="apt-get install g++")
    model = Counting()
    compiled = Inductor(model)
    found = [float(compiled(torch.ones(()))) for _ in range(2)]
    assert found == [1, 2]
    (reason,) = compiled.recompile_reasons()
    assert "calls" in reason
    assert Inductor(Counting()).recompile_reasons() == []  # another model has no recompilations


@pytest.fixture(scope="module")
def eager(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eager") / "run"
    done = script("train", *OVERRIDES, f"folder={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="default"),
        pytest.param(["trainer=ddp", *TWO], id="ddp"),
        pytest.param(["trainer=ddp", *TWO, "trainer.strategy.start_method=fork"], id="fork"),
        pytest.param(["trainer=ddp", *TWO, "trainer.strategy.start_method=spawn"], id="spawn"),
        pytest.param(["trainer=fsdp2", *TWO], id="fsdp2"),
        pytest.param(["trainer=fsdp2", *TWO, "trainer.strategy.tensor_parallel_size=2"], id="tensor parallel"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_training_is_the_same_and_resumes_without_compilation(
    script: Script, eager: Path, tmp_path: Path, overrides: list[str]
) -> None:
    run = tmp_path / "run"
    done = script("train", *OVERRIDES, *overrides, "task.compile=true", f"folder={run}", fresh=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert max_difference(eager, run) < 1e-6  # and the same names
    assert "recompiles" in (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "recompiles  " in done.stdout
    done = script("train", f"resume={run}", "task.compile=false", "trainer.max_epochs=3", fresh=True, timeout=400)
    assert done.returncode == 0, done.stderr
    done = script("train", f"resume={run}", "task.compile=true", "trainer.max_epochs=4", fresh=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert saved_weights(run).keys() == saved_weights(eager).keys()


class Replayed(nn.Module):
    """Returns the same memory at each call, as a CUDA graph does, and records how it was compiled and called."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.modes, self.calls = torch.zeros(2), list[Any](), list[str]()
        self.stance = "default"

    def compile(self, **options: Any) -> None:
        self.modes.append(options.get("mode"))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls.append(self.stance)
        return self.memory.copy_(inputs[:2])

    @contextmanager
    def set_stance(self, stance: str) -> Iterator[None]:
        self.stance = stance
        yield
        self.stance = "default"


def test_outputs_of_graphs_are_kept_and_other_shapes_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    begun: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    compiled = Inductor(model := Replayed(), graphs=True)
    monkeypatch.setattr(torch.compiler, "set_stance", model.set_stance)
    first, second = compiled(torch.ones(4)), compiled(2 * torch.ones(4))
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    assert first.tolist() == [1, 1]  # which the second call would have overwritten
    assert second.tolist() == [2, 2]
    assert model.calls == ["default", "default", "force_eager", "default"]
    assert len(begun) == 3
    assert model.modes == ["reduce-overhead"]
    Inductor(model)
    assert model.modes == ["reduce-overhead", None]


def trainer_of(device: str = "cuda:0", kind: Any = SingleDeviceStrategy, **options: Any) -> Any:
    strategy = kind.__new__(kind)
    strategy.__class__ = type(kind.__name__, (kind,), {"root_device": torch.device(device)})
    usual = {"accumulate_grad_batches": 1, "world_size": 1, "precision_plugin": Precision(), "precision": "32-true"}
    return SimpleNamespace(strategy=strategy, **usual | options)


@pytest.mark.parametrize(
    ("trainer", "part"),
    [
        (trainer_of(), None),
        (trainer_of("cpu"), "cpu"),
        (trainer_of(accumulate_grad_batches=4), "trainer.accumulate_grad_batches=4"),
        (trainer_of(world_size=2), "SingleDeviceStrategy"),
        (trainer_of(kind=DDPStrategy), "DDPStrategy"),
        (trainer_of(precision_plugin=SimpleNamespace(scaler=object()), precision="16-mixed"), "16-mixed"),
    ],
)
def test_what_forbids_graphs_is_named(trainer: Any, part: str | None) -> None:
    reason = forbids_graphs(trainer)
    assert reason is None if part is None else part in str(reason)


def test_whole_steps_may_accumulate_gradients() -> None:
    assert forbids_graphs(trainer_of(accumulate_grad_batches=4), whole_step=True) is None
    assert "cpu" in str(forbids_graphs(trainer_of("cpu"), whole_step=True))


@pytest.mark.slow
def test_without_a_gpu_the_model_is_compiled_without_graphs(script: Script, eager: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = script("train", *OVERRIDES, "task.compile=reduce-overhead", f"folder={run}", fresh=True, timeout=400)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "task.compile=reduce-overhead" in line]
    assert "cpu" in line
    assert max_difference(eager, run) < 1e-6
