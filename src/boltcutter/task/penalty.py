"""L1 and L2 penalties of the weights, sharded or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from boltcutter.internals import foreach_norm


class PenaltyError(ValueError):
    """The strategy hides weights during the step, so that their penalty cannot be computed."""

    hide_traceback = True


def penalty(model: nn.Module, l1: float, l2: float, num_weights: int = 0) -> Tensor | float:
    """Return the penalty of all trainable weights but biases and norms.

    Args:
        model: Its parameters may be shards of FSDP2, whose penalty is that of the full weights.
        l1: Factor of the L1 norms.
        l2: Factor of the squared L2 norms.
        num_weights: How many weights, trainable or not, the model has had before it was sharded.

    Raises:
        PenaltyError: It has fewer now.
    """
    weights: list[Any] = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    if len(weights) < num_weights:  # FSDP1 and stage 3 of DeepSpeed replace them by flat shards
        raise PenaltyError(
            f"task.l1={l1}, task.l2={l2}: the strategy hides weights during the step, as FSDP1 does; "
            "set optimizer.weight_decay instead, or use trainer=fsdp2"
        )
    weights = [weight for weight in weights if weight.requires_grad]
    if not weights:
        return 0.0
    total = torch.zeros((), dtype=weights[0].dtype, device=weights[0].device)
    if l1:
        total = total + l1 * _norms(weights, 1).sum()
    if l2:
        total = total + l2 * _norms(weights, 2).square().sum()
    return total


def _norms(weights: list[Any], order: int) -> Tensor:
    sharded = [weight for weight in weights if hasattr(weight, "full_tensor")]
    whole = [weight for weight in weights if not hasattr(weight, "full_tensor")]
    norms = list(foreach_norm(whole, order)) if whole else []
    return torch.stack([*norms, *(torch.linalg.vector_norm(weight, order).full_tensor() for weight in sharded)])
