"""Learning rate schedules."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(
    optimizer: Optimizer, *, total_steps: int, warmup_ratio: float = 0.05, min_lr_ratio: float = 0.0
) -> LambdaLR:
    """Increase the learning rate linearly, then decay it along half a cosine.

    Args:
        optimizer: Its learning rate is the peak.
        total_steps: Number of optimizer steps in the whole training.
        warmup_ratio: Fraction of the steps with linear warmup, in [0, 1).
        min_lr_ratio: Final learning rate, as a fraction of the peak, in [0, 1].

    Raises:
        ValueError: A fraction is outside its range.

    Source: Loshchilov and Hutter, SGDR, 2016; Goyal et al., Accurate, Large Minibatch SGD, 2017 (warmup).
    """
    if not 0 <= warmup_ratio < 1:
        raise ValueError(f"scheduler.warmup_ratio={warmup_ratio} is not in [0, 1); try 0.05")
    if not 0 <= min_lr_ratio <= 1:
        raise ValueError(f"scheduler.min_lr_ratio={min_lr_ratio} is not in [0, 1]; try 0")
    warmup_steps = round(warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return AllGroupsLambdaLR(optimizer, factor)


class AllGroupsLambdaLR(LambdaLR):
    """``LambdaLR`` that also schedules parameter groups that are added during training, as ``BaseFinetuning`` does.

    The learning rate with which a group is added is what it has at that step of the schedule.
    """

    def get_lr(self) -> list[float | Tensor]:
        """Compute the learning rate of each group."""
        groups = self.optimizer.param_groups
        factor = groups[0]["lr"] / self.base_lrs[0] if self.base_lrs[0] else 0.0  # of the step before
        for group in groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"] / (factor or 1.0)))
        self.lr_lambdas += self.lr_lambdas[:1] * (len(groups) - len(self.lr_lambdas))
        return super().get_lr()
