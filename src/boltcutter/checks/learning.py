"""Detect a run that trains nothing, which would otherwise end as completed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import _MockOptimizer
from torch.optim import Optimizer

from boltcutter.checks.resources import ResourceNotes
from boltcutter.config.compose import DictConfig
from boltcutter.run.folder import update_record

MIN_BATCHES = 8  # fewer may have the same loss by chance
HOOKS = ("on_before_optimizer_step", "on_train_batch_end")


class NoGradientError(RuntimeError):
    """No parameter of the optimizer has a gradient."""

    hide_traceback = True  # needs no traceback


def callbacks(cfg: DictConfig) -> list[Callback]:
    """The callbacks of each training: on resources, and a model that does not learn."""
    return [ResourceNotes(), LearningCheck(cfg)]


class LearningCheck(Callback):
    """Check that training changes the model, in the first steps and at the end of the first epoch.

    Training stops if no parameter of the optimizer gets a gradient. Warnings are printed and recorded if
    ``training_step`` returns no loss, there is no optimizer, all learning rates are 0, or the loss is constant. As soon
    as all is well, usually after two steps, the hooks are removed.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.folder = Path(cfg.folder)
        self._reset()

    def _reset(self) -> None:
        self._batches = self._updates = self._rated = 0  # optimizer steps, and those with a learning rate above 0
        self._has_gradient = self._varies = False
        self._loss: float | None = None
        self._versions: list[int] = []  # numbers of changes in place, of each parameter

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that there is an optimizer."""
        self._reset()
        self._versions = versions(pl_module)
        if pl_module.automatic_optimization and all(isinstance(o, _MockOptimizer) for o in trainer.optimizers):
            self._end(trainer, "configure_optimizers returned None, so nothing is trained; return an optimizer")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Look for a gradient, and a learning rate above 0."""
        self._updates += 1
        self._rated += any(group.get("lr") != 0 for group in optimizer.param_groups)
        if not self._has_gradient:  # of sharded parameters, a rank may have none
            found = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
            self._has_gradient = trainer.strategy.reduce_boolean_decision(found, all=False)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the losses of the first batches."""
        self._batches += 1
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        automatic = pl_module.automatic_optimization
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._varies |= self._loss not in (None, float(loss))
            self._loss = float(loss)
        if automatic and self._updates and self._loss is not None:
            self._check_gradient(trainer, pl_module)
        if self._has_gradient and self._rated and (self._varies or not automatic):
            self._remove_hooks()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Conclude, if the epoch was long enough."""
        self._conclude(trainer, pl_module, ends=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Conclude."""
        self._conclude(trainer, pl_module, ends=True)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the hooks for another training."""
        for hook in HOOKS:
            vars(self).pop(hook, None)

    def _conclude(self, trainer: L.Trainer, module: L.LightningModule, *, ends: bool) -> None:
        if vars(self).get(HOOKS[0], self) is None or not self._batches:
            return
        if not module.automatic_optimization:
            if self._updates:
                self._check_gradient(trainer, module)
            elif self._versions == versions(module):
                self._end(trainer, "no optimizer has changed a parameter; call step() in training_step")
        elif self._loss is None:
            self._end(trainer, f"training_step returned None for all {self._batches} batches; return the loss")
        elif self._updates and not self._rated and (ends or not trainer.lr_scheduler_configs):
            text = f"all learning rates were 0 in {self._updates} steps; raise the rate, or correct the schedule"
            self._end(trainer, text)
        elif self._rated > 1 and self._batches >= MIN_BATCHES and not self._varies:
            text = f"the loss was {self._loss:g} in all {self._batches} batches; compute it from the model's outputs"
            self._end(trainer, text)

    def _check_gradient(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Gradients may be kept elsewhere, as by DeepSpeed or an optimizer that steps within the backward pass.
        if not self._has_gradient and self._versions == versions(module):
            names = ", ".join(sorted({type(getattr(o, "optimizer", o)).__name__ for o in trainer.optimizers}))
            raise NoGradientError(
                f"no parameter of {names} gets a gradient: the loss of {type(module).__name__}.training_step depends "
                "on none of them; compute it from the model's outputs, and pass its parameters to the optimizer"
            )

    def _end(self, trainer: L.Trainer, text: str) -> None:
        self._remove_hooks()
        if trainer.is_global_zero:
            print(f"warning: nothing is trained: {text}", file=sys.stderr)
            update_record(self.folder, warning=f"nothing is trained: {text}")

    def _remove_hooks(self) -> None:
        vars(self).update(dict.fromkeys(HOOKS))  # Lightning skips hooks that are not callable


def versions(module: L.LightningModule) -> list[int]:
    """How often each parameter was changed in place."""
    return [parameter._version for parameter in module.parameters()]
