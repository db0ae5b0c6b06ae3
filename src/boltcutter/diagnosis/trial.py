"""A trial of a few steps that asks all checks, probes and, for ``audit``, about the data: no training does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import islice
from time import monotonic
from typing import Any

import lightning as L

from boltcutter.diagnosis import averages, on_demand, rates, statements  # noqa: F401  on_demand registers its checks
from boltcutter.diagnosis.evidence import overrides, tensors_of
from boltcutter.diagnosis.invariants import FIRST, Guarded, Invariants
from boltcutter.diagnosis.loaders import MOST, Splits
from boltcutter.diagnosis.metrics import MetricCalls
from boltcutter.diagnosis.probe import Probe, seeded
from boltcutter.internals import tree_leaves

MOST_BATCHES = 64  # before the first step of manual optimization
SECONDS = 60.0  # after which no further step begins, and no further pass of a probe
MOST_TIMES = 2.0  # this, after which no further check of a moment is asked


class Trial(Invariants):
    """Train eight steps, ask the probes before the first one, and end the training.

    Args:
        with_data: Whether it also asks about the data, and shows notes.
        weights: Called after the last step with the module: loads trained weights, which are compared with baselines,
            and returns whether their validation had been best before their training ended.
        seconds: Time for the steps, and for the probes.
        **options: Of ``Invariants``.
    """

    is_trial = True

    def __init__(
        self,
        *,
        with_data: bool = False,
        weights: Callable[[L.LightningModule], bool] | None = None,
        seconds: float = SECONDS,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.with_data, self.weights, self.seconds = with_data, weights, seconds
        self.shows_notes = with_data
        self._batches, self._end = 0, math.inf

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Ask the probes before the first step."""
        if (seen := self._seen) is None:
            return
        rates.follow(seen)
        if self._batches:
            with Guarded(self):
                averages.follow(seen)
                statements.follow(seen)
            return
        fit = trainer.fit_loop
        fit.min_epochs, fit.epoch_loop.min_steps = None, None  # which keep a training from ending
        if seen.compiled or seen.sharded or trainer.world_size > 1:
            self._note("probes", "a compiled or sharded model is not probed; set task.compile=false, or use one device")
        elif any(t.grad_fn is not None for t in tensors_of(batch)):
            self._note("probes", "a batch that was computed with gradients is not probed, as its graph is used once")
        else:
            self._stop_looking()  # as manual optimization computes gradients in a pass of a probe, too
            with Guarded(self), seeded(0):
                seen.splits = Splits(_loaders(trainer))
                seen.buffers = {name: b.detach().clone() for name, b in pl_module.named_buffers()}
                held = _held(trainer, seen.splits.loaders.get("validation"))
                seen.probe = Probe(trainer, pl_module, batch, held, self.seconds)
                self._until = monotonic() + MOST_TIMES * self.seconds
                traces = [seen.probe.base(kind) for kind in seen.probe.batches]
                seen.calls = [call for trace in traces for call in trace.calls]
                seen.remarks = [remark for trace in traces for remark in trace.remarks]
                for error in (trace.error for trace in traces if trace.error is not None):
                    self._note(
                        "probes", f"values could not be followed, so that less could not be decided: {error!r}"[:300]
                    )
                self._ask("probe")
                seen.calls, seen.remarks = [], []
                if not _validates(seen.probe):
                    seen.splits = Splits({"train": seen.splits.train})
                seen.probe.forget()
                seen.metric_calls = MetricCalls(pl_module)
            self._look()
        self._end, self._until = monotonic() + self.seconds, math.inf

    def _close(self) -> None:
        if self._seen is not None and self._seen.metric_calls is not None:
            self._seen.metric_calls.close()
        super()._close()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the training after enough steps."""
        self._batches += 1
        enough = FIRST * trainer.accumulate_grad_batches
        if self._seen is not None and not pl_module.automatic_optimization and not self._seen.step:
            enough = MOST_BATCHES  # as gradients of several batches are added by hand
        if self._batches >= enough or monotonic() > self._end:
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ask about what eight steps have changed, and about the data, and conclude."""
        seen = self._seen
        self._until = monotonic() + MOST_TIMES * self.seconds
        if seen is not None and seen.probe is not None:
            with Guarded(self):
                rates.follow(seen)
                if seen.metric_calls is not None:
                    seen.metric_calls.close()
                self._ask("trial")
        if self.with_data and seen is not None and seen.splits is not None:
            with Guarded(self):
                if test := _test_loader(trainer):
                    seen.splits = Splits({**seen.splits.loaders, "test": test})
                if self.weights is not None and seen.probe is not None:
                    seen.is_converged = self.weights(pl_module)
                    seen.predictions = _predictions(seen.probe, seen.splits)
                self._until = monotonic() + MOST_TIMES * self.seconds
                self._ask("data")
        self._until = math.inf
        super().on_train_end(trainer, pl_module)


def _single(loaders: Any) -> Any:
    """A loader, or the first of several; without asking for its truth, which would be its length."""
    if isinstance(loaders, list | tuple | Mapping):
        return next(iter(tree_leaves(loaders)), None)
    return loaders


def _loaders(trainer: L.Trainer) -> dict[str, Any]:
    """The loaders of training and validation; of several for training, none."""
    train = trainer.train_dataloader
    held = trainer.val_dataloaders if trainer.enable_validation else None
    several = isinstance(held, list | tuple | Mapping) and len(held) > 1  # of which one may be training on purpose
    found = {"train": None if isinstance(train, list | tuple | Mapping) else train}
    return found if several else {**found, "validation": _single(held)}


def _held(trainer: L.Trainer, loader: Any) -> Any:
    """The first batch of validation."""
    if loader is None and trainer.enable_validation:
        loader = _single(trainer.val_dataloaders)
    batch = next(iter(loader), None) if loader is not None else None
    if batch is None:
        return None
    return trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))


def _validates(probe: Probe) -> bool:
    """Whether validation computes or logs anything; a replay buffer may stand for both splits."""
    if "validation_step" not in probe.batches:
        return False
    trace = probe.base("validation_step")
    return bool(trace.logged or trace.calls or trace.tensors)


def _test_loader(trainer: L.Trainer) -> Any:
    """The loader of the test split; None if there is none, or it cannot be made."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is None or not overrides(data, "test_dataloader"):
        return None
    try:
        data.setup("test")
        return _single(data.test_dataloader())
    except Exception:  # of a split without labels, or that is not there
        return None


def _predictions(probe: Probe, data: Splits) -> list[Any]:
    """Calls of loss functions in validation, of up to MOST samples."""
    loader, found, count = data.loaders.get("validation"), [], 0
    if loader is None or "validation_step" not in probe.batches:
        return []
    probe.end, probe.most = monotonic() + SECONDS, 1 << 30
    for batch in islice(loader, MOST):
        batch = probe.trainer.strategy.batch_to_device(probe.trainer.precision_plugin.convert_input(batch))
        calls = probe.run("validation_step", batch, training=False, record=False).calls
        found += calls[:1]
        count += len(calls[0].target) if calls and calls[0].target.ndim else 0
        if count >= MOST:
            break
    return found
