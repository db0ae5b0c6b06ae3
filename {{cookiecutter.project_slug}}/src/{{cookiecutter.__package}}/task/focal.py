"""Classification with focal loss."""

from typing import Any, ClassVar

from boltcutter import Task
from torch import Tensor, nn
from torch.nn import functional as F


class FocalClassification(Task):
    """Classification with focal loss, which gives samples that are already classified well a smaller weight.

    ``Task`` is a ``LightningModule`` that adds the optimizer, schedule, metrics and logging. Any other
    ``LightningModule`` can be used instead.

    Args:
        model: Maps inputs to logits of shape (batch, num_classes).
        gamma: Focusing parameter; 0 is cross-entropy.
        task: Arguments of ``Task``: ``optimizer``, ``scheduler``, ``metrics`` and others.

    Source: Lin et al., Focal Loss for Dense Object Detection, 2017.
    """

    kind: ClassVar[Any] = "classification"

    def __init__(self, model: nn.Module, *, gamma: float = 2.0, **task: Any) -> None:
        super().__init__(model, **task)
        if gamma < 0:
            raise ValueError(f"task.gamma={gamma} is negative; try 2")
        self.gamma = gamma

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, shape (batch,)."""
        cross_entropy = F.cross_entropy(outputs, targets, reduction="none")
        return (1 - (-cross_entropy).exp()) ** self.gamma * cross_entropy

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the probability of each class, shape (batch, num_classes)."""
        return outputs.float().softmax(dim=-1)
