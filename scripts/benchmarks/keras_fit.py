"""Reference for Keras: ``compile`` and ``fit`` on the torch backend."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class StepClock(Protocol):
    """Is called before and after each step."""

    def begin_step(self) -> None:
        """Before a step."""

    def end_step(self, loss: Tensor | float) -> None:
        """After a step."""


def fit(model: nn.Module, kept: dict[str, Any], spec: dict[str, Any], rates: list[float], clock: StepClock) -> None:
    """Train the Keras model of ``model`` with the same optimizer, schedule and clipping, from arrays in memory.

    Args:
        model: A ``KerasModel``, with its initial weights.
        kept: Samples and their order, as saved by ``TimingWindow``.
        spec: Specification of the training; the optimizer is AdamW.
        rates: Learning rate of each step.
        clock: Called before and after each step.
    """
    import keras  # an extra, already imported by the model

    class Scheduled(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        """A learning rate schedule from a list."""

        def __call__(self, step: Any) -> Any:
            return table[int(step)]

    class Timed(keras.callbacks.Callback):  # type: ignore[misc]
        """Calls the clock."""

        total = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            clock.begin_step()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            before, self.total = self.total, float(logs["loss"]) * (batch + 1)  # Keras reports the mean since the start
            clock.end_step(self.total - before)

    table = torch.tensor([*rates, 0.0])
    chosen = kept["order"].flatten()
    inputs, targets = kept["inputs"][chosen].movedim(1, -1), kept["targets"][chosen]
    if inputs.dtype == torch.uint8:
        inputs = inputs / 255
    settings = spec["optimizer"]
    betas = settings.get("betas", (0.9, 0.999))
    optimizer = keras.optimizers.AdamW(
        Scheduled(),
        weight_decay=settings["weight_decay"],
        beta_1=betas[0],
        beta_2=betas[1],
        epsilon=settings.get("eps", 1e-8),
        global_clipnorm=spec["clip"],
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    inner: Any = model.keras_model
    inner.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    size = kept["order"].size(1)
    inner.fit(inputs.numpy(), targets.numpy(), batch_size=size, shuffle=False, callbacks=[Timed()])
