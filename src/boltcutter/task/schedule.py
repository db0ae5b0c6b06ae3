"""Learning rates over time."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, *, total_steps: int, warmup: float = 0.05, final: float = 0.0) -> LambdaLR:
    """Rise linearly, then fall along half a cosine.

    Args:
        optimizer: Whose learning rate is the height reached.
        total_steps: Optimizer steps in the whole training.
        warmup: Share of the steps spent rising, in [0, 1).
        final: Share of the learning rate that is left at the end.

    Raises:
        ValueError: A share is none.

    Source: Loshchilov and Hutter, SGDR, 2016; Goyal et al., Accurate, Large Minibatch SGD, 2017 (warm-up).
    """
    if not 0 <= warmup < 1:
        raise ValueError(f"scheduler.warmup={warmup} is not a share in [0, 1); try 0.05")
    if not 0 <= final <= 1:
        raise ValueError(f"scheduler.final={final} is not a share in [0, 1]; try 0")
    rising = round(warmup * total_steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        done = min(1.0, (step - rising) / max(1, total_steps - rising))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
