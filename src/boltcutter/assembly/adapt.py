"""Support for LightningModules and LightningDataModules that are not subclasses of the library's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from boltcutter import extend
from boltcutter.callback.accumulation import MeanOfAccumulated
from boltcutter.config.compose import DictConfig
from boltcutter.config.errors import ConfigError
from boltcutter.config.instantiate import build
from boltcutter.environment.process import is_rank_zero
from boltcutter.protocols import NativeTask

SPAWNING = re.compile(r"ddp_(spawn|fork|notebook)(?:_find_unused_parameters_(true|false))?")
DDP = "boltcutter.strategy.ddp.DDPStrategy"
WRAPPER = "_orig_mod"  # what torch.compile inserts into names


def adapt(trainer: L.Trainer, task: L.LightningModule, callbacks: Mapping[str, Callback]) -> None:
    """Adapt the trainer to accumulated gradients, manual optimization, or a module that does not list its metrics.

    Args:
        trainer: Changed.
        task: Any LightningModule.
        callbacks: Callbacks of the configuration, by name.

    Raises:
        ConfigError: A setting has no effect with manual optimization.
    """
    if callbacks and not isinstance(task, NativeTask) and (monitor_check := extend.find("monitor_check")):
        trainer.callbacks.insert(0, monitor_check(callbacks))  # type: ignore[attr-defined]
    if task.automatic_optimization:
        changes = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks.values())
        if trainer.accumulate_grad_batches != 1 or changes or is_overridden("configure_callbacks", task):
            trainer.callbacks.insert(0, MeanOfAccumulated())  # type: ignore[attr-defined]  # before gradients are checked
        return
    name = type(task).__name__
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: {name} uses manual optimization and "
            "must accumulate gradients itself; set trainer.accumulate_grad_batches=1"
        )
    if trainer.gradient_clip_val:
        if is_rank_zero():
            print(
                f"trainer.gradient_clip_val={trainer.gradient_clip_val} has no effect: {name} uses manual "
                "optimization; call self.clip_gradients in its training_step"
            )
        trainer.gradient_clip_val = trainer.gradient_clip_algorithm = None


def spawning_strategy(trainer: DictConfig) -> dict[str, Any]:
    """Build the strategy behind Lightning's names ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook``; empty for others.

    Lightning's own launcher forwards no signals, and loses the progress of training.

    Args:
        trainer: The ``trainer`` section of the configuration.
    """
    found = SPAWNING.fullmatch(str(trainer.get("strategy")))
    if not found:
        return {}
    options = {"find_unused_parameters": found[2] == "true"} if found[2] else {}
    method = "spawn" if found[1] == "spawn" else "fork"  # in notebooks, too
    return {"strategy": build({"_target_": DDP, "start_method": method, **options}, "trainer.strategy")}


def load_compiled(task: nn.Module) -> None:
    """Let a module load weights that were saved with or without the wrapper of ``torch.compile``.

    Modules of users often compile their network in ``setup("fit")``, so that evaluation has other names than training.
    """
    task.register_load_state_dict_pre_hook(_match_names)  # type: ignore[no-untyped-call]


def _match_names(module: nn.Module, state: dict[str, Any], *args: Any) -> None:
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    names = [name for each in named for name, _ in each]
    if any(WRAPPER in name for name in (*names, *state)):
        own = {_plain(name): name for name in names}
        for key in list(state):
            state[own.get(_plain(key), key)] = state.pop(key)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != WRAPPER)
