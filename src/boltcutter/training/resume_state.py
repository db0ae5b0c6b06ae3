"""What Lightning's checkpoints lack: metrics of an unfinished epoch, those that are monitored, and what is frozen."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torchmetrics import Metric, MetricCollection

from boltcutter.internals import continue_results, epoch_results, is_last_batch, load_loader_states, log_epoch
from boltcutter.protocols import NativeTask, data_parallel, gather_objects
from boltcutter.task.metric_states import get_state, plain_tensor, set_state
from boltcutter.task.results import reduction

OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute")
RESTORED = re.compile(r"torch.optim.\w+\.py:|callbacks.model_checkpoint\.py:")
METRICS = re.compile(r"torchmetrics|logger_connector|:(log|_accumulate|_update_metrics)$")  # what uses their state
VALUES = ("value", "cumulated_batch_size", "_forward_cache")  # the last one is that of the latest step


class ResumeState(Callback):
    """Save what a resumed run needs to log, monitor and train the same as an uninterrupted one.

    Lightning saves neither the values that a module has logged, nor the states of its metrics (a ``NativeTask`` saves
    its own), and logs the metrics of an epoch after its checkpoints are saved. A resumed run has no metrics that
    callbacks and schedulers could monitor before its first validation, and layers that were unfrozen are frozen again.
    """

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}
        self._checkpoint: dict[str, Any] | None = None  # what a resumed run has loaded, until training begins
        self._is_training = self._is_searching = False  # in a search, a callback saves and restores before training
        self._trained: dict[str, bool] = {}  # whether each parameter was trained at the start
        self._updates: dict[str, int] = {}  # of each metric, before validation
        self._resumed_epoch = 0
        self._forms: list[Any] = []  # of the states of metrics at the start
        self._is_suspect = False  # whether an error of a metric may be one of its restored state

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note the forms of metrics, and convert weights, which Lightning does after it has loaded rounded ones."""
        if stage == "fit":
            self._checkpoint, self._is_training, self._is_searching = None, False, False
        self._forms = _forms(pl_module)
        if trainer.precision == "64-true":
            pl_module.double()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the state of this rank, unless the number of ranks has changed, or a search restores its own."""
        if self._is_training or self._is_searching:
            return
        self._checkpoint = checkpoint if trainer.state.fn == "fit" else None
        ranks = checkpoint.get("resume_state", []) if self._checkpoint else []
        self._saved = ranks[trainer.global_rank] if len(ranks) == trainer.world_size else {}
        if isinstance(pl_module, NativeTask):
            self._is_suspect = any(state.get("pending") for state in checkpoint.get("train_metrics") or [])

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let Lightning restore what it has forgotten after a search for a batch size or a learning rate."""
        if self._is_searching and self._checkpoint:
            trainer._checkpoint_connector._loaded_checkpoint = self._checkpoint
            trainer.fit_loop._combined_loader = None  # it was made for the search
        self._checkpoint, self._is_searching = None, False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the state."""
        load_loader_states(trainer)
        self._trained = {name: parameter.requires_grad for name, parameter in pl_module.named_parameters()}
        saved, self._saved, self._is_training = self._saved, {}, True
        self.restore_epoch(trainer, pl_module, saved)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Metrics begin anew."""
        self._is_suspect = self._is_suspect and trainer.current_epoch == self._resumed_epoch

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Mark an error in what is restored as one of the checkpoint; in metrics, if their state has another form."""
        places = [f"{frame.filename}:{frame.name}" for frame in traceback.extract_tb(exception.__traceback__)]
        is_ours = not trainer.ckpt_path or isinstance(exception, MisconfigurationException)
        in_restored = any(map(RESTORED.search, places[-1:])) and trainer.current_epoch == self._resumed_epoch
        if (in_restored and not is_ours) or (self._is_suspect and any(map(METRICS.search, places))):
            exception.is_of_checkpoint = True  # type: ignore[attr-defined]

    def restore_epoch(self, trainer: L.Trainer, pl_module: L.LightningModule, saved: dict[str, Any]) -> None:
        """Restore the state of an epoch, which may be that of somebody else; any error is one of the checkpoint."""
        for name, parameter in pl_module.named_parameters():
            parameter.requires_grad_(saved.get("trained", {}).get(name, parameter.requires_grad))
        trainer.callback_metrics.update({name: value.reshape(()) for name, value in saved.get("monitored", {}).items()})
        states = saved.get("states", {})
        for name, metric in _metrics(pl_module).items():
            if name in states:
                with suppress(ValueError):  # it has been replaced
                    set_state(metric, states[name])
        if saved.get("logged"):
            _restore(trainer, pl_module, saved["logged"])
        self._resumed_epoch = trainer.current_epoch
        self._is_suspect |= _forms(pl_module) != self._forms

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count updates: what a validation updates begins anew if it is interrupted. Buffers are those of rank 0."""
        is_replicated = dist.is_initialized() and data_parallel(trainer.strategy).size == trainer.world_size > 1
        if is_replicated and not isinstance(pl_module, NativeTask):
            for buffer in pl_module.buffers():
                dist.broadcast(buffer, 0)
        self._updates = {name: metric.update_count for name, metric in _metrics(pl_module).items()}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the state of each rank; at the end of an epoch, log its metrics first.

        Before training, it is what was loaded.
        """
        if not self._is_training:
            self._is_searching = True
            checkpoint["resume_state"] = gather_objects(self._saved)
            return
        progress: Any = trainer.fit_loop.epoch_progress.current
        metrics = {name: metric for name, metric in _metrics(pl_module).items() if metric.update_count}
        if trainer.validating:
            metrics = {name: item for name, item in metrics.items() if item.update_count == self._updates.get(name)}
        logged = epoch_results(trainer)
        if progress.started == progress.processed > progress.completed:
            log_epoch(trainer)
            if is_last_batch(trainer):  # then Lightning resets what was logged
                reset = {id(item.value) for item in logged.values()}
                metrics = {name: metric for name, metric in metrics.items() if id(metric) not in reset}
                logged = {}
        named = [(name, p) for name, p in pl_module.named_parameters() if name in self._trained]
        local = {
            "trained": {name: p.requires_grad for name, p in named if p.requires_grad != self._trained.get(name)},
            "monitored": {name: plain_tensor(value) for name, value in trainer.callback_metrics.items()},
            "states": {name: get_state(metric) for name, metric in metrics.items()},
            "logged": {key: _state(item) for key, item in logged.items() if _can_restore(key, item)},
        }
        checkpoint["resume_state"] = gather_objects(local)


def _forms(module: L.LightningModule) -> list[Any]:
    """Shapes and types of the states of all metrics, which grow in some."""
    states = [state for part in module.modules() if isinstance(part, Metric) for state in part.metric_state.values()]
    listed = [state if isinstance(state, list) else [state] for state in states]
    return [[(value.shape, value.dtype, value.layout) for value in state] for state in listed]


def _metrics(module: L.LightningModule) -> dict[str, Metric]:
    """Metrics of a module by name."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            list(part.items(copy_state=False))  # metrics that share a state refer to it again
    own = ("metrics.", "means.") if isinstance(module, NativeTask) else ()
    found = module.named_modules()
    return {name: part for name, part in found if isinstance(part, Metric) and not name.startswith(own)}


def _can_restore(key: str, item: Any) -> bool:
    meta = item.meta
    is_plain = meta.sync.group is None and meta.reduce_fx is getattr(torch, meta.reduce_fx.__name__, None)
    return is_plain and not item.has_reset and not key.startswith("on_train_epoch_end.")


def _state(item: Any) -> dict[str, Any]:
    """What a module has logged under a name, as plain types."""
    options = {name: getattr(item.meta, name) for name in OPTIONS}
    options |= {"reduce_fx": item.meta.reduce_fx.__name__, "sync_dist": item.meta.sync.should}
    options["rank_zero_only"] = item.meta.sync.rank_zero_only
    values = {name: getattr(item, name, None) for name in VALUES}
    tensors = {name: plain_tensor(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return {"options": options, "tensors": tensors}


def _restore(trainer: L.Trainer, module: L.LightningModule, saved: dict[str, Any]) -> None:
    """Log the same again, and set the values to those of the checkpoint."""
    results, parts = epoch_results(trainer), dict(module.named_modules())
    for key, item in saved.items():
        hook, _, name = key.partition(".")
        is_metric = "value" not in item["tensors"]
        value = parts.get(item["options"]["metric_attribute"]) if is_metric else torch.zeros((), device=module.device)
        if value is not None:
            reduce = reduction(trainer, hook, name, on_step=item["options"]["on_step"] and not is_metric)
            results.log(hook, name, value, batch_size=1, sync_dist_fn=reduce, **item["options"])
            for attribute in item["tensors"].keys() & set(VALUES):
                setattr(results[key], attribute, item["tensors"][attribute].reshape(()).to(module.device))
    continue_results(trainer)
    results.log = partial(_log_again, results, saved)


def _log_again(results: Any, saved: dict[str, Any], hook: str, name: str, *args: Any, **options: Any) -> None:
    """Log as before, unless the module has changed, and logs it with other options."""
    log = type(results).log
    try:
        log(results, hook, name, *args, **options)
    except MisconfigurationException:
        if saved.pop(f"{hook}.{name}", None) is None:
            raise
        del results[f"{hook}.{name}"]
        log(results, hook, name, *args, **options)
