"""Exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class EMA(WeightAveraging):
    """Validate, test and save the exponential moving average of the weights, while training continues with the weights.

    Each rank averages the weights that it has, such as its shards. Buffers (BatchNorm statistics, constants) are those
    of the current weights. Unlike Lightning's callback, loading a checkpoint for a test does not restore the current
    weights in place of the average, and the decay warms up.

    Args:
        decay: Decay of the average per step, in [0, 1). After t updates it is at most (1 + t) / (10 + t), so that the
            initial weights are soon forgotten.
        update_starting_at_step: Optimizer step at which averaging begins.

    Attributes:
        averages: Of this rank's part of each parameter, once training has begun.

    Raises:
        ValueError: ``decay`` is not in [0, 1).

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; TensorFlow's
    ``ExponentialMovingAverage`` for the warmup.
    """

    averages_shards = True  # each rank those that it has, which strategies that shard the model ask for

    def __init__(self, decay: float = 0.999, *, update_starting_at_step: int = 0) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"callback.ema.decay={decay} is not in [0, 1); try 0.999")
        self.decay, self.update_starting_at_step = decay, update_starting_at_step
        self.averages: list[Tensor] = []
        self._num_averaged = 0
        super().__init__(use_buffers=False)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin anew; the average is created once the weights are sharded and on their device."""
        if stage == "fit":
            self.averages, self._num_averaged = [], 0
            if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
                raise ValueError(
                    f"callback.ema: {type(trainer.strategy).__name__} hides weights; remove it, or use trainer=fsdp2"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin with the current weights, unless training resumes."""
        weights = _local_weights(pl_module)
        averages = self.averages or [weight.detach().clone() for weight in weights]
        self.averages = [average.to(weight.device) for average, weight in zip(averages, weights, strict=True)]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average after an optimizer step, all weights at once and without waiting for the device."""
        step = trainer.global_step
        if step <= max(self._latest_update_step, self.update_starting_at_step):
            return
        count = self._num_averaged
        decay = min(self.decay, (1 + count) / (10 + count)) if count else 0.0
        pairs = zip(self.averages, _local_weights(pl_module), strict=True)
        # Weights on the meta device are those of other stages of a pipeline.
        averages, weights = zip(*(p for p in pairs if p[0].is_floating_point() and not p[0].is_meta), strict=True)
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - decay)
        self._num_averaged, self._latest_update_step = count + 1, step

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Exchange the weights and their average."""
        for weight, average in zip(_local_weights(pl_module), self.averages, strict=False):
            current = weight.detach().clone()
            weight.detach().copy_(average)
            average.copy_(current)

    on_validation_epoch_end = on_validation_epoch_start

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace the weights by their average."""
        for weight, average in zip(_local_weights(pl_module), self.averages, strict=True):
            weight.detach().copy_(average)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the average in place of the weights, and the weights beside it."""
        if self.averages:
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._num_averaged)}
            self._exchange(pl_module)
            try:
                checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
            finally:
                self._exchange(pl_module)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """If training resumes, keep the loaded weights as the average, and load the weights that were beside it."""
        if trainer.state.fn == "fit" and "current_model_state" in checkpoint:
            self.averages = [weight.detach().clone() for weight in _local_weights(pl_module)]
            self._num_averaged = int(checkpoint["averaging_state"]["n_averaged"])
            current = {**checkpoint, "state_dict": checkpoint["current_model_state"]}
            trainer.strategy.load_model_state_dict(current, strict=pl_module.strict_loading)

    def _exchange(self, module: L.LightningModule) -> None:
        """Let the parameters refer to the average, or again to the weights, without a copy."""
        _reshard(module)
        for index, parameter in enumerate(module.parameters()):
            name = "_local_tensor" if isinstance(parameter, DTensor) else "data"
            current = getattr(parameter, name)
            setattr(parameter, name, self.averages[index])
            self.averages[index] = current


def _local_weights(module: L.LightningModule) -> list[Any]:
    """This rank's part of each parameter."""
    _reshard(module)
    with torch.no_grad():
        return [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]


def _reshard(module: L.LightningModule) -> None:
    """Free weights that FSDP2 has gathered, as a validation leaves those of the root."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
