"""Metrics that callbacks and schedulers monitor: unknown ones are reported early, an unknown default is replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden

from boltcutter.config.errors import ConfigError, hint
from boltcutter.protocols import NativeTask
from boltcutter.run.metrics import Mode, infer_mode

DEFAULT_MONITOR = "val/loss"  # in ``configs/callback``; the name under which built-in tasks log their loss
VALIDATION = re.compile(r"(^|[^a-z])(val|valid|validation|eval|dev)([^a-z]|$)", re.I)
HOOKS = ("on_validation_end", "on_train_batch_end")
ALWAYS_KNOWN = ("epoch", "step")  # what a ModelCheckpoint may monitor though nobody logs it
LATE_HOOKS = ("on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end")  # may log after the first step


class MonitorCheck(Callback):
    """Check that each monitored metric is logged, for modules that do not declare the metrics they log.

    Validation metrics are known after the sanity check, training metrics after the first batch. The default,
    ``val/loss``, is replaced if the module logs its validation loss, or its only validation metric, under another name.
    """

    restores_monitors = True  # before Lightning restores the states of callbacks, whose keys contain monitors

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self.callbacks = dict(callbacks)
        self.replaced: dict[str, tuple[str | None, Mode]] = {}  # monitor and mode by name of the callback
        self._validated: set[str] | None = None  # metrics of the latest validation
        self._trained: set[str] | None = None  # metrics of the first training batch
        self._validation_done = False  # a full one, not only the sanity check

    def state_dict(self) -> dict[str, Any]:
        """Replaced monitors, so that a resumed run uses the same ones; empty, which is not saved, if there are none."""
        return {"replaced": {name: list(choice) for name, choice in self.replaced.items()}} if self.replaced else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the monitors before Lightning restores the state of callbacks, whose keys contain them."""
        for name, (monitor, mode) in state_dict["replaced"].items():
            if name in self.callbacks and name not in self.replaced:
                self._replace(name, monitor, mode)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Do nothing for a module that declares its metrics, which were checked before."""
        if isinstance(pl_module, NativeTask):
            vars(self).update(dict.fromkeys(HOOKS))  # Lightning skips hooks that are not callable

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the validation metrics."""
        if trainer.state.fn == "fit" and not self._validation_done:
            own = {result.meta.name for result in (trainer._results or {}).values()}
            self._validated = {
                name for name in trainer.callback_metrics if name in own or name not in (self._trained or ())
            }
            self._validation_done = not trainer.sanity_checking
            if trainer.sanity_checking and any("sanity" in name.lower() for name in self._validated):
                self._validated = set()  # the module names its metrics by the stage, so later ones are unknown
            self._replace_or_refuse(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the training metrics, once."""
        self._trained = logged_metrics(trainer)
        self._replace_or_refuse(trainer, pl_module)
        vars(self)["on_train_batch_end"] = None  # Lightning skips hooks that are not callable

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Reset for another training."""
        for hook in HOOKS:
            vars(self).pop(hook, None)

    def _replace_or_refuse(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Replace or refuse monitored metrics that are certainly not logged."""
        validated, trained = trainer.strategy.broadcast((self._validated or set(), self._trained or set()))
        known = validated | trained
        # A module may log nothing during the sanity check.
        after_validation = bool(validated) or self._validation_done or not trainer.enable_validation
        after_training = self._trained is not None and not any(is_overridden(hook, module) for hook in LATE_HOOKS)
        for path, name, metric in [*self._monitored(), *scheduler_monitors(trainer)]:
            # A metric of another name may be one of validation, too.
            certain = after_validation and (after_training or bool(VALIDATION.search(metric)))
            # It may be logged at the end of the epoch, when callbacks and schedulers read it.
            if metric != DEFAULT_MONITOR and is_overridden("on_train_epoch_end", module):
                certain = False
            if metric in known or not certain:
                continue
            # A metric chosen from those of the sanity check may be logged only there.
            is_default = name in self.callbacks and (metric == DEFAULT_MONITOR or name in self.replaced)
            if is_default and self._replace_default(name, path, validated, trainer):
                continue
            listed = ", ".join(sorted(known)) or "none yet"
            raise ConfigError(
                f"{path}={metric} is not logged{hint(metric, known)} (logged metrics: {listed}); set it to one of them"
            )

    def _monitored(self) -> Iterator[tuple[str, str, str]]:
        for name, callback in self.callbacks.items():
            if monitor := required_monitor(callback):
                yield f"callback.{name}.monitor", name, monitor

    def _replace_default(self, name: str, path: str, validated: set[str], trainer: L.Trainer) -> bool:
        """Replace a callback's monitor; False if it does not support the available metrics."""
        callback: Any = self.callbacks[name]
        monitor, mode = choose_monitor(validated) or (None, "min")
        if not hasattr(callback, "replace_monitor") and (monitor is None or callback.mode != mode):
            return False
        self._replace(name, monitor, mode)
        if trainer.is_global_zero:
            logged = ", ".join(sorted(validated)) or "none"
            change = f"; monitoring {monitor} ({mode}) instead, set it to change this"
            none = f" (validation metrics: {logged}); no best checkpoint is saved unless you set it"
            print(f"{path}: {DEFAULT_MONITOR} is not logged{change if monitor else none}")
        return True

    def _replace(self, name: str, monitor: str | None, mode: Mode) -> None:
        callback: Any = self.callbacks[name]
        if hasattr(callback, "replace_monitor"):
            callback.replace_monitor(monitor, mode)
        else:
            callback.monitor = monitor
        self.replaced[name] = (monitor, mode)


def required_monitor(callback: Callback) -> str | None:
    """The metric without which a callback cannot work; what other classes call ``monitor`` may be something else."""
    if isinstance(callback, ModelCheckpoint):
        return callback.monitor if callback.save_top_k and callback.monitor not in ALWAYS_KNOWN else None
    if isinstance(callback, EarlyStopping):
        return callback.monitor if callback.strict else None
    return getattr(callback, "monitor", None) if isinstance(callback, ProgressBar) else None


def logged_metrics(trainer: L.Trainer) -> set[str]:
    """Names of all metrics logged in training so far, including means of unfinished epochs."""
    names = set()
    for result in (trainer._results or {}).values():  # also means of the epoch, unlike callback_metrics
        meta = result.meta
        names |= {meta.name, *((f"{meta.name}_step", f"{meta.name}_epoch") if meta.on_step and meta.on_epoch else ())}
    return names | set(trainer.callback_metrics)


def scheduler_monitors(trainer: L.Trainer) -> Iterator[tuple[str, str, str]]:
    """Metrics monitored by learning rate schedulers, as (path, callback, metric)."""
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor and config.strict:
            yield "task: the monitor of its learning rate scheduler", "", config.monitor


def choose_monitor(names: set[str]) -> tuple[str, Mode] | None:
    """The only validation loss, else the only validation metric, with its mode; None if ambiguous."""
    bases = {re.sub(r"_(step|epoch)$", "", name) for name in names}
    found = sorted(name for name in names if name in bases or not {re.sub(r"_(step|epoch)$", "", name)} & names)
    losses = [name for name in found if re.search(r"loss", name, re.I)]
    candidates = [name for name in losses if VALIDATION.search(name)] or losses or found
    if len(candidates) != 1:
        return None
    (name,) = candidates
    better = infer_mode(name)
    return (name, better) if better else None
