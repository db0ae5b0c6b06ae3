from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Script

from boltcutter.config.compose import compose
from boltcutter.project import Project
from boltcutter.run.metrics import Mode
from boltcutter.search.export import write_best
from boltcutter.search.plan import Plan
from boltcutter.search.results import Result
from boltcutter.search.settings import Search

PROJECT = Project.find(Path(__file__))


def written(
    folder: Path, overrides: list[str], values: dict[str, Any], command: str = "", project: Project = PROJECT
) -> str:
    """The command that trains the best trial."""
    result = Result(7, "complete", values, {"val/accuracy": 0.98318444}, [], {}, 1.0, folder / "trials" / "0007")
    search = Search(overrides=["test=false", "report=false"])  # which are not those of the experiment
    metrics: list[tuple[str, Mode]] = [("val/accuracy", "max")]
    return write_best(Plan(project, folder, {}, overrides, search, metrics, [{}], 1, 0.0, command=command), result)


def write(folder: Path, overrides: list[str], values: dict[str, Any], command: str = "scripts/search.py") -> Path:
    written(folder, overrides, values, command)
    return folder / "best.yaml"


def own_project(root: Path, **local: Any) -> Project:
    """A project that has a default experiment and, with values for it, a ``configs/local.yaml``."""
    files = {
        "train": {"defaults": {"experiment": "baseline"}},
        "experiment/baseline": {"defaults": {"model": "mlp", "data": "digits"}, "model": {"dropout": 0.125}},
        "experiment/other": {"model": {"hidden_sizes": [8]}, "defaults": {"model": "mlp"}},
        "local": local,
    }
    for name, content in files.items():
        file = root / "configs" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(content))
    return Project.at(root)


@pytest.mark.parametrize("local", [{}, {"data": {"batch_size": 16}, "trainer": {"precision": "bf16-mixed"}}])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=other"],
        ["experiment=[baseline,other]"],
        ["experiment=null", "model=mlp"],
        ["~experiment", "model=mlp"],
        ["debug=limit", "logger=csv"],
        ["~model.dropout", "trainer.max_epochs=3"],
        ["test=false", "name=own"],
    ],
)
def test_the_printed_command_has_the_configuration_of_the_trial(
    overrides: list[str], local: dict[str, Any], tmp_path: Path
) -> None:
    project = own_project(tmp_path, **local)
    values = {"data.batch_size": 24, "optimizer": "sgd", "optimizer.lr": 0.5}
    program, verb, *given = shlex.split(written(tmp_path, overrides, values, project=project))
    assert [program, verb] == ["boltcutter", "train"]
    expected = [*overrides, "data.batch_size=24", "optimizer=sgd", "optimizer.lr=0.5"]
    found, wanted = (compose(project, words).resolved for words in (given, expected))
    for config in (found, wanted):
        config["choices"].pop("experiment", None)
    assert found == wanted
    assert found["data"]["batch_size"] == 24


def composed(*overrides: str) -> dict[str, Any]:
    """The configuration without the name of the experiment."""
    found = compose(PROJECT, overrides).resolved
    found["choices"].pop("experiment")
    return found


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["trainer.max_epochs=2"], {"optimizer.lr": 0.00123, "optimizer": "sgd", "optimizer.momentum": 0.5}),
        (["model=mlp", "model.hidden_sizes.0=32"], {"task.model.dropout": 0.25, "seed": 3}),
        (["experiment=diabetes", "data.batch_size=16"], {"model": "linear", "optimizer.lr": 1e-5}),
        (["callback=[default,ema]", "logger=csv", "test=false"], {"trainer.precision": "bf16-mixed"}),
        (["scheduler=null", "+data.new=1"], {"model.dropout": "0.1", "data.split": "[0.8,0.2]"}),
        (["optimizer._target_=torch.optim.SGD", "optimizer.lr=0.1"], {"optimizer.nesterov": True}),
        (["~callback.recompiles", "folder=/tmp/x"], {"optimizer.lr": 0.1}),
        ([], {}),
    ],
)
def test_the_experiment_equals_the_overrides(overrides: list[str], values: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, overrides, values)
    removed = [override for override in overrides if override.startswith("~")]
    kept = [override for override in overrides if not override.startswith("folder=")]
    sampled = [f"{key}={str(value).lower() if value is True else value}" for key, value in values.items()]
    assert composed(f"experiment={path}", *removed) == composed(*kept, *sampled)
    assert f"# train it: boltcutter train {shlex.join([f'experiment={path}', *removed])}" in path.read_text()


def test_comments_say_where_it_is_from(tmp_path: Path) -> None:
    command = "scripts/search.py search=random\n'logger.wandb.api_key=hush'"
    text = write(tmp_path, [], {"optimizer.lr": 0.00123, "optimizer": "sgd"}, command).read_text()
    lines = text.splitlines()
    assert lines[0] == "# Best trial of a search: val/accuracy 0.98318."
    assert lines[1].startswith("# search: scripts/search.py search=random ")
    assert "hush" not in text
    assert f"# trial: 7, in {tmp_path / 'trials' / '0007'}" in lines
    assert "# sampled: optimizer.lr, optimizer" in lines
    assert yaml.safe_load(text) == {"defaults": {"optimizer": "sgd"}, "optimizer": {"lr": 0.00123}}


def test_files_are_found_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("trainer:\n  max_epochs: 3\n")
    path = write(tmp_path, ["experiment=own.yaml", "data=images", "data.folder=pictures"], {})
    content = yaml.safe_load(path.read_text())
    assert content["defaults"] == {"experiment": str(tmp_path / "own.yaml"), "data": "images"}
    assert content["data"] == {"folder": str(tmp_path / "pictures")}


def test_the_experiment_trains(script: Script, tmp_path: Path) -> None:
    path = write(tmp_path, ["trainer.max_epochs=1", "logger=csv", "report=false"], {"optimizer": "sgd", "seed": 3})
    done = script("train", f"experiment={path}", f"folder={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert re.search("SGD", config["optimizer"]["_target_"])
    assert config["seed"] == 3
