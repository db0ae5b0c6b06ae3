import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import QUICK, Script
from torch.utils.data import DataLoader

from boltcutter.assembly.adapt import (
    adapt,
    prediction_argument,
    skip_reason,
    spawning_strategy,
    uses_validation_step,
)
from boltcutter.config.compose import DictConfig
from boltcutter.config.errors import ConfigError
from boltcutter.data.digits import Digits
from boltcutter.strategy.ddp import DDPStrategy


class Manual(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Whole(L.LightningModule):
    def test_step(self, batch: torch.Tensor) -> None: ...

    def test_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.zeros(2))  # type: ignore[arg-type]


def trainer(**options: float) -> L.Trainer:
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", enable_model_summary=False, **plain, **options)  # type: ignore[arg-type]


def test_gradient_clipping_is_disabled_for_manual_optimization(capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(gradient_clip_val=1.0)
    adapt(made, Manual(), {})
    assert made.gradient_clip_val is None
    assert "trainer.gradient_clip_val=1.0" in capsys.readouterr().out


def test_accumulation_is_refused_for_manual_optimization() -> None:
    with pytest.raises(ConfigError, match="accumulate_grad_batches=2"):
        adapt(trainer(accumulate_grad_batches=2), Manual(), {})


def test_skip_reason_names_the_missing_hook() -> None:
    assert skip_reason(None, Whole(), "test") is None
    assert skip_reason(None, Manual(), "test") == "Manual has no test_step"
    assert skip_reason(None, Whole(), "val") == "Whole has no validation_step"
    assert skip_reason(L.LightningDataModule(), Whole(), "train") == "there is no train_dataloader"


def test_prediction_argument() -> None:
    data = L.LightningDataModule()
    assert prediction_argument(data, Manual()) is None
    data.predict_dataloader = lambda: []  # type: ignore[method-assign]
    assert prediction_argument(data, Manual()) == ""
    data.read = data.loader = lambda name: name  # type: ignore[attr-defined]
    assert prediction_argument(data, Manual()) == ""  # another data module may use these names differently
    assert uses_validation_step(data, "val")
    ours = Digits(batch_size=4)
    assert prediction_argument(ours, Manual()) == "input=<files>"
    assert not uses_validation_step(ours, "val")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp_spawn", {"start_method": "spawn"}),
        ("ddp_notebook", {"start_method": "fork"}),
        ("ddp_fork_find_unused_parameters_true", {"start_method": "fork", "find_unused_parameters": True}),
    ],
)
def test_lightnings_names_of_spawning_strategies(name: str, options: dict[str, Any]) -> None:
    strategy: Any = spawning_strategy(DictConfig({"strategy": name}))["strategy"]
    assert type(strategy) is DDPStrategy
    assert strategy._start_method == options["start_method"]
    assert strategy._ddp_kwargs.get("find_unused_parameters", False) == ("find_unused_parameters" in options)


def test_other_strategies_are_not_replaced() -> None:
    assert spawning_strategy(DictConfig({"strategy": "ddp"})) == spawning_strategy(DictConfig({})) == {}


@pytest.mark.slow  # each rank imports torch
def test_a_spawned_run_is_tested(script: Script, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ["trainer.strategy=ddp_spawn", "trainer.devices=2", "trainer.accelerator=cpu", "model=linear"]
    done = script("train", *QUICK, *overrides, f"folder={folder}", fresh=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "record.json").read_text())["test"]["test/loss"] > 0
