import warnings
from pathlib import Path

import pytest
import torch

from boltcutter.config.annotations import coerce, matches
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.config.foreign import renamed, with_targets
from boltcutter.project import Project

PROJECT = Project.find(__file__)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("callbacks.model_checkpoint.monitor", "callback.best.monitor"),
        ("callbacks.early_stopping.patience", "callback.early_stopping.patience"),
        ("hydra/launcher", "launch"),
        ("hydra:runtime.output_dir", "folder"),
        ("paths.output_dir", "folder"),
        ("datamodule", "data"),
        ("data.init_args.batch_size", "data.batch_size"),
        ("data.class_path", "data._target_"),
        ("data.batch_size", None),
        ("callback", None),
    ],
)
def test_renamed(theirs: str, ours: str | None) -> None:
    assert renamed(theirs) == ours


def test_class_paths_at_any_depth() -> None:
    inner = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2}, "dict_kwargs": {"bias": False}}
    node = {"class_path": "pkg.Model", "init_args": {"layers": [inner, {"class_path": "pkg.Act"}]}}
    assert with_targets(node) == {
        "_target_": "pkg.Model",
        "layers": [{"_target_": "torch.nn.Linear", "in_features": 2, "bias": False}, {"_target_": "pkg.Act"}],
    }
    other = {"class_path": "pkg.Model", "note": "not a call, as it has another key"}
    assert with_targets(other) == other


def test_an_option_with_class_path_is_trained_as_one_with_a_target(tmp_path: Path) -> None:
    option = tmp_path / "small.yaml"
    option.write_text(
        "class_path: torch.nn.Linear\ninit_args:\n  in_features: 64\n  out_features: ${data.num_classes}\n"
    )
    cfg = compose(PROJECT, [f"model={option}", "data=digits"])
    assert cfg.resolved["model"] == {"_target_": "torch.nn.Linear", "in_features": 64, "out_features": 10}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.optimizer.lr=1", "model.optimizer.lr: no such key; use optimizer.lr=1"),
        ("datamodule=mnist", "datamodule: no such key; use data=mnist"),
        ("hydra.run.dir=x", "hydra.run.dir: no such key; use folder=x"),
        ("hydra/launcher=slurm", "hydra/launcher: no such key; use launch=slurm"),
        ("optimized_metric=val/acc", "optimized_metric: no such key; use search.metric=val/acc"),
        ("seed_everything=3", "seed_everything: no such key; use seed=3"),
        ("extras.print_config=true", "extras.print_config: no such key; leave it out"),
        ("run=latest", "run: no such key; use resume=<folder> to continue a run, or `boltcutter evaluate run"),
        ("train=false", "train: no such key; leave it out; to test without training, use `boltcutter evaluate"),
        ("model=classification", "model=classification: no such option; use task=classification"),
    ],
)
def test_keys_of_others_name_the_override_here(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(PROJECT, [override])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("reference", "remedy"),
    [
        ("${paths.output_dir}/x", "write ${folder}"),
        ("${hydra:runtime.output_dir}", "write ${folder}"),
        ("${now:%Y-%m-%d}", "leave it out"),
        ("${paths.data_dir}", "set the path where it is used"),
    ],
)
def test_references_of_others_name_the_one_here(reference: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="runs: ") as caught:
        assert compose(PROJECT, [f"runs={reference}"]).resolved
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "remedy"),
    [
        ("override /data: mnist", "write data: mnist, without the dash"),
        ("override /callbacks: default", "write callback: default, without the dash"),
        ("optional local: default", "write local: default"),
        ("override /hydra/sweeper: optuna", "leave it out"),
        ("_self_", "leave it out"),
    ],
)
def test_defaults_lists_of_hydra(tmp_path: Path, entry: str, remedy: str) -> None:
    (tmp_path / "own.yaml").write_text(f"defaults:\n  - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        compose(PROJECT, [f"experiment={tmp_path}/own.yaml"])
    assert remedy in str(caught.value)


@pytest.mark.parametrize("wanted", [torch.optim.lr_scheduler, callable, any], ids=["module", "function", "builtin"])
def test_annotations_that_are_no_types_give_no_warnings(wanted: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "_partial_": True}
        assert matches(scheduler, wanted)
        assert matches(None, wanted)
        assert coerce(3, wanted) == 3


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "own.yaml").write_text(
        "logger:\n  wandb:\n    group: a\ndata:\n  batch_size: 8\n"
    )
    return Project.at(tmp_path)


def test_local_settings_are_between_the_experiment_and_the_command_line(project: Project) -> None:
    local = project.root / "configs" / "local.yaml"
    local.write_text("defaults:\n  logger: csv\ndata:\n  num_workers: 2\n  batch_size: 4\nruns: elsewhere\n")
    cfg = compose(project, ["experiment=own", "data.num_workers=1"])
    assert (cfg.data["num_workers"], cfg.data["batch_size"], cfg.runs) == (1, 4, "elsewhere")
    assert cfg.choices["logger"] == "csv"
    assert compose(project, ["logger=wandb"]).choices["logger"] == "wandb"
    assert compose(project, ["seed=1"], base=cfg).data["num_workers"] == 1  # a resumed run has its own settings
    with pytest.raises(ConfigError, match=r"^data=null: .*local\.yaml sets data.num_workers, data.batch_size; remove"):
        compose(project, ["data=null"])
    local.write_text("logger:\n  wandb:\n    entity: me\nlaunch:\n  time: 1\n")
    assert not compose(project, ["logger=csv"]).logger  # the CSV files are always written
    assert compose(project, ["logger=wandb"]).logger["wandb"]["entity"] == "me"
    local.write_text("- a\n")
    with pytest.raises(ConfigError, match=r"local\.yaml: expected keys"):
        compose(project)


def test_an_experiment_may_set_loggers_that_are_not_selected(project: Project) -> None:
    assert compose(project, ["experiment=own", "logger=tensorboard"]).logger.keys() == {"tensorboard"}
    assert compose(project, ["experiment=own", "logger=wandb"]).logger["wandb"]["group"] == "a"
