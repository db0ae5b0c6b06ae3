"""Compare the weights that are validated, saved and tested, which callbacks such as averages of weights replace."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as known
from lightning.pytorch.callbacks import Callback, Checkpoint, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from boltcutter.internals import foreach_norm

HOOKS = ("on_validation_start", "on_validation_epoch_start", "on_train_end")  # in which a module may replace weights
LIBRARIES = ("boltcutter.", "lightning.", "pytorch_lightning.")
REPLACING = (known.WeightAveraging, known.StochasticWeightAveraging)  # of Lightning, those that replace weights
Norms = dict[str, Tensor]


class SameWeights(Callback):
    """Print one line if the weights that are validated, saved and tested are not the same.

    Any callback or module may replace the weights, in hooks of validation, of saving, or at the end. Norms of all
    tensors are compared, only if there is a callback that neither the library nor Lightning knows to leave them alone,
    or the module has hooks before the validation or at the end.
    After training, Lightning's averages of weights would test the weights without averaging; the averaged ones, which
    the checkpoint has, are loaded instead, as ``evaluate`` does.
    """

    def __init__(self) -> None:
        self._watches = False
        self._validated = self._saved = (-1, Norms())  # number of steps, and norms
        self._trained = Norms()  # of the weights that training continued with at the last save
        self._loaded: Norms | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin anew, if a callback may replace weights, and no rank has only a shard of them."""
        self._watches = bool(_replacing(trainer, pl_module)) and isinstance(
            trainer.strategy, SingleDeviceStrategy | DDPStrategy
        )
        self._validated = self._saved = (-1, {})
        self._hook_validation(enabled=self._watches)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Read the weights of a validation, after all hooks before its first batch."""
        if batch_idx == dataloader_idx == 0 and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated = (trainer.global_step, norms(pl_module.named_parameters()))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Compare what is saved with what was validated after the same step."""
        if not self._watches:
            return
        self._saved = (trainer.global_step, norms(checkpoint["state_dict"].items()))
        self._trained = norms(_tensors(pl_module))
        if self._validated[0] == self._saved[0] and _differ(self._validated[1], self._saved[1]):
            self._end(
                trainer, pl_module, "validated are not those that checkpoints save, so that no metric is of the latter"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the weights after training with those that were saved after the same step."""
        if not self._watches or self._saved[0] != trainer.global_step:
            return
        last = norms(_tensors(pl_module))
        if _differ(last, self._saved[1]) and _differ(last, self._trained):
            self._end(
                trainer, pl_module, "that training ended with are in no checkpoint, so they are neither tested nor used"
            )

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Load the averaged weights of a checkpoint that is tested, and remember its weights."""
        if trainer.state.fn == "fit":
            return
        if any(isinstance(c, WeightAveraging) for c in trainer.callbacks):  # type: ignore[attr-defined]
            trainer.strategy.load_model_state_dict(checkpoint, strict=pl_module.strict_loading)
        if _replacing(trainer, pl_module):
            self._loaded = norms(checkpoint["state_dict"].items())

    def on_test_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Compare the tested weights with those of the checkpoint."""
        loaded, self._loaded = self._loaded, None
        is_whole = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        if loaded and is_whole and _differ(norms(_tensors(pl_module)), loaded):
            self._end(trainer, pl_module, "tested are not those of the checkpoint, which evaluate would test")

    def _end(self, trainer: L.Trainer, module: L.LightningModule, what: str) -> None:
        self._watches = False
        self._hook_validation(enabled=False)
        names = dict.fromkeys(type(one).__name__ for one in _replacing(trainer, module))
        if trainer.is_global_zero:
            print(
                f"warning: the weights {what}: a hook of {' or '.join(names)} replaces them; put the same "
                "weights into checkpoint['state_dict'] in its on_save_checkpoint, or use callback=[default,ema]",
                file=sys.stderr,
            )

    def _hook_validation(self, *, enabled: bool) -> None:
        vars(self).pop("on_validation_batch_start", None)
        if not enabled:
            vars(self)["on_validation_batch_start"] = None  # Lightning skips hooks that are not callable


def _replacing(trainer: L.Trainer, module: L.LightningModule) -> list[Any]:
    """What may replace weights: callbacks of Lightning that do, callbacks of somebody else, and a module with hooks."""
    found: list[Any] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        place = type(callback).__module__
        is_known = place.startswith(("boltcutter", "lightning.pytorch.callbacks", "pytorch_lightning.callbacks"))
        if isinstance(callback, REPLACING) if is_known else not isinstance(callback, Checkpoint):
            found.append(callback)
    places = [str(getattr(getattr(module, hook), "__module__", LIBRARIES[0])) for hook in HOOKS]
    return [*found, *([] if all(place.startswith(LIBRARIES) for place in places) else [module])]


def _tensors(module: L.LightningModule) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def norms(tensors: Iterable[tuple[str, Any]]) -> Norms:
    """The norm of each floating-point tensor by its name, on its device, without waiting for it."""
    found: Mapping[str, Tensor] = {
        name: value.detach()
        for name, value in tensors
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() and not value.is_meta
    }
    with torch.no_grad():
        return dict(zip(found, foreach_norm(list(found.values()), 2), strict=True)) if found else {}


def _differ(one: Norms, other: Norms) -> bool:
    """Whether any of the common tensors has another norm, in the type of the first; NaN equals NaN."""
    pairs = [(one[name], other[name].to(one[name])) for name in one.keys() & other.keys()]
    return any(not torch.allclose(a, b, rtol=1e-6, atol=0, equal_nan=True) for a, b in pairs)
