"""What other projects have beside their classes: optimizer and schedule as settings, and loaders."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from lightning import LightningDataModule, LightningModule


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


def with_loaders(train: Any, val: Any = None, test: Any = None) -> LightningDataModule:
    """A data module of loaders that are made already, as scripts give them to ``fit``.

    Args:
        train: One or several loaders, in any form that Lightning takes.
        val: Those for validation; by default, there is none.
        test: Those for the test.
    """
    data = LightningDataModule()
    for name, loaders in (("train", train), ("val", val), ("test", test)):
        if loaders is not None:
            setattr(data, f"{name}_dataloader", lambda loaders=loaders: loaders)
    return data
