from contextlib import nullcontext

import pytest
import torch

from boltcutter.assembly.assemble import read_config
from boltcutter.checks.hardware import check_devices, check_precision
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
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
    check_devices({**trainer, "accelerator": "cpu"})


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


def config(device: str, precision: object, optimizer: str = "torch.optim.AdamW", **values: object) -> Settings:
    trainer = {"accelerator": device, "precision": precision}
    return Settings({"trainer": trainer, "optimizer": {"_target_": optimizer, **values}})


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        (config("cpu", "16-true"), "16-true: optimizer.eps=1e-08 is zero in float16; try +optimizer.eps=0.0001"),
        (config("cpu", "transformer-engine"), "transformer-engine: FP8 needs a CUDA GPU"),
        (
            config("cpu", "float8"),
            "float8: FP8 needs a CUDA GPU of compute capability 8.9 or higher; try bf16-m",
        ),
        (config("mps", "64-true"), "64-true: MPS does not support float64"),
        (config("mps", "16-mixed"), "16-mixed: Lightning supports mixed precision only on CUDA and CPU"),
    ],
)
def test_unsupported_precision_is_refused(cfg: Settings, text: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.precision=") as error:
        check_precision(cfg)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("capability", "native"), [((7, 5), False), ((8, 0), True)])
def test_precision_is_checked_against_the_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    for fp8 in ("transformer-engine", "float8"):
        with pytest.raises(ConfigError, match=f"{fp8}: .*T4"):
            check_precision(config("cuda", fp8))
    if native:
        check_precision(config("cuda", "bf16"))
    else:
        with pytest.raises(ConfigError, match=r"bf16-mixed: .*T4.*; try 16-mixed"):
            check_precision(config("cuda", "bf16"))


def test_fp8_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    check_precision(config("cuda", "float8"))
    with pytest.raises(
        ConfigError, match="transformer_engine is not installed; pip install transformer_engine, or try"
    ):
        check_precision(config("cuda", "transformer-engine"))


def test_optimizers_without_eps_train_in_float16() -> None:
    check_precision(config("cpu", "16-true", "torch.optim.SGD"))
