"""Support for LightningModules and LightningDataModules that are not subclasses of the library's own."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from boltcutter.config.errors import ConfigError
from boltcutter.environment.process import is_rank_zero
from boltcutter.protocols import NativeTask

DEFAULT_CLIPPING = 1.0  # of configs/trainer/default.yaml, where Lightning has none
WRAPPER = "_orig_mod"  # what torch.compile inserts into names


def adapt(trainer: L.Trainer, task: L.LightningModule, *, is_own: bool = False) -> None:
    """Adapt the trainer to a module's own clipping or optimization.

    Args:
        trainer: The trainer.
        task: The module.
        is_own: Whether the user has built the trainer, so that no argument is a default of the library.

    Raises:
        ConfigError: A setting has no effect with manual optimization.
    """
    name, default = type(task).__name__, None if is_own else DEFAULT_CLIPPING
    if task.automatic_optimization:
        clips_itself = is_overridden("configure_gradient_clipping", task) and not isinstance(task, NativeTask)
        if clips_itself and default and trainer.gradient_clip_val == default:
            why = f"{name}.configure_gradient_clipping clips gradients; any other value is passed to it"
            _leave_clipping(trainer, default, why)
        return
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: {name} uses manual optimization and "
            "must accumulate gradients itself; set trainer.accumulate_grad_batches=1"
        )
    why = f"{name} uses manual optimization; call self.clip_gradients in its training_step"
    _leave_clipping(trainer, default, why)


def _leave_clipping(trainer: L.Trainer, default: float | None, why: str) -> None:
    """Do not clip the gradients of a module that does so itself; Lightning would refuse a second value.

    Raises:
        ConfigError: The user has set ``gradient_clip_val``.
    """
    value = trainer.gradient_clip_val
    if value and value != default:
        raise ConfigError(f"trainer.gradient_clip_val={value} has no effect: {why}; set trainer.gradient_clip_val=null")
    if value and is_rank_zero():
        print(f"trainer.gradient_clip_val={value}, the default, has no effect: {why}")
    trainer.gradient_clip_val = trainer.gradient_clip_algorithm = None


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
