from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from conftest import QUICK, Script
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import nn

from boltcutter.assembly.assemble import assemble, read_config
from boltcutter.checks.combination import check_num_classes, check_optimizer, check_sync_batchnorm
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.planning.check import check_command
from boltcutter.project import Project
from boltcutter.strategy.data_parallel import DataParallelStrategy
from boltcutter.strategy.model_parallel import ModelParallelStrategy

PROJECT = Project.find(__file__)


@pytest.mark.parametrize("devices", [1, 2])
def test_batch_norm_cannot_be_synchronized_on_cpus(devices: int, tmp_path: Path) -> None:
    overrides = ["trainer.accelerator=cpu", f"trainer.devices={devices}", "+trainer.sync_batchnorm=true", "logger=null"]
    for model, refused in (("resnet", True), ("linear", False)):
        cfg = read_config(PROJECT, [*overrides, f"model={model}", f"folder={tmp_path}/run"])
        with pytest.raises(ConfigError, match=r"trainer\.sync_batchnorm=true: ") if refused else nullcontext():
            assemble(cfg)


@pytest.mark.parametrize(
    ("strategy", "is_refused"),
    [
        (DDPStrategy(), False),
        (ModelParallelStrategy(), False),
        (SingleDeviceStrategy(), False),
        (DataParallelStrategy(), True),
        (DeepSpeedStrategy.__new__(DeepSpeedStrategy), True),
    ],
)
def test_a_strategy_that_does_not_synchronize_batch_norm_is_refused(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, is_refused: bool
) -> None:
    monkeypatch.setattr(type(strategy), "root_device", torch.device("cuda"))
    cfg = Settings({"trainer": {"sync_batchnorm": True}})
    with pytest.raises(ConfigError, match=r"sync_batchnorm=true: .*trainer=ddp") if is_refused else nullcontext():
        check_sync_batchnorm(cfg, SimpleNamespace(strategy=strategy), nn.BatchNorm1d(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [9, 10, 11])
def test_metrics_have_as_many_classes_as_the_data(classes: int) -> None:
    cfg = read_config(PROJECT, [f"task.metrics.f1.num_classes={classes}"])
    key = "task.metrics.f1.num_classes"
    with (
        nullcontext()
        if classes == 10
        else pytest.raises(
            ConfigError, match=rf"^{key}={classes}, but data.num_classes=10; set {key}=10, or remove it$"
        )
    ):
        check_num_classes(cfg)


@pytest.mark.parametrize(("name", "refused"), [("optimizer", True), ("make", False)])
def test_only_complete_optimizer_calls_are_checked(name: str, refused: bool) -> None:
    """An optimizer is instantiated only if the parameters are its only missing argument."""
    task: Any = L.LightningModule()
    setattr(task, name, partial(torch.optim.SGD, lr=-1.0))
    task.scheduler = partial(torch.optim.lr_scheduler.CosineAnnealingLR)  # T_max is known to the module
    if refused:
        with pytest.raises(ConfigError, match=r"^optimizer\.lr=-1\.0: .*learning rate"):
            check_optimizer(task)
        task.optimizer = partial(torch.optim.SGD, lr=1.0)
    check_optimizer(task)


@pytest.mark.parametrize("word", ["max_epochs", "max_steps"])
def test_a_training_of_no_steps_warns(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_command(PROJECT, [f"trainer.{word}=0", f"runs={tmp_path}", "logger=null", "model=linear"])
    assert capsys.readouterr().err.startswith(f"warning: trainer.{word}=0: nothing is trained")


@pytest.mark.parametrize("name", ["best", "early_stopping"])
@pytest.mark.parametrize(
    ("monitor", "mode", "other"), [("val/accuracy", "min", "max"), ("val/loss", "max", "min"), ("val/loss", "min", "")]
)
def test_a_metric_of_which_the_worst_is_taken_as_the_best_warns(
    name: str, monitor: str, mode: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"callback.{name}"
    overrides = ["callback=[default,early_stopping]", f"{key}.monitor={monitor}", f"{key}.mode={mode}", "model=linear"]
    check_command(PROJECT, [*overrides, f"runs={tmp_path}", "logger=null"])
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {key}.mode={mode}: ") if other else not warning
    assert warning.endswith(f"{monitor} counts as best; set {key}.mode={other}\n" if other else "")


def test_two_callbacks_that_save_to_the_same_file_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^callback\.last\.filename=last: callback\.best saves to the same file; give"
    ):
        check_command(PROJECT, ["+callback.best.filename=last", "model=linear", "logger=null"])


BARE = "_target_: lightning.pytorch.trainer.Trainer\naccelerator: cpu\ndevices: 1\nmax_epochs: 1\n"


def output(tmp_path: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """Lines that a check prints."""
    check_command(PROJECT, [*overrides, f"runs={tmp_path}", "logger=null", "model=linear"])
    return capsys.readouterr().out.splitlines()


def test_the_default_gives_up_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(tmp_path, capsys) == ["ok"]


@pytest.mark.parametrize(
    ("overrides", "names", "remedy"),
    [
        (["callback=early_stopping"], ["preemption", "reseed", "guard"], "callback=[default,early_stopping]"),
        (["callback=null"], ["preemption", "reseed", "guard"], "callback=default"),
        (["callback.preemption=null"], ["preemption"], "remove callback.preemption=null"),
        (["callback.reseed=null"], ["reseed"], "remove callback.reseed=null"),
        (["callback.guard=null"], ["guard"], "remove callback.guard=null"),
    ],
)
def test_missing_callbacks_are_named(
    overrides: list[str], names: list[str], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *_ = output(tmp_path, capsys, *overrides)
    assert [name for name in ("preemption", "reseed", "guard") if f"callback.{name}," in first] == names
    assert remedy in first


def test_an_own_default_option_names_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "default.yaml").write_text("bar: {_target_: lightning.pytorch.callbacks.TQDMProgressBar}\n")
    cfg = read_config(PROJECT, [f"callback={tmp_path}/default.yaml", "logger=null", f"folder={tmp_path}/run"])
    assemble(cfg)
    assert "write 'defaults: default' in your callback/default.yaml" in capsys.readouterr().out


@pytest.mark.parametrize("override", ["trainer.plugins=null", "trainer={}/bare.yaml"])
def test_missing_atomic_checkpoints_are_named(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare.yaml").write_text(BARE)
    first, *_ = output(tmp_path, capsys, override.format(tmp_path))
    assert first.startswith("note: trainer.plugins has no ${checkpoint_io}")
    assert "write 'defaults: default' or 'plugins: [${checkpoint_io}]'" in first


def test_a_run_says_it_first(script: Script, tmp_path: Path) -> None:
    done = script("train", *QUICK, "model=linear", "callback=early_stopping", f"folder={tmp_path}/run", "test=false")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("note: callback=early_stopping: without callback.preemption, Ctrl-C")
