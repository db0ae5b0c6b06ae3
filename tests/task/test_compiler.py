from pathlib import Path

import pytest
import torch
from conftest import QUICK, Script, max_difference, require, saved_weights
from torch import Tensor, nn

from boltcutter.task.compiler import Inductor

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
