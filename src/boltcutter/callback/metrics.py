"""Metrics of a MetricCollection that each keep their own state."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence, Set
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from boltcutter.internals import tree_leaves
from boltcutter.task.metric_states import separate

KINDS = (Metric, MetricCollection, MetricTracker)
PLAIN = (Tensor, bool, int, float, str, type(None))  # what is kept


class SeparateMetrics(Callback):
    """Let no metrics share a state because theirs were equal once, or keep one of the sanity check.

    A ``MetricCollection`` compares the states of its metrics after their first update, which is of the sanity check,
    and updates only one of those that are equal. Accuracy over all classes and over all but one are equal as long as no
    sample of that class was seen; then one has the values of the other. ``compute_groups=[[...]]``, which names the
    metrics that share a state, is kept.
    """

    _before: Sequence[tuple[nn.Module, dict[str, Any], Set[str]]] = ()

    def _keep(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep what metrics have before the sanity check."""
        found = [part for part in pl_module.modules() if isinstance(part, KINDS)]
        plain = [
            {
                name: value
                for name, value in vars(part).items()
                if all(isinstance(x, PLAIN) and getattr(x, "grad_fn", None) is None for x in tree_leaves(value))
            }
            for part in found
        ]
        copies = copy.deepcopy(plain)  # at once, as metrics may share states
        names = [dict(part.named_children()).keys() for part in found]
        self._before = list(zip(found, copies, names, strict=True))

    def _restore(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let training begin as if there had been no sanity check."""
        for part, values, names in self._before:
            vars(part).update(values)
            for name in dict(part.named_children()).keys() - names:  # of the tracker of a metric
                delattr(part, name)
        self._before = ()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Separate those of the module and of callbacks, before the sanity check."""
        found: list[Any] = [pl_module]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            found += [value for value in vars(callback).values() if isinstance(value, nn.Module)]
        for module in found:
            separate(module)
        parts = (part for module in found for part in module.modules() if isinstance(part, KINDS))
        # Those of torchmetrics have their states only, which Lightning resets; a wrapper may keep extreme values.
        if any(not re.match(r"torchmetrics\.(?!wrappers)", type(part).__module__) for part in parts):
            vars(self).update(on_sanity_check_start=self._keep, on_sanity_check_end=self._restore)

    on_train_start = on_validation_start = on_test_start = on_fit_start  # hooks before them may create metrics
