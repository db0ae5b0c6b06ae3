"""Metrics that callbacks and schedulers monitor: missing ones are found early, and a missing default is replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.callbacks import Callback

from boltcutter.config import ConfigError, hint
from boltcutter.metrics import Mode, infer_mode

DEFAULT = "val/loss"  # what ``configs/callback`` monitors: the name that tasks of this project give their loss
VALIDATION = re.compile(r"(^|[^a-z])(val|valid|validation|eval|dev)([^a-z]|$)", re.I)
LATE = ("on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end")  # log after the first training step


@runtime_checkable
class ReplacesMonitor(Protocol):
    """A callback that can do with another metric than the configured one, or without any."""

    def replace_monitor(self, monitor: str | None, mode: Mode = "min") -> None:
        """Monitor another metric; None for none."""


class MonitorCheck(Callback):
    """Checks that each monitored metric is logged, for modules that do not list what they log.

    Validation metrics are known after the sanity validation, those of training after the first batch. ``val/loss``, the
    default, is replaced where the module logs its validation loss, or its only validation metric, by another name.

    Args:
        callbacks: Those of the configuration, by name.
    """

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self.callbacks = dict(callbacks)
        self.replaced: dict[str, tuple[str | None, Mode]] = {}  # by name of the callback
        self._validated: set[str] | None = None  # metrics of the newest validation
        self._trained: set[str] | None = None  # metrics of the first training batch
        self._validation_is_over = False  # a whole one, not only the sanity validation

    def state_dict(self) -> dict[str, Any]:
        """What was replaced, so that a resumed run goes on with it."""
        return {"replaced": {name: list(choice) for name, choice in self.replaced.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace it again; before Lightning gives other callbacks their states, which it finds by their monitors."""
        for name, (monitor, mode) in state_dict["replaced"].items():
            if name in self.callbacks and name not in self.replaced:
                self._replace(name, monitor, mode)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Learn what validation logs."""
        if trainer.state.fn == "fit" and not self._validation_is_over:
            self._validated = set(trainer.callback_metrics)
            self._validation_is_over = not trainer.sanity_checking
            self._settle(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Learn what training logs, once."""
        self._trained = logged(trainer)
        self._settle(trainer, pl_module)
        vars(self)["on_train_batch_end"] = None  # Lightning skips a hook that cannot be called

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Be ready for another training."""
        vars(self).pop("on_train_batch_end", None)

    def _settle(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Replace or refuse what is not logged, as far as that is certain."""
        validated, trained = trainer.strategy.broadcast((self._validated or set(), self._trained or set()))
        known = validated | trained
        # A module may log nothing while sanity checking.
        after_validation = bool(validated) or self._validation_is_over or not trainer.enable_validation
        after_training = self._trained is not None and not any(is_own(hook, module) for hook in LATE)
        for path, name, metric in [*self._monitored(), *scheduled(trainer)]:
            certain = after_validation if VALIDATION.search(metric) else after_training
            # It may be logged at the end of the epoch, where callbacks and schedulers look for it.
            if metric != DEFAULT and is_own("on_train_epoch_end", module):
                certain = False
            if metric in known or not certain:
                continue
            if metric == DEFAULT and name in self.callbacks and self._choose(name, path, validated, trainer):
                continue
            listed = ", ".join(sorted(known)) or "none yet"
            raise ConfigError(f"{path}={metric} is not logged{hint(metric, known)} (there are: {listed})")

    def _monitored(self) -> Iterator[tuple[str, str, str]]:
        for name, callback in self.callbacks.items():
            metric = getattr(callback, "monitor", None)
            if metric is not None and getattr(callback, "save_top_k", True):
                yield f"callback.{name}.monitor", name, metric

    def _choose(self, name: str, path: str, validated: set[str], trainer: L.Trainer) -> bool:
        """Replace a callback's monitor; False where it cannot do with what there is."""
        callback: Any = self.callbacks[name]
        monitor: str | None
        mode: Mode
        monitor, mode = choose_monitor(validated) or (None, "min")
        replaces = isinstance(callback, ReplacesMonitor)
        if not replaces and (monitor is None or callback.mode != mode):
            return False
        self._replace(name, monitor, mode)
        if trainer.is_global_zero and monitor:
            print(f"{path}: {DEFAULT} is not logged, so {monitor} is monitored ({mode}); set it to choose another")
        elif trainer.is_global_zero:
            listed = f"and which of {', '.join(sorted(validated))} is best is open" if validated else "nor is another"
            print(f"{path}: {DEFAULT} is not logged, {listed}; only the last checkpoint is kept unless you set it")
        return True

    def _replace(self, name: str, monitor: str | None, mode: Mode) -> None:
        callback: Any = self.callbacks[name]
        if isinstance(callback, ReplacesMonitor):
            callback.replace_monitor(monitor, mode)
        else:
            callback.monitor = monitor
        self.replaced[name] = (monitor, mode)


def choose_monitor(names: set[str]) -> tuple[str, Mode] | None:
    """The metric to monitor: the only loss of validation, else its only metric; None where it is not clear."""
    bases = {re.sub(r"_(step|epoch)$", "", name) for name in names}
    found = sorted(name for name in names if name in bases or not {re.sub(r"_(step|epoch)$", "", name)} & names)
    losses = [name for name in found if re.search(r"loss", name, re.I)]
    candidates = [name for name in losses if VALIDATION.search(name)] or losses or found
    if len(candidates) != 1:
        return None
    (name,) = candidates
    better = infer_mode(name)
    return (name, better) if better else None


def logged(trainer: L.Trainer) -> set[str]:
    """Names of all that was logged in training so far, means of epochs that are not over included."""
    results: Any = trainer._results
    names = set()
    for result in results.values() if results else ():
        meta = result.meta
        names |= {meta.name, *((f"{meta.name}_step", f"{meta.name}_epoch") if meta.on_step and meta.on_epoch else ())}
    return names | set(trainer.callback_metrics)


def scheduled(trainer: L.Trainer) -> Iterator[tuple[str, str, str]]:
    """The metrics that learning rate schedulers wait for."""
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor and config.strict:
            yield "task: the monitor of its learning rate scheduler", "", config.monitor


def is_own(hook: str, module: L.LightningModule) -> bool:
    """Whether a module has written a hook."""
    return getattr(type(module), hook) is not getattr(L.LightningModule, hook)
