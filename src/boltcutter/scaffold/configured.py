"""A LightningModule whose optimizer and schedule are settings, as Lightning CLI has them beside the module."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from lightning import LightningModule


def with_optimizer(
    module: LightningModule, optimizer: Callable[..., Any], scheduler: Callable[..., Any] | None = None
) -> LightningModule:
    """Return the module with this optimizer and schedule in place of its ``configure_optimizers``.

    Args:
        module: Any LightningModule.
        optimizer: Called with the parameters of the module.
        scheduler: Called with the optimizer, and stepped after each epoch. A ``monitor``, which Lightning CLI's
            ``ReduceLROnPlateau`` takes, is the metric that it is stepped with.
    """

    def configure_optimizers(self: LightningModule) -> Any:
        made = optimizer(self.parameters())
        if scheduler is None:
            return made
        schedule = scheduler(made)
        monitor = getattr(schedule, "monitor", None)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, **({"monitor": monitor} if monitor else {})}}

    module.configure_optimizers = MethodType(configure_optimizers, module)  # type: ignore[method-assign]
    return module
