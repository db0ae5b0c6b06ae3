"""Checks that trainer, data and task match each other and the launched processes; each raises a ConfigError if not."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any, get_origin

import lightning as L
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from boltcutter.checks.monitors import required_monitor
from boltcutter.config import foreign
from boltcutter.config.errors import ConfigError, as_config_error, hint
from boltcutter.config.locate import locate
from boltcutter.config.settings import Settings
from boltcutter.environment import platform_facts as platform
from boltcutter.environment import slurm_tasks
from boltcutter.environment.process import external_world_size, is_rank_zero
from boltcutter.protocols import NativeData, NativeTask
from boltcutter.topology import Topology, check_batch_size


def check_batches_and_clipping(trainer: Mapping[str, Any]) -> None:
    """Check numbers in settings of the trainer that Lightning accepts, but with which it fails or trains nothing."""
    for key, example in {"accumulate_grad_batches": 1, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}.items():
        if isinstance(number := trainer.get(key), int | float) and number <= 0:
            unit = "epochs" if key.endswith("epoch") else "batches"
            raise ConfigError(f"trainer.{key}={number} is not a positive number of {unit}; try {example}")
    plugins = trainer.get("plugins") or []
    if trainer.get("accelerator") == "tpu" and not any("HostCheckpointIO" in str(plugin) for plugin in plugins):
        raise ConfigError(
            "trainer.accelerator=tpu needs another plugin for checkpoints; use trainer=tpu instead",
            kind="conflict",
        )
    for key in ("max_epochs", "max_steps"):
        if isinstance(number := trainer.get(key), int) and number < -1:
            raise ConfigError(f"trainer.{key}={number} is negative; try 10, or -1 for no limit")
    limit, norm = trainer.get("limit_train_batches"), trainer.get("gradient_clip_val")
    if limit is not None and limit == 0:
        raise ConfigError(f"trainer.limit_train_batches={limit} leaves no batch to train on; try 1.0, which is all")
    if norm is not None and not norm >= 0:
        raise ConfigError(f"trainer.gradient_clip_val={norm} is negative or NaN; try 1.0, or null for no clipping")


def check_world_size(trainer: L.Trainer, topology: Topology) -> None:
    """Check that the trainer uses all launched processes; otherwise each would train separately in the same folder."""
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
    slurm_tasks.check_tasks(topology)
    check_address(topology)
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


def check_address(topology: Topology) -> None:
    """Check that ranks of one node can look up ``MASTER_ADDR``; that of other nodes may be known later.

    Raises:
        ConfigError: There is no such host, which torch would look for until its timeout.
    """
    address = os.environ.get("MASTER_ADDR")
    if not address or topology.world_size < 2 or topology.num_nodes > 1:
        return
    try:
        socket.getaddrinfo(address, None)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"MASTER_ADDR={address}: no such host ({error}); correct it, or unset it") from None


def check_type(name: str, node: Mapping[str, Any], made: Any, wanted: type) -> None:
    """Check that the component ``made`` from ``node`` is None or of a class of Lightning.

    It may come from a function without a return annotation.
    """
    if not isinstance(made, wanted) and made is not None:
        raise _wrong_type(name, str(node["_target_"]), type(made), wanted)


def check_return_type(name: str, target: str, wanted: type) -> None:
    """Check, before a target is called, that it is no class of another kind, nor a function that returns one.

    A function without a return annotation is called, unless it is one of C, such as ``os.system``.
    """
    found = locate(target)
    kind = found if isinstance(found, type) else getattr(found, "__annotations__", {}).get("return")
    kind = get_origin(kind) or kind
    if inspect.isbuiltin(found) or (isinstance(kind, type) and not issubclass(kind, wanted)):
        raise _wrong_type(name, target, kind if isinstance(kind, type) else type(found), wanted)


def _wrong_type(name: str, target: str, kind: type, wanted: type) -> ConfigError:
    return ConfigError(
        f"{name}._target_={target}: expected a lightning.pytorch.{wanted.__name__}, "
        f"got {kind.__module__}.{kind.__qualname__}{foreign.remedy(kind) or ''}",
        kind="wrong_type",
    )


def check_built(cfg: Settings, task: Any, data: Any) -> None:
    """Check the types of task and data, and that there is data."""
    check_type("task", cfg.task, task, L.LightningModule)
    check_type("data", cfg.data, data, L.LightningDataModule)
    has_loader = is_overridden("train_dataloader", task)
    if data is None and not has_loader:
        raise ConfigError(f"data=null: task={cfg.choices['task']} has no train_dataloader; choose data=…")
    if data is not None and has_loader and is_rank_zero():
        print(
            f"note: data={cfg.choices['data']} is used instead of the dataloaders of task={cfg.choices['task']}; "
            "set data=null to use those"
        )


def check_components(
    cfg: Settings,
    topology: Topology,
    data: L.LightningDataModule | None,
    task: L.LightningModule,
    callbacks: Iterable[Any],
) -> None:
    """Let components refuse one another: a global batch, names of classes, and tasks that a callback cannot handle."""
    classes, num_classes = getattr(data, "classes", None), getattr(data, "num_classes", None)
    names = [*classes] if isinstance(classes, list | tuple) else []
    # A module of others may have a class without a name, as a background.
    is_exact = isinstance(data, NativeData)
    if names and isinstance(num_classes, int) and (num_classes < len(names) or (is_exact and num_classes > len(names))):
        raise ConfigError(
            f"data.num_classes={num_classes}, but {type(data).__name__}.classes has {len(names)} names; set "
            f"data.num_classes={len(names)}, or correct its classes"
        )
    with as_config_error():
        if isinstance(data, NativeData):  # other data modules set the batch per rank
            check_batch_size(data.batch_size, topology.data_ranks)
        for callback in callbacks:
            if check_task := getattr(callback, "check_task", None):
                check_task(task)


def check_monitors(task: L.LightningModule, callbacks: Mapping[str, Callback]) -> None:
    """Check that every monitored metric is logged, if the task lists what it logs."""
    if not isinstance(task, NativeTask):
        return
    logged = task.logged_metrics
    monitors = {f"callback.{name}.monitor": required_monitor(callback) for name, callback in callbacks.items()}
    for path, metric in (monitors | {"task.monitor": getattr(task, "monitor", None)}).items():
        if metric is not None and metric not in logged:
            listed = ", ".join(sorted(logged))
            near = hint(metric, logged)
            rest = "" if near else "; correct it, or remove it"
            raise ConfigError(f"{path}={metric} is never logged{near} (there are: {listed}){rest}")
