"""Callbacks that average weights, where a rank has only a part of the model."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging

FULL_MODEL = "callback: Lightning's averaging needs the full model; use callback=[default,ema]"


def averages_full_model(callbacks: Sequence[Callback]) -> bool:
    """Whether a callback averages weights and needs all of them on each rank, unlike one with ``averages_shards``."""
    averaging = [c for c in callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging)]
    return not all(getattr(c, "averages_shards", False) for c in averaging)
