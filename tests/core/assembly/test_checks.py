from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import nn

from boltcutter.assembly.assemble import assemble, read_config
from boltcutter.assembly.checks import check_devices, check_num_classes, check_sync_batchnorm
from boltcutter.config.compose import DictConfig
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter_parallel.data_parallel import DataParallelStrategy
from boltcutter_parallel.model_parallel import ModelParallelStrategy

PROJECT = Project.find(__file__)


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        ([], 0, None),
        (["trainer.devices=2"], 0, None),
        (["trainer.devices=3"], 0, "trainer.devices=3: this machine has no GPU and 2 CPU cores"),
        (["trainer.devices=3", "trainer.accelerator=cpu"], 0, None),
        (["trainer.devices=3"], 2, "trainer.devices=3: this machine has 2 CUDA devices; try trainer.devices=2"),
        (["trainer.devices=2"], 2, None),
        (["trainer.devices=[0,1]"], 2, None),
        (["trainer.devices=[0,1]"], 0, "no CUDA device; try trainer.accelerator=cpu trainer.devices=2"),
        (["trainer.accelerator=cuda"], 0, "this machine has no CUDA device; try trainer.accelerator=cpu"),
        (["trainer.accelerator=gpu", "trainer.devices=[0,1,2]"], 2, "has 2 CUDA devices; try trainer.devices=2"),
        (["trainer.accelerator=cuda", "trainer.devices=auto"], 1, None),
    ],
)
def test_devices_are_checked_against_the_machine(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], gpus: int, message: str | None
) -> None:
    cfg = read_config(PROJECT, overrides)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    if message is None:
        check_devices(cfg.trainer)
        return
    with pytest.raises(ConfigError) as error:
        check_devices(cfg.trainer)
    assert message in str(error.value)


@pytest.mark.parametrize("accelerator", ["auto", "cuda", "gpu"])
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3"}, "CUDA_VISIBLE_DEVICES=3 selects GPUs, but torch"),
        ({"SLURM_JOB_GPUS": "0"}, "SLURM_JOB_GPUS=0: the job has GPUs, but torch"),
        ({"SLURM_GPUS_ON_NODE": "2"}, "SLURM_GPUS_ON_NODE=2: the job has GPUs, but torch"),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
        ({"BOLTCUTTER_GPUS": "8"}, "the job has asked for 8 GPUs on each node, but torch"),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS": "2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
    ],
)
def test_a_job_with_gpus_does_not_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, variables: dict[str, str], message: str | None
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("pathlib.Path.glob", lambda path, pattern: iter(()))
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trainer = read_config(PROJECT, [f"trainer.accelerator={accelerator}"]).trainer
    if message is None and accelerator == "auto":
        check_devices(trainer)
        return
    with pytest.raises(ConfigError) as error:
        check_devices(trainer)
    if message is None:
        assert "this machine has no CUDA device; try trainer.accelerator=cpu" in str(error.value)
        return
    assert str(error.value).startswith(f"trainer.accelerator={accelerator}: ")
    assert message in str(error.value)
    assert "too old for CUDA 13.0" in str(error.value)
    assert "trainer.accelerator=cpu" in str(error.value)
    trainer.accelerator = "cpu"
    check_devices(trainer)


@pytest.mark.parametrize("devices", [1, 2])
def test_batch_norm_cannot_be_synchronized_on_cpus(devices: int, tmp_path: Path) -> None:
    overrides = ["trainer.accelerator=cpu", f"trainer.devices={devices}", "+trainer.sync_batchnorm=true", "logger=null"]
    for model, refused in (("resnet", True), ("linear", False)):
        cfg = read_config(PROJECT, [*overrides, f"model={model}", f"folder={tmp_path}/run"])
        with pytest.raises(ConfigError, match=r"trainer\.sync_batchnorm=true: ") if refused else nullcontext():
            assemble(cfg)


@pytest.mark.parametrize(("built_for", "driver", "is_refused"), [("13.0", 12040, True), ("12.8", 12020, False)])
def test_a_driver_that_is_too_old_is_an_error(
    monkeypatch: pytest.MonkeyPatch, built_for: str, driver: int, is_refused: bool
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)  # counted without CUDA
    monkeypatch.setattr("torch.version.cuda", built_for)
    monkeypatch.setattr("torch._C._cuda_getDriverVersion", lambda: driver, raising=False)
    trainer = read_config(PROJECT, []).trainer
    with pytest.raises(ConfigError, match=r"CUDA 12\.4, .*trainer\.accelerator=cpu") if is_refused else nullcontext():
        check_devices(trainer)


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
    cfg = DictConfig({"trainer": {"sync_batchnorm": True}})
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
