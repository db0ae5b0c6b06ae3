"""Whether a resumed run can be exact: what changed while training, and differs from what the checkpoint had."""

from __future__ import annotations

import dis
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from boltcutter.config.settings import Settings
from boltcutter.internals import tree_leaves
from boltcutter.protocols import NativeData, NativeTask
from boltcutter.run.folder import update_record
from boltcutter.run.remote.store import run_store

KEY = "attributes"  # in a checkpoint
LIBRARIES = ("boltcutter", "lightning", "pytorch_lightning", "lightning_fabric", "torch", "torchmetrics")
START_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_validation_epoch_start")
MAX_ITEMS = 1000  # of a container or tensor; of larger ones the size is compared
SHOWN = 3  # attributes in the message


class ExactnessCheck(Callback):
    """Compares plain attributes of module, data module, callbacks, samplers and datasets with those of the checkpoint.

    Lightning saves what has a ``state_dict``. A counter that a module increases, a curriculum of a callback or a batch
    sampler that depends on what it has drawn begins anew in a resumed run, unless the user saves it. What changed since
    the start, and differs after all is restored, is reported once and recorded.

    Args:
        cfg: The configuration of the run.
    """

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self._start: dict[str, str] = {}  # attributes at the first batch of the run
        self._saved: dict[str, str] | None = None  # those of the checkpoint from which the run is resumed
        self._loaders: list[Any] = []

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the attributes of the checkpoint."""
        found = checkpoint.get(KEY)
        if trainer.state.fn == "fit" and isinstance(found, dict):
            start, saved = found.get("start"), found.get("saved")
            if isinstance(start, dict) and isinstance(saved, dict):
                self._start, self._saved = start, saved

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the loaders, which a later hook may replace."""
        self._loaders = tree_leaves(trainer.train_dataloader)
        vars(self)["on_train_batch_start"] = self._before_first_batch  # no hook that each step would call

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Reset for another training."""
        vars(self).pop("on_train_batch_start", None)

    def _before_first_batch(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """When all hooks at the start have run, compare or note the attributes."""
        del vars(self)["on_train_batch_start"]
        current = dict(_attributes(trainer))
        if self._saved is None:
            self._start = {label: value for label, (value, _) in current.items()}
            return
        mid_epoch = trainer.fit_loop.restarted_mid_epoch
        changed, found = [], []
        for label, value in self._saved.items():
            now, is_set_at_start = current.get(label, ("not set", False))
            if value not in (self._start.get(label), now) and (mid_epoch or not is_set_at_start):
                changed.append(f"{label} (was {value:.30}, is {now:.30})")
        if changed:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            found.append(
                f"{', '.join(changed[:SHOWN])}{more} changed while training and was not restored; save it in "
                "on_save_checkpoint, or in state_dict"
            )
        replaced = {id(loader) for loader in tree_leaves(trainer.train_dataloader)} != set(map(id, self._loaders))
        if replaced and mid_epoch:
            found.append("loaders are replaced in on_train_start, so batches are repeated; return them as loaders")
        self._saved = None
        if found and trainer.is_global_zero:
            for line in found:
                print(f"resume={run_store().show(self.cfg.place.folder)}: not exact: {line}")
            update_record(self.cfg.place.folder, inexact=found)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the attributes at the start and now."""
        if trainer.is_global_zero:
            saved = {label: value for label, (value, _) in _attributes(trainer)}
            changed = {label: value for label, value in saved.items() if value != self._start.get(label)}
            start = {label: value for label, value in self._start.items() if label in changed}
            checkpoint[KEY] = {"start": start, "saved": changed}


def _attributes(trainer: L.Trainer) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Plain attributes of the user's objects: a text for each value, and whether a hook at the start sets it."""
    for owner in _owners(trainer):
        at_start = _set_by_hooks(type(owner))
        inherited = _base_attributes(owner)
        for name, value in vars(owner).items():
            is_epoch = name == "epoch" and hasattr(owner, "set_epoch")
            if name not in inherited and not is_epoch and (text := _describe(value)) is not None:
                yield f"{type(owner).__name__}.{name}", (text, name in at_start)


def _owners(trainer: L.Trainer) -> Iterator[Any]:
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    yield module
    if data is not None and not isinstance(data, NativeData) and _is_of_user(data):
        yield data
    yield from (callback for callback in trainer.callbacks if _is_of_user(callback))  # type: ignore[attr-defined]
    seen: set[int] = set()
    for loader in tree_leaves(trainer.train_dataloader):
        parts = [getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        for part in parts[:2]:  # each may be around another
            parts += [getattr(part, "sampler", None), getattr(part, "source", None)]
        for part in parts:
            is_own = part is not None and _is_of_user(part) and hasattr(part, "__dict__")
            if is_own and not hasattr(part, "load_state_dict") and id(part) not in seen:
                seen.add(id(part))
                yield part


def _is_of_user(owner: Any) -> bool:
    package = type(owner).__module__.partition(".")[0]
    return package not in LIBRARIES


def _base_attributes(owner: Any) -> set[str]:
    """Attributes that are Lightning's or this library's, which are restored or follow from the configuration."""
    if isinstance(owner, NativeTask):
        return {name for name in vars(owner) if name.startswith("_")} | {"gradient_norm", "scheduled_steps", "training"}
    base = next((base for base in (L.LightningModule, L.LightningDataModule) if isinstance(owner, base)), None)
    return set(vars(base())) if base else set()


def _set_by_hooks(kind: type) -> set[str]:
    """Names of attributes that hooks at the start of an epoch set."""
    codes = [getattr(getattr(kind, name, None), "__code__", None) for name in START_HOOKS]
    return {step.argval for code in codes if code for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}


def _describe(value: Any, depth: int = 3) -> str | None:
    """A text that is equal for equal plain values; None for others."""
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        return repr(value)[:MAX_ITEMS]
    if isinstance(value, torch.Tensor | np.ndarray):
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.layout is not torch.strided or value.dtype is torch.bfloat16:
                return None
            value = value.detach().as_subclass(torch.Tensor).numpy()
        if value.dtype.hasobject or value.size > MAX_ITEMS:
            return f"array {value.shape}"
        text = np.array2string(value, threshold=4)
        return f"{text} {hashlib.sha256(value.tobytes()).hexdigest()[:8]}"
    if not isinstance(value, list | tuple | dict | set | deque) or not depth:
        return None
    if len(value) > MAX_ITEMS:
        return f"{len(value)} items"
    items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    texts = [_describe(item, depth - 1) for item in items]
    if any(text is None for text in texts):
        return None
    listed = [text for text in texts if text is not None]
    return f"[{', '.join(sorted(listed) if isinstance(value, set) else listed)}]"
