"""Apply settings that were changed when a run is resumed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from boltcutter.config.errors import ConfigError, quoted
from boltcutter.config.locate import locate, same_target
from boltcutter.config.redaction import redact
from boltcutter.config.settings import Settings
from boltcutter.config.values import flatten, format_value
from boltcutter.internals import set_last_rates

SECTIONS = ("model", "task", "optimizer", "scheduler", "callback")  # sections whose settings are stored in checkpoints
LR_KEYS = ("lr", "initial_lr", "max_lr", "min_lr")  # entries of a parameter group that hold learning rates
SCHEDULED = ("lr", "momentum", "betas")  # what schedulers set
LENGTH = ("max_epochs", "max_steps", "limit_train_batches", "accumulate_grad_batches")  # they decide how many steps
MAX_REPLAYED = 10_000_000  # steps of a schedule, which take a minute or two; a checkpoint may claim any number
MISSING = object()


class SettingChanges(Callback):
    """Applies changed settings to optimizers, schedulers and callbacks after their state is restored on resume.

    Restoring a checkpoint overwrites the new settings with the old ones. The values that the new settings gave to each
    parameter group are therefore saved before. Learning rates are then scaled in proportion, so that they keep their
    position in the schedule; other values are set directly, as are those of schedulers and callbacks. If training gets
    longer or shorter, the new schedule is repeated up to the resumed step, and continued from there.

    Args:
        cfg: Configuration of the run.

    Attributes:
        changed: Old and new value by key.
        changed_length: The same of the settings of the trainer that decide the length of the training.
        step: Optimizer steps that were done before.
    """

    def __init__(self, cfg: Settings) -> None:
        self.settings = {name: value for name, value in cfg.written.items() if name in SECTIONS}
        self.folder = cfg.folder
        self.changed: dict[str, tuple[Any, Any]] = {}
        self.changed_length: dict[str, tuple[Any, Any]] = {}
        self.step = 0
        self._groups: list[list[dict[str, Any]]] = []  # by optimizer, with the new settings
        self._schedulers: list[dict[str, Any]] = []
        self._saved: Mapping[str, Any] = {}
        # Schedulers, their state at the resumed step, and what they give to each parameter group.
        self._replayed: list[tuple[Any, dict[str, Any], list[dict[str, Any]]]] = []

    def resume(self, saved: Mapping[str, Any], *, ends: bool, planned: Sequence[Any] = ()) -> list[str]:
        """Compare the settings in a checkpoint with the current ones.

        Args:
            saved: The checkpoint.
            ends: Whether training is already finished.
            planned: The length of the training, as by ``length``; not compared if it is empty.

        Returns:
            One line for each changed setting.

        Raises:
            ConfigError: A changed setting cannot take effect.
        """
        self._saved, self.step = saved, int(saved.get("global_step", 0))
        pairs = zip(LENGTH, saved.get("length", ()), planned, strict=False)
        self.changed_length = {f"trainer.{name}": (was, now) for name, was, now in pairs if was != now}
        before = saved.get("settings")
        if before is None:
            return []
        self.changed = changed_settings(before, self.settings)
        for key, (was, now) in self.changed.items():
            prefix = f"{key}={shown(now)}: resume={self.folder}"
            if key in ("optimizer", "optimizer._target_", "scheduler", "scheduler._target_"):
                remedy = "remove the override, or start a new run from its weights with init_from=<checkpoint>"
                raise ConfigError(f"{prefix} restores the state of {shown(was)}; {remedy}")
            if ends:
                raise ConfigError(
                    f"{prefix} is already trained to the end, so it would have no effect; also raise trainer.max_epochs"
                )
        changed = {**self.changed_length, **self.changed}
        return [f"{key}={shown(now)} from now on, was {shown(was)}" for key, (was, now) in changed.items()]

    def described(self) -> dict[str, dict[str, Any]]:
        """Old and new value of each changed setting, as ``was`` and ``now``; without one where it is not set."""
        found: dict[str, dict[str, Any]] = {}
        for key, (was, now) in {**self.changed_length, **self.changed}.items():
            values = {"was": was, "now": now}
            found[key] = {label: _redacted(key, value) for label, value in values.items() if value is not MISSING}
        return found

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the values that the new settings give, before the checkpoint is restored."""
        if self.changed:
            groups = (optimizer.param_groups for optimizer in trainer.optimizers)
            self._groups = [[{k: v for k, v in g.items() if k != "params"} for g in each] for each in groups]
            self._schedulers = [dict(vars(config.scheduler)) for config in trainer.lr_scheduler_configs]
        if self._saved.get("length", length(trainer)) != length(trainer):
            self._replay_schedules(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace restored values by those of the new settings, or of the new schedule."""
        if self.changed:
            self._apply_changes(trainer)
        for scheduler, state, rates in self._replayed:
            scheduler.load_state_dict(state)
            if trainer.is_global_zero and (line := rise(scheduler.optimizer.param_groups, rates)):
                print(f"resume={quoted(str(self.folder))}: {line}")
            if len(rates) == len(scheduler.optimizer.param_groups):  # or else a callback has added some
                for group, new in zip(scheduler.optimizer.param_groups, rates, strict=True):
                    for name, value in new.items():
                        _fill(group, name, value)

    def _replay_schedules(self, trainer: L.Trainer) -> None:
        """Repeat each new schedule up to the resumed step, on the new optimizer, whose state is restored later."""
        names = {key.rpartition(".")[2] for key in self.changed}
        for config, saved in zip(trainer.lr_scheduler_configs, self._saved.get("lr_schedulers", ()), strict=False):
            first = saved.get("_schedulers", [saved])[0]  # a ChainedScheduler has no position of its own
            steps, scheduler = saved.get("last_epoch", first.get("last_epoch")), config.scheduler
            if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau) or steps is None:
                continue
            if names & vars(scheduler).keys():  # a setting of its own, which applies from now on
                continue
            if steps > MAX_REPLAYED:
                raise ValueError(f"schedule of {steps:.3g} steps, at most {MAX_REPLAYED:.0e} for another length")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*lr_scheduler.step")  # the optimizer has made no step
                for _ in range(steps):
                    scheduler.step()
            groups = scheduler.optimizer.param_groups
            rates = [{name: copy.deepcopy(group[name]) for name in SCHEDULED if name in group} for group in groups]
            self._replayed.append((scheduler, copy.deepcopy(scheduler.state_dict()), rates))

    def _apply_changes(self, trainer: L.Trainer) -> None:
        names = {key.rpartition(".")[2] for key in self.changed if not key.startswith(("model.", "callback."))}
        for optimizer, fresh in zip(trainer.optimizers, self._groups, strict=True):
            for group, new in zip(optimizer.param_groups, fresh, strict=True):
                self._set_group(group, new, names)
        for config, values in zip(trainer.lr_scheduler_configs, self._schedulers, strict=True):
            _set_rates(config.scheduler)
            for name in names & values.keys():
                setattr(config.scheduler, name, values[name])
        for key, (was, now) in self.changed.items():
            section, _, rest = key.partition(".")
            name, _, argument = rest.partition(".")
            if section == "callback" and argument.isidentifier() and now is not MISSING:
                kind = locate(self.settings["callback"][name]["_target_"])
                for callback in trainer.callbacks:  # type: ignore[attr-defined]
                    if type(callback) is kind and vars(callback).get(argument, MISSING) == was:
                        setattr(callback, argument, now)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the current settings in the checkpoint."""
        checkpoint["settings"], checkpoint["length"] = self.settings, length(trainer)

    def _set_group(self, group: dict[str, Any], new: dict[str, Any], names: set[str]) -> None:
        values = [now for _, now in self.changed.values()]
        base = "initial_lr" if "initial_lr" in group and "initial_lr" in new else "lr"
        was, now = float(group[base]), float(new[base])
        # A module may use any name for its learning rate, and may schedule it without a torch scheduler.
        named = any(name == "lr" or name.endswith(("_lr", "rate")) for name in names) or now in values
        if was != now and named:
            _fill(group, "lr", float(group["lr"]) * now / was if was and base != "lr" else now)
            for name in LR_KEYS[1:]:
                if name in group and name in new:
                    _fill(group, name, new[name])
        for name in names & new.keys() - {*LR_KEYS}:
            group[name] = new[name]


def length(trainer: L.Trainer) -> list[Any]:
    """What decides how many steps training has."""
    return [getattr(trainer, name) for name in LENGTH]


def _redacted(key: str, value: Any) -> Any:
    content = {key.rpartition(".")[2]: value}
    return next(iter(redact(content, content).values()))


def _fill(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a learning rate, in place if it is a tensor, to which compiled code holds a reference."""
    if isinstance(group[name], Tensor):
        group[name].fill_(float(value))
    else:
        group[name] = value


def _set_rates(scheduler: Any) -> None:
    """Make a scheduler continue from the learning rates of its optimizer."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _set_rates(inner)
    groups = scheduler.optimizer.param_groups if hasattr(scheduler, "optimizer") else []
    if hasattr(scheduler, "base_lrs") and all("initial_lr" in group for group in groups):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        set_last_rates(scheduler, [group["lr"] for group in groups])


def rise(groups: list[dict[str, Any]], rates: list[dict[str, Any]]) -> str | None:
    """One line if the rates of a longer schedule are much larger than those with which training ended before."""
    before, after = (
        max((float(group["lr"]) for group in each if "lr" in group), default=0.0) for each in (groups, rates)
    )
    if after <= 2 * before:
        return None
    return (
        f"the learning rate rises from {before:.3g} to {after:.3g}, its value at this step of the longer schedule; to "
        "continue with a small one, start a new run with init_from=<checkpoint> and optimizer.lr=<small>"
    )


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Old and new value of each setting that differs, by its dotted key; ``MISSING`` for one that is not set."""
    old, new = dict(flatten(before)), dict(flatten(now))
    pairs = {key: (old.get(key, MISSING), new.get(key, MISSING)) for key in (*old, *new)}
    return {
        key: (was, now)
        for key, (was, now) in pairs.items()
        if repr(was) != repr(now) and not (key.endswith("_target_") and same_target(was, now))
    }


def shown(value: Any) -> str:
    """A value of ``changed_settings``, for messages."""
    return "not set" if value is MISSING else format_value(value)
