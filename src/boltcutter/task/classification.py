"""One class for each sample."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from boltcutter.task.base import Task


class Classification(Task):
    """Cross-entropy over C classes.

    Args:
        model: Gives logits (N, C).
        label_smoothing: Share of the target that is spread over all classes while training, in [0, 1).
        class_weights: Factor of the loss for each of C classes, or none.
        task: ``optimizer``, ``scheduler``, ``interval``, ``monitor``, ``metrics``, ``l1`` and ``l2``, as for ``Task``.

    Source: Szegedy et al., Rethinking the Inception Architecture, 2015 (label smoothing).
    """

    kind: ClassVar[Literal["classes", "numbers"]] = "classes"

    def __init__(self, model: nn.Module, *, label_smoothing: float = 0.0, **task: Any) -> None:
        super().__init__(model, **task)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"task.label_smoothing={label_smoothing} is not a share in [0, 1); try 0.1")
        self.label_smoothing = label_smoothing

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each sample in nats, shape (N,)."""
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Probability of each class, shape (N, C)."""
        return outputs.float().softmax(dim=-1)
