"""Checks that trainer, data and task match each other, the machine and the launched processes."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.accelerators.xla import XLAAccelerator
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from boltcutter import extend
from boltcutter.config.compose import DictConfig
from boltcutter.config.errors import ConfigError, as_config_error, hint, one_line
from boltcutter.config.instantiate import name_setting
from boltcutter.config.locate import parameters
from boltcutter.environment import platform
from boltcutter.environment.process import external_world_size, is_rank_zero
from boltcutter.internals import BatchNorm, cuda_driver_version
from boltcutter.lightning_alias import remedy
from boltcutter.protocols import (
    HasKind,
    HasMonitor,
    NativeData,
    NativeTask,
    find_model,
)
from boltcutter.topology import Topology, check_batch_size, count_devices


def check_input_shape(cfg: DictConfig, task: L.LightningModule) -> None:
    """Check that the model accepts samples of ``data.shape``, if both are known.

    Raises:
        ConfigError: It does not.
    """
    model, shape = find_model(task), (cfg.data or {}).get("shape")
    if hasattr(model, "check_input_shape") and shape is not None:
        with as_config_error():
            model.check_input_shape(tuple(shape))


def check_callbacks(task: L.LightningModule, callbacks: dict[str, Callback]) -> None:
    """Check that callbacks which restrict the task support it.

    Raises:
        ConfigError: One does not.
    """
    for callback in callbacks.values():
        if check_task := getattr(callback, "check_task", None):
            with as_config_error():
                check_task(task)


def check_batches_and_clipping(trainer: DictConfig) -> None:
    """Check numbers that Lightning accepts, but with which nothing is trained.

    Args:
        trainer: The ``trainer`` section of the configuration.

    Raises:
        ConfigError: One is too small.
    """
    accumulated, limit = trainer.get("accumulate_grad_batches"), trainer.get("limit_train_batches")
    norm = trainer.get("gradient_clip_val")
    if isinstance(accumulated, int) and accumulated < 1:
        raise ConfigError(f"trainer.accumulate_grad_batches={accumulated} is not a positive number of batches; try 1")
    if limit is not None and limit == 0:
        raise ConfigError(f"trainer.limit_train_batches={limit} leaves no batch to train on; try 1.0, which is all")
    if norm is not None and norm < 0:
        raise ConfigError(f"trainer.gradient_clip_val={norm} is negative; try 1.0, or null for no clipping")


def check_devices(trainer: DictConfig) -> None:
    """Check that the machine has the requested devices.

    Args:
        trainer: The ``trainer`` section of the configuration.

    Raises:
        ConfigError: It does not.
    """
    accelerator, devices = str(trainer.get("accelerator", "auto")), trainer.get("devices", "auto")
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    wanted = count_devices(trainer)
    if not re.fullmatch(r"auto|-1|[1-9]\d*|\d+(, ?\d+)+|\[.+\]", str(devices)):
        raise ConfigError(
            f"trainer.devices={devices} is not a number of devices; try trainer.devices=1, or auto for all"
        )
    if accelerator == "tpu":
        if find_spec("torch_xla") is None:
            raise ConfigError(
                "trainer.accelerator=tpu: torch_xla is not installed, which Lightning needs for TPUs; on a TPU host "
                "pip install 'torch_xla[tpu]' and its version of torch; otherwise try trainer=default"
            )
        if not XLAAccelerator.is_available():
            raise ConfigError("trainer.accelerator=tpu: this machine has no TPU; try trainer=default")
    if accelerator in ("auto", "cuda", "gpu") and (fault := unusable_gpus()):
        raise ConfigError(
            f"trainer.accelerator={accelerator}: {fault}; install a build that fits the driver, such as "
            "pip install --index-url https://download.pytorch.org/whl/cu126 torch, or set trainer.accelerator=cpu"
        )
    by_index = not isinstance(devices, int | str)  # which CPUs do not have
    on_gpu = accelerator == "gpu" or (accelerator == "auto" and by_index)
    needs_gpus = accelerator == "cuda" or (on_gpu and not torch.backends.mps.is_available())
    if (gpus and wanted > gpus and (needs_gpus or accelerator == "auto")) or (needs_gpus and not gpus):
        available = f"{gpus} CUDA devices" if gpus else "no CUDA device"
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


def unusable_gpus() -> str | None:
    """Why torch cannot use the GPUs of this job or machine; None: it can, or there are none."""
    built_for, build = torch.version.cuda, f"torch {torch.__version__}"
    if torch.cuda.device_count():  # counts devices also if the driver is too old for torch
        version = cuda_driver_version()
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


def check_world_size(trainer: L.Trainer, topology: Topology) -> None:
    """Check that the trainer uses all launched processes; otherwise each would train separately in the same folder.

    Raises:
        ConfigError: It does not.
    """
    strategy, devices, nodes = trainer.strategy, topology.num_devices, topology.num_nodes
    if layout := platform.launched_layout():
        name, started, each = layout
        if started > 1 and isinstance(strategy, strategies.ParallelStrategy) and not hasattr(strategy, "num_nodes"):
            raise ConfigError(
                f"trainer.strategy={type(strategy).__name__} trains on one node, but {name} has {started}: each would "
                "train separately; use trainer=ddp"
            )
        if started != nodes or each not in (None, devices):
            raise ConfigError(
                f"{topology}: {name} has started {started} nodes{f' with {each} processes each' if each else ''}; set "
                f"{f'trainer.devices={each} ' if each else ''}trainer.num_nodes={started}"
            )
    if check_tasks := extend.find("check_tasks"):
        check_tasks(topology)
    environment, env = getattr(strategy, "cluster_environment", None), os.environ
    is_standalone = environment is None or isinstance(environment, LightningEnvironment)
    if is_standalone and "RANK" in env and "LOCAL_RANK" not in env and env.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"RANK={env['RANK']}, WORLD_SIZE={env['WORLD_SIZE']} are set, but LOCAL_RANK is not; set it to the index "
            "of the process on its node, from 0, or start the processes with torchrun"
        )
    expected = topology.num_processes * nodes if getattr(strategy, "num_processes", 0) else topology.world_size
    if (found := external_world_size()) and {topology.world_size, expected} != {found[0]}:
        total, here = found
        raise ConfigError(
            f"{topology}: {total} processes were started; set trainer.devices={here} "
            f"trainer.num_nodes={max(1, total // here)}"
        )


def check_type(name: str, node: DictConfig, made: Any, wanted: type) -> None:
    """Check the type of a component, which may come from a function without a return annotation.

    Args:
        name: Dotted key of the component.
        node: Its part of the configuration.
        made: The component; None if there is none.
        wanted: A class of Lightning.

    Raises:
        ConfigError: It has another type.
    """
    if not isinstance(made, wanted) and made is not None:
        kind = type(made)
        raise ConfigError(
            f"{name}._target_={node._target_}: expected a lightning.pytorch.{wanted.__name__}, "
            f"got {kind.__module__}.{kind.__qualname__}{remedy(kind)}"
        )


def check_built(cfg: DictConfig, task: Any, data: Any) -> None:
    """Check the types of task and data, and that there is data.

    Raises:
        ConfigError: One has the wrong type, or there is no data.
    """
    check_type("task", cfg.task, task, L.LightningModule)
    check_type("data", cfg.data, data, L.LightningDataModule)
    has_loader = is_overridden("train_dataloader", task)
    if data is None and not has_loader:
        raise ConfigError(f"data=null: task={cfg.choices.task} has no train_dataloader; choose data=…")
    if data is not None and has_loader and is_rank_zero():
        print(
            f"note: data={cfg.choices.data} is used instead of the dataloaders of task={cfg.choices.task}; "
            "set data=null to use those"
        )


def check_sync_batchnorm(cfg: DictConfig, trainer: L.Trainer, task: nn.Module) -> None:
    """Check that BatchNorm is synchronized on GPUs, as torch requires, and by a strategy that does so.

    Raises:
        ConfigError: It is not.
    """
    strategy, has_layers = trainer.strategy, any(isinstance(module, BatchNorm) for module in task.modules())
    if not (cfg.trainer.get("sync_batchnorm") and has_layers):
        return
    if strategy.root_device.type == "cpu":
        raise ConfigError("trainer.sync_batchnorm=true: torch synchronizes BatchNorm only on GPUs; set it to false")
    kinds = strategies.DDPStrategy | strategies.FSDPStrategy | strategies.ModelParallelStrategy
    is_parallel = isinstance(strategy, strategies.ParallelStrategy)
    if isinstance(strategy, strategies.DeepSpeedStrategy) or (is_parallel and not isinstance(strategy, kinds)):
        raise ConfigError(
            f"trainer.sync_batchnorm=true: {type(strategy).__name__} does not synchronize BatchNorm; set it to false, "
            "or use trainer=ddp"
        )


def check_batch(topology: Topology, data: L.LightningDataModule) -> None:
    """Check that the global batch divides over the data-parallel ranks; other data modules set it per rank.

    Raises:
        ConfigError: It does not.
    """
    if isinstance(data, NativeData):
        with as_config_error():
            check_batch_size(data.batch_size, topology.data_ranks)


def check_kind(cfg: DictConfig, task: object, data: L.LightningDataModule) -> None:
    """Check that the task, or its class, and the data have the same kind, such as classification.

    Raises:
        ConfigError: They do not.
    """
    if not isinstance(task, HasKind) or not isinstance(data, HasKind):
        return
    expected, actual = str(task.kind), str(data.kind)
    options = {"classification": "classification", "regression": "regression", "language_modeling": "language"}
    if expected in options and actual in options and expected != actual:  # other classes may use `kind` differently
        picked = cfg.choices
        raise ConfigError(
            f"task={picked.task} expects {expected} data, but data={picked.data} is {actual} data; "
            f"try task={options[actual]}{f' or data.kind={expected}' if 'kind' in cfg.data else ''}"
        )


def check_num_classes(cfg: DictConfig) -> None:
    """Check that ``num_classes`` of each metric equals that of the data.

    Raises:
        ConfigError: One does not.
    """
    num_classes, metrics = (cfg.get("data") or {}).get("num_classes"), cfg.task.get("metrics")
    for name in map(str, metrics if isinstance(metrics, DictConfig) else ()):
        metric = metrics[name]
        classes = metric.get("num_classes") if isinstance(metric, DictConfig) else None
        if isinstance(num_classes, int) and isinstance(classes, int) and classes != num_classes:
            key = f"task.metrics.{name!s}.num_classes"
            raise ConfigError(
                f"{key}={classes}, but data.num_classes={num_classes}; set {key}={num_classes}, or remove it"
            )


def check_monitors(task: L.LightningModule, callbacks: dict[str, Callback]) -> None:
    """Check that every monitored metric is logged, if the task lists what it logs.

    Raises:
        ConfigError: One is not logged; training would end without a checkpoint.
    """
    if not isinstance(task, NativeTask):
        return
    logged = task.logged_metrics
    owners = {f"callback.{name}.monitor": callback for name, callback in callbacks.items()} | {"task.monitor": task}
    for path, owner in owners.items():
        metric = owner.monitor if isinstance(owner, HasMonitor) else None
        if metric is not None and metric not in logged:
            listed = ", ".join(sorted(logged))
            near = hint(metric, logged)
            rest = "" if near else "; correct it, or remove it"
            raise ConfigError(f"{path}={metric} is never logged{near} (there are: {listed}){rest}")


def _can_be_called(make: Callable[..., Any], argument: Any) -> bool:
    """Whether ``make`` needs no further argument; a module may pass more."""
    try:
        inspect.signature(make).bind(argument)
    except TypeError:
        return False
    return True


def check_optimizer(task: L.LightningModule) -> None:
    """Check the values of optimizer and scheduler by instantiating them for a dummy parameter.

    Raises:
        ConfigError: One refuses its values.
    """
    argument: Any = [nn.Parameter(torch.zeros(1))]
    for name in ("optimizer", "scheduler"):
        make = inspect.getattr_static(task, name, None)  # no property is evaluated
        if not isinstance(make, partial) or not (isinstance(task, NativeTask) or _can_be_called(make, argument)):
            return
        needs_steps = "total_steps" in parameters(make.func) and make.keywords.get("total_steps") is None
        try:
            argument = make(argument, **({"total_steps": 100} if needs_steps else {}))
        except (ValueError, TypeError, RuntimeError) as error:
            text = one_line(error)
            named = text if text.startswith(f"{name}.") else name_setting(name, make.func, make.keywords, text)
            raise ConfigError(named) from error
