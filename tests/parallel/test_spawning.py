import json
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICK, Script

from boltcutter.config.compose import DictConfig
from boltcutter.strategy.ddp import DDPStrategy
from boltcutter_parallel.spawning import spawning_strategy


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
