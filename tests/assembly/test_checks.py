from contextlib import nullcontext
from pathlib import Path

import pytest

from boltcutter.assembly.assemble import assemble, read_config
from boltcutter.assembly.checks import check_devices
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project

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


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3"}, "CUDA_VISIBLE_DEVICES=3 selects GPUs, but torch"),
        ({"SLURM_JOB_GPUS": "0"}, "SLURM_JOB_GPUS=0: the job has GPUs, but torch"),
        ({"SLURM_GPUS_ON_NODE": "2"}, "SLURM_GPUS_ON_NODE=2: the job has GPUs, but torch"),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS": "2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
    ],
)
def test_a_job_with_gpus_does_not_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str | None
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("pathlib.Path.glob", lambda path, pattern: iter(()))
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trainer = read_config(PROJECT, []).trainer
    if message is None:
        check_devices(trainer)
        return
    with pytest.raises(ConfigError) as error:
        check_devices(trainer)
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
