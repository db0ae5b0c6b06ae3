from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Script

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.run.metrics import Mode
from boltcutter.search.command import search_command
from boltcutter.search.plan import Plan
from boltcutter.search.settings import Search
from boltcutter.search.sweep import as_sweep, write_sweep

PROJECT = Project.find(Path(__file__))
METRICS: list[tuple[str, Mode]] = [("val/accuracy", "max")]
SPACE = {
    "optimizer.lr": "loguniform(1e-5, 1e-1)",
    "model.dropout": "uniform(0, 0.5)",
    "data.batch_size": "logint(16, 512)",
    "trainer.accumulate_grad_batches": "int(1, 4)",
    "optimizer": "choice(adamw, sgd)",
    "task.compile": "choice(true, false)",
    "trainer.gradient_clip_val": "choice(null, 0.5, 1)",
    "data.split": "choice([0.8, 0.1, 0.1], [0.7, 0.2, 0.1])",
}


def plan(
    space: dict[str, str],
    overrides: list[str] | None = None,
    *,
    folder: Path = Path("digits"),
    project: Project = PROJECT,
    metrics: list[tuple[str, Mode]] = METRICS,
    num_trials: int | None = None,
    command: str = "",
) -> Plan:
    """A search with these settings."""
    search = Search(space=space, engine="wandb", num_trials=num_trials)
    return Plan(project, folder, {}, overrides or [], search, metrics, [{}], 1, 0.0, command=command)


def agent_command(sweep: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """The command line that W&B's agent starts for sampled values, as its ``Agent._command_run`` builds it."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args  # takes seconds

    macros = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    macros |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
    found: list[str] = []
    for part in create_sweep_command(list(sweep["command"])):
        found += macros[part[2:-1]] if part.startswith("${") and part.endswith("}") else [part]
    return found


def test_a_sweep_needs_no_optuna(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("local", "study"):
        monkeypatch.delitem(sys.modules, f"boltcutter.search.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    search_command(PROJECT, ["search=wandb", f"folder={tmp_path}/a search"])
    path = tmp_path / "a search" / "sweep.yaml"
    assert capsys.readouterr().out.startswith(f"wandb sweep '{path}' ")
    # Agents start where paths of the overrides are relative to.
    program = yaml.safe_load(path.read_text())["program"]
    assert (program[:2], Path(program).resolve()) == ("..", PROJECT.root.resolve() / "scripts" / "train.py")
    assert f"# then, in {tmp_path}/below, on" in path.read_text()


def test_a_space_in_the_terms_of_wandb(tmp_path: Path) -> None:
    command = "scripts/search.py search=wandb logger.wandb.api_key=hush"
    overrides = ["trainer.max_epochs=3", "name=${choices.data}"]
    (tmp_path / "digits").mkdir()
    path = write_sweep(plan(SPACE, overrides, folder=tmp_path / "digits", num_trials=20, command=command))
    assert yaml.safe_load(path.read_text()) == {
        "name": "digits",
        "program": "scripts/train.py",
        "method": "bayes",
        "metric": {"name": "val/accuracy", "goal": "maximize"},
        "run_cap": 20,
        "parameters": {
            "optimizer.lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 0.1},
            "model.dropout": {"distribution": "uniform", "min": 0.0, "max": 0.5},
            "data.batch_size": {"distribution": "q_log_uniform_values", "min": 16, "max": 512, "q": 1},
            "trainer.accumulate_grad_batches": {"distribution": "int_uniform", "min": 1, "max": 4},
            "optimizer": {"values": ["adamw", "sgd"]},
            "task.compile": {"values": [True, False]},
            "trainer.gradient_clip_val": {"values": ["null", 0.5, 1]},
            "data.split": {"values": ["[0.8, 0.1, 0.1]", "[0.7, 0.2, 0.1]"]},
        },
        "command": [
            "${env}",
            "${interpreter}",
            "${program}",
            "trainer.max_epochs=3",
            "name=${choices.data}",
            "${args_no_hyphens}",
        ],
    }
    assert "hush" not in path.read_text()
    assert f"# create it: wandb sweep {path}" in path.read_text().splitlines()


@pytest.mark.slow
def test_the_command_of_the_agent_trains(script: Script, tmp_path: Path) -> None:
    overrides = [f"folder={tmp_path / 'run'}", "trainer.max_epochs=1", "report=false", "logger.wandb.mode=offline"]
    sweep = as_sweep(plan(SPACE, overrides))
    values = {
        "optimizer.lr": 1.5e-05,
        "optimizer": "sgd",
        "task.compile": False,
        "data.batch_size": 100,
        "trainer.gradient_clip_val": "null",
        "data.split": "[0.7, 0.2, 0.1]",
    }
    environment, interpreter, program, *arguments = agent_command(sweep, values)
    assert (environment, interpreter, program) == ("/usr/bin/env", "python", "scripts/train.py")
    done = script("train", *arguments)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert "SGD" in config["optimizer"]["_target_"]
    assert config["optimizer"]["lr"] == 1.5e-05
    assert config["task"]["compile"] is False
    assert config["data"]["batch_size"] == 100
    assert config["data"]["split"] == [0.7, 0.2, 0.1]
    assert config["trainer"]["gradient_clip_val"] is None


def test_grids_only_become_a_grid() -> None:
    sweep = as_sweep(plan({"seed": "grid(0, 1)"}))
    assert (sweep["method"], sweep["parameters"], "run_cap" in sweep) == ("grid", {"seed": {"values": [0, 1]}}, False)


@pytest.mark.slow
def test_a_project_without_scripts_trains_by_the_package(tmp_path: Path) -> None:
    project = Project.at(tmp_path, "boltcutter")
    sweep = as_sweep(plan({"seed": "int(0, 9)"}, project=project, metrics=[("val/loss", "min")]))
    assert agent_command(sweep, {"seed": 3})[1:] == ["python", "-m", "boltcutter", "train", "seed=3"]
    assert sweep["metric"]["goal"] == "minimize"


@pytest.mark.parametrize(
    ("space", "changed", "message"),
    [
        (
            {"optimizer": "choice(adamw, sgd)", "optimizer.momentum": "uniform(0, 1) if optimizer == sgd"},
            {},
            "condition",
        ),
        ({"seed": "int(0, 9)"}, {"metrics": [*METRICS, ("val/loss", "min")]}, "one metric"),
    ],
)
def test_what_wandb_cannot_sample_is_refused(space: dict[str, str], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_sweep(plan(space, **changed))
