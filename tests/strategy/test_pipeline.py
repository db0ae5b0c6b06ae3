from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import QUICK, Script, assert_same, assert_same_history, max_difference
from torch import nn

from boltcutter.callback.ema import EMA
from boltcutter.model.convnet import ConvNet
from boltcutter.model.mlp import MLP
from boltcutter.strategy.errors import StrategyError
from boltcutter.strategy.pipeline import PipelineStrategy
from boltcutter.task.classification import Classification

# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors.
OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "scheduler=constant", "trainer.accelerator=cpu"]
PIPELINE = ["trainer=pipeline", "trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def staged(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two stages."""
    folder = tmp_path_factory.mktemp("staged") / "run"
    done = script("train", *OVERRIDES, *PIPELINE, "trainer.devices=2", f"folder={folder}", ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


def test_two_stages_train_and_test_as_one_process(reference: Path, staged: Path) -> None:
    assert_same(reference, staged)


def test_logged_values_are_those_of_one_process(reference: Path, staged: Path) -> None:
    assert_same_history(reference, staged)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([*PIPELINE, "trainer.devices=2"], ["trainer=default", "trainer.accelerator=cpu"]),
        (["trainer.devices=1"], [*PIPELINE, "trainer.devices=2"]),
        pytest.param([*PIPELINE, "trainer.devices=2"], ["trainer.devices=3"], marks=pytest.mark.slow),
        pytest.param([*PIPELINE, "trainer.devices=2"], ["trainer.devices=1"], marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_another_number_of_stages(
    script: Script, reference: Path, tmp_path: Path, first: list[str], then: list[str]
) -> None:
    def ranks(overrides: list[str]) -> int:
        return next((int(override[-1]) for override in overrides if override.startswith("trainer.devices=")), 1)

    done = script(
        "train", *OVERRIDES, *first, "trainer.max_epochs=1", "test=false", f"folder={tmp_path}", ranks=ranks(first)
    )
    assert done.returncode == 0, done.stderr
    done = script("train", f"resume={tmp_path}", *then, "trainer.max_epochs=2", ranks=ranks(then))
    assert done.returncode == 0, done.stderr
    assert max_difference(reference, tmp_path) < 1e-6


def test_an_epoch_resumed_in_one_process_counts_each_sample_once(
    script: Script, reference: Path, tmp_path: Path
) -> None:
    overrides = [*OVERRIDES, *PIPELINE, "trainer.devices=2", "trainer.max_steps=10", f"folder={tmp_path}", "test=false"]
    often = ["callback.last.every_n_epochs=null", "+callback.last.every_n_train_steps=10"]
    done = script("train", *overrides, *often, ranks=2)
    assert done.returncode == 0, done.stderr
    more = ["trainer=default", "trainer.accelerator=cpu", "trainer.max_steps=-1", "trainer.max_epochs=1"]
    done = script("train", f"resume={tmp_path}", *more)
    assert done.returncode == 0, done.stderr
    ours, theirs = (pd.read_csv(run / "metrics.csv")["train/accuracy"].dropna() for run in (tmp_path, reference))
    assert ours.iloc[-1] == pytest.approx(theirs.iloc[0])


def test_a_language_model_with_tied_embeddings_trains_as_one_process(
    script: Script, text: list[str], tmp_path: Path
) -> None:
    accumulated = ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1"]
    for name, more in (("one", []), ("two", [*PIPELINE, "trainer.devices=2", "model.activation_checkpointing=true"])):
        done = script(
            "train", *OVERRIDES, *text, *accumulated, *more, f"folder={tmp_path}/{name}", ranks=2 if more else 0
        )
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-6


def test_a_non_finite_gradient_stops_all_ranks(script: Script, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, *PIPELINE, "trainer.devices=2", "optimizer.lr=1e38", "trainer.gradient_clip_val=null"]
    done = script("train", *overrides, f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.count(": the gradient of model.hidden.0.weight") == 2


FROZEN = """
from boltcutter.model.mlp import MLP

class Frozen(MLP):
    def __init__(self, stage: int) -> None:
        super().__init__((1, 8, 8), 10, hidden_sizes=[32])
        self.stages(2)[stage].requires_grad_(False)
"""


@pytest.mark.parametrize("stage", [0, 1])
def test_a_frozen_stage_trains_as_in_one_process(script: Script, tmp_path: Path, stage: int) -> None:
    (tmp_path / "frozen_stage.py").write_text(FROZEN)
    overrides = [*OVERRIDES, "~model", "+model._target_=frozen_stage.Frozen", f"+model.stage={stage}", "name=frozen"]
    overrides += ["trainer.max_steps=5", "test=false", "trainer.gradient_clip_val=0.01", "timeout=30"]
    for name, more in (("one", []), ("two", [*PIPELINE, "trainer.devices=2"])):
        env = {"PYTHONPATH": str(tmp_path)}
        done = script("train", *overrides, *more, f"folder={tmp_path}/{name}", ranks=2 if more else 0, env=env)
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-6


def task(model: nn.Module | None = None, **options: Any) -> Classification:
    return Classification(model or MLP((6,), 3, hidden_sizes=[5]), optimizer=torch.optim.SGD, **options)


@pytest.mark.parametrize(
    ("given", "trainer", "text"),
    [
        (task(l1=0.1), {}, "task.l1, task.l2: .*; set optimizer.weight_decay"),
        (
            task(MLP((6,), 3, hidden_sizes=[5], norm="batchnorm")),
            {},
            "model.norm=batchnorm: .*; use another norm",
        ),
        (task(ConvNet((1, 8, 8), 3)), {}, "ConvNet has no method stages"),
        (task(), {"callbacks": [EMA()]}, "callback.ema: .*; remove it"),
        (
            task(),
            {"precision_plugin": SimpleNamespace(scaler=1)},
            "trainer.precision=16-mixed: .*; try bf16-mixed",
        ),
        (task(), {"datamodule": SimpleNamespace(batch_size=6)}, "data.batch_size=6 does not divide .* try .*=8$"),
    ],
)
def test_unsupported_features_are_refused(given: Classification, trainer: dict[str, Any], text: str) -> None:
    strategy = PipelineStrategy()
    strategy.connect(given)
    plain = {"callbacks": [], "precision_plugin": SimpleNamespace(scaler=None), "datamodule": None}
    with pytest.raises(StrategyError, match=text):
        strategy.setup(SimpleNamespace(**plain | trainer))  # type: ignore[arg-type]


def test_zero_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.strategy\.num_microbatches=0 is not positive; try 4"):
        PipelineStrategy(0)


def test_a_loss_other_than_the_mean_of_losses_is_refused() -> None:
    strategy = PipelineStrategy()
    strategy._expected = torch.tensor(1.0)
    strategy._check_loss(torch.tensor(1.0))
    with pytest.raises(StrategyError, match=r"another loss than the mean of task\.losses; use trainer=ddp"):
        strategy._check_loss(torch.tensor(2.0))


def test_losses_that_differ_by_their_rounding_are_accepted() -> None:
    strategy = PipelineStrategy()
    strategy._expected = torch.tensor(2.2969, dtype=torch.bfloat16)
    strategy._check_loss(torch.tensor(2.3125, dtype=torch.bfloat16))  # the next larger number
    with pytest.raises(StrategyError, match="another loss"):
        strategy._check_loss(torch.tensor(2.5, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.strategy.num_microbatches=1"],
            ": trainer.strategy.num_microbatches=1: fewer than the 2 stages; try 4",
        ),
        (["task.compile=true"], "task.compile=true: stages are not compiled; set it to false"),
    ],
)
def test_unsupported_overrides_are_refused_by_all_ranks(
    script: Script, tmp_path: Path, overrides: list[str], message: str
) -> None:
    done = script("train", *OVERRIDES, *PIPELINE, "trainer.devices=2", *overrides, f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.count(message) == 2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions_give_the_weights_of_one_process(
    script: Script, reference: Path, tmp_path: Path, precision: str
) -> None:
    for name, more in (("one", []), ("two", [*PIPELINE, "trainer.devices=2"])):
        overrides = [*OVERRIDES, *more, f"trainer.precision={precision}", "trainer.max_steps=5", "test=false"]
        done = script("train", *overrides, f"folder={tmp_path}/{name}", ranks=2 if more else 0)
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "one", tmp_path / "two") < (1e-9 if precision == "64-true" else 5e-3)
