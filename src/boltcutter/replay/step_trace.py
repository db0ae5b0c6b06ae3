"""Digests of all that one step computes, in its order: samples, inputs, outputs, gradients, updates."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from torchmetrics import Metric

from boltcutter.diagnosis.ledger import digest
from boltcutter.internals import tree_leaves

FILE = "trace-rank-{}.pt"
MAX_KEPT = 1 << 16  # numbers of a value that are kept beside its digest, so that differences have a size


class Trace:
    """What a step computes.

    Args:
        module: That is trained.
        folder: Where it is written.
        rank: Of this process.
    """

    def __init__(self, module: L.LightningModule, folder: Path, rank: int) -> None:
        self.module, self.path = module, folder / FILE.format(rank)
        self.found: list[dict[str, Any]] = []
        self._handles: list[Any] = []
        self._is_active = False
        self._calls: dict[str, int] = {}

    def begin(self, trainer: L.Trainer, batch: Any, indices: list[Any] | None) -> None:
        """Follow the batch that comes."""
        if not self._is_active:
            self._is_active = True
            for name, parameter in self.module.named_parameters():
                self._add("weight before", name, parameter)
            for name, buffer in self.module.named_buffers():
                self._add("buffer before", name, buffer)
            for name, part in self.module.named_modules():
                if name and not isinstance(part, Metric | torch.jit.ScriptModule):
                    self._handles.append(part.register_forward_hook(partial(self._output, name)))
        if indices is not None:
            self.found.append({"kind": "samples", "name": "indices", "digest": str(indices), "indices": indices})
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, Tensor):
                self._add("input", f"batch{keystr(path)}", leaf, indices=indices)

    def _output(self, name: str, part: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_anomaly_enabled():  # the step is computed once more, to find what is not finite
            return
        call = self._calls[name] = self._calls.get(name, 0) + 1
        for number, leaf in enumerate(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            self._add("output", name, leaf, call=call, number=number, type=type(part).__name__)
            if leaf.requires_grad and leaf.is_floating_point():
                leaf.register_hook(partial(self._gradient, name, call, type(part).__name__))  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, call: int, kind: str, gradient: Tensor) -> None:
        self._add("gradient", name, gradient, call=call, type=kind)

    def before_step(self) -> None:
        """Note the gradients with which the optimizer makes its step, before clipping."""
        if self._is_active:
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None:
                    self._add("gradient of weight", name, parameter.grad)

    def after_step(self, trainer: L.Trainer) -> None:
        """Note the weights and the optimizer's state after the step, and write all."""
        if not self._is_active:
            return
        self._is_active = False
        for handle in self._handles:
            handle.remove()
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for number, wrapped in enumerate(trainer.optimizers):
            optimizer: Any = getattr(wrapped, "optimizer", wrapped)
            for index, group in enumerate(optimizer.param_groups):
                options = {
                    key: value for key, value in group.items() if key != "params" and not isinstance(value, Tensor)
                }
                self.found.append(
                    {
                        "kind": "optimizer",
                        "name": f"optimizer {number}, group {index}",
                        "digest": repr(options),
                        "options": options_of(options),
                    }
                )
        for name, parameter in self.module.named_parameters():
            self._add("weight after", name, parameter)
        for wrapped in trainer.optimizers:
            inner: Any = getattr(wrapped, "optimizer", wrapped)
            for parameter, state in inner.state.items():
                for key, value in sorted(state.items()):
                    if isinstance(value, Tensor):
                        self._add("state after", f"{key} of {names.get(id(parameter), '?')}", value)
        for name, buffer in self.module.named_buffers():
            self._add("buffer after", name, buffer)
        torch.save(self.found, self.path)

    def _add(self, kind: str, name: str, value: Tensor, **more: Any) -> None:
        if value.is_meta:
            return
        held = value.detach()
        kept = held.float().cpu().reshape(-1)[:MAX_KEPT].clone() if held.numel() else None
        found = digest([held])
        self.found.append(
            {"kind": kind, "name": name, "shape": tuple(held.shape), "digest": str(int(found)), "values": kept, **more}
        )


def options_of(options: dict[str, Any]) -> dict[str, str]:
    """The options of a parameter group, as text."""
    return {key: repr(value) for key, value in sorted(options.items())}
