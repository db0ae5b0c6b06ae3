"""Whether this machine has the devices, and supports the precision, that a configuration requests."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators.xla import XLAAccelerator

from boltcutter.config.errors import ConfigError
from boltcutter.config.locate import locate, parameters
from boltcutter.config.settings import Settings
from boltcutter.environment import platform_facts as platform
from boltcutter.strategy.precision import FLOAT8, device_type, full_precision
from boltcutter.topology import count_devices

FP8_LIBRARIES = {FLOAT8: "torchao", "transformer-engine": "transformer_engine"}  # by precision
EPS = 1e-4  # non-zero in float16, also when added to a small number


def check_hardware(cfg: Settings) -> None:
    """Check devices and precision, before the trainer is built."""
    check_devices(cfg.trainer)
    check_precision(cfg)


def check_devices(trainer: Mapping[str, Any]) -> None:
    """Check that the machine has the devices that settings of the trainer request."""
    accelerator, devices = str(trainer.get("accelerator", "auto")), trainer.get("devices", "auto")
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    wanted = count_devices(trainer)
    if not re.fullmatch(r"auto|-1|[1-9][0-9]*|[0-9]+(, ?[0-9]+)+|\[.+\]", str(devices)):
        raise ConfigError(
            f"trainer.devices={devices} is not a number of devices; try trainer.devices=1, or auto for all"
        )
    if accelerator == "tpu" and not XLAAccelerator.is_available():
        raise ConfigError(
            "trainer.accelerator=tpu: this machine has no TPU, or torch_xla is not installed (pip install "
            "'torch_xla[tpu]' and its version of torch); try trainer=default",
            kind="not_installed",
        )
    if accelerator in ("auto", "cuda", "gpu") and (fault := unusable_gpus()):
        raise ConfigError(
            f"trainer.accelerator={accelerator}: {fault}; install a build that fits the driver, such as "
            "pip install --index-url https://download.pytorch.org/whl/cu126 torch, or set trainer.accelerator=cpu"
        )
    by_index = not isinstance(devices, int | str)  # which CPUs do not have
    on_gpu = accelerator == "gpu" or (accelerator == "auto" and by_index)
    needs_gpus = accelerator == "cuda" or (on_gpu and not torch.backends.mps.is_available())
    if (gpus and wanted > gpus and (needs_gpus or accelerator == "auto")) or (needs_gpus and not gpus):
        available = f"{gpus} CUDA device{'s' if gpus > 1 else ''}" if gpus else "no CUDA device"
        remedy = f"trainer.devices={gpus}" if gpus else "trainer.accelerator=cpu"
        if by_index and not gpus:
            remedy += f" trainer.devices={wanted}"
        elif wanted > cores and not gpus:
            remedy = f"trainer.devices=1 and {remedy}"
        raise ConfigError(
            f"trainer.accelerator={accelerator}, trainer.devices={devices}: this machine has {available}; try {remedy}"
        )
    # Without a driver, a CUDA build of torch such as 2.7 raises an error if it counts accelerators.
    others = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if accelerator == "auto" and not gpus and wanted > max(1, cores, others):
        raise ConfigError(
            f"trainer.devices={devices}: this machine has no GPU and {cores} CPU cores; "
            f"try trainer.devices=1, or trainer.accelerator=cpu to start {wanted} processes anyway"
        )


def check_precision(cfg: Settings) -> None:
    """Check that device and optimizer support the precision."""
    precision, device = (
        full_precision(cfg.trainer.get("precision")),
        device_type(str(cfg.trainer.get("accelerator", "auto"))),
    )
    setting = f"trainer.precision={precision}"
    if device == "mps" and precision.endswith("-mixed"):
        raise ConfigError(f"{setting}: Lightning supports mixed precision only on CUDA and CPU; try 16-true or 32-true")
    if device == "mps" and precision == "64-true":
        raise ConfigError(f"{setting}: MPS does not support float64; try 32-true")
    if precision.startswith(tuple(FP8_LIBRARIES)) and device != "cuda":
        raise ConfigError(f"{setting}: FP8 needs a CUDA GPU of compute capability 8.9 or higher; try bf16-mixed")
    if device == "cuda":
        _check_cuda(setting, precision)
    if precision == "16-true" and cfg.optimizer is not None:
        _check_eps(setting, cfg.optimizer)


def _check_cuda(setting: str, precision: str) -> None:
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if precision.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"{setting}: {name} does not support bfloat16; try {precision.replace('bf16', '16')}")
    for fp8, library in FP8_LIBRARIES.items():
        if precision.startswith(fp8):
            if capability < (8, 9):
                raise ConfigError(
                    f"{setting}: {name} does not support FP8 (compute capability 8.9 or higher); try bf16-mixed"
                )
            if find_spec(library) is None:
                raise ConfigError(
                    f"{setting}: {library} is not installed; pip install {library}, or try bf16-mixed",
                    kind="not_installed",
                )


def _check_eps(setting: str, optimizer: Mapping[str, Any]) -> None:
    """Refuse an eps that would be zero in float16, by which the optimizer divides."""
    default: Any = parameters(locate(optimizer["_target_"])).get("eps")
    eps = optimizer.get("eps", default.default if default else None)
    if isinstance(eps, float) and not torch.tensor(eps, dtype=torch.float16):
        raise ConfigError(f"{setting}: optimizer.eps={eps:g} is zero in float16; try +optimizer.eps={EPS}")


def unusable_gpus() -> str | None:
    """Why torch cannot use the GPUs of this job or machine; None: it can, or there are none."""
    built_for, build = torch.version.cuda, f"torch {torch.__version__}"
    if torch.cuda.device_count():  # counts devices also if the driver is too old for torch
        version = _cuda_driver_version()
        if not version or version // 1000 >= int(str(built_for).split(".")[0]):
            return None
        driver = f"{version // 1000}.{version % 1000 // 10}"
        return f"the driver of the GPUs is for CUDA {driver}, and too old for CUDA {built_for} of {build}"
    why = f"has no CUDA device it can use: the driver may be too old for CUDA {built_for}"
    requested = requested_gpus()
    return f"{requested}, but {build} {why if built_for else 'is built without CUDA'}" if requested else None


def requested_gpus() -> str | None:
    """How this process was given GPUs: by a variable of the job, or as devices of the machine; None: it was not."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.accelerator.is_available() or visible in ("", "-1", "NoDevFiles"):  # the latter hide GPUs on purpose
        return None
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible} selects GPUs"
    for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS", "SLURM_GPUS_ON_NODE"):
        is_index = name.startswith(("SLURM_JOB", "SLURM_STEP"))  # of a GPU, which may be 0
        if os.environ.get(name, "") not in (("",) if is_index else ("", "0")):
            return f"{name}={os.environ[name]}: the job has GPUs"
    if requested := os.environ.get(platform.GPUS):
        return f"the job has asked for {requested} GPUs on each node"
    return "this machine has NVIDIA GPUs" if next(Path("/dev").glob("nvidia[0-9]*"), None) else None


def _cuda_driver_version() -> int:
    """Version of CUDA that the driver supports, as 12040 for 12.4; 0 if unknown."""
    read = getattr(torch._C, "_cuda_getDriverVersion", None)
    return int(read()) if torch.version.cuda and read else 0
