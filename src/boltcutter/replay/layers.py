"""Norms of activations, gradients, weights and updates of each layer, over some steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from boltcutter.replay.scores import FEWEST, robust_z
from boltcutter.structure import tensors

QUANTITIES = ("activation", "gradient", "weight", "update")


class Layers:
    """Follows the layers of a module that have weights of their own.

    Args:
        module: That is trained.
    """

    def __init__(self, module: L.LightningModule) -> None:
        skipped = (Metric, torch.jit.ScriptModule)
        self.parts: dict[str, nn.Module] = {
            name or type(module).__name__: part
            for name, part in module.named_modules()
            if not isinstance(part, skipped) and next(part.parameters(recurse=False), None) is not None
        }
        self.steps: list[dict[str, dict[str, float]]] = []
        self._now: dict[str, dict[str, float]] = {}
        self._before: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Follow the batch that comes."""
        if not self._handles:
            self._handles = [
                part.register_forward_hook(partial(self._output, name)) for name, part in self.parts.items()
            ]

    def _output(self, name: str, part: nn.Module, inputs: Any, output: Any) -> None:
        found = [leaf.detach() for leaf in tensors(output) if leaf.is_floating_point()]
        if found:
            size = sum(leaf.numel() for leaf in found) or 1
            self._note(name, "activation", _norm(found) / size**0.5)

    def before_step(self) -> None:
        """Note gradients and weights."""
        if not self._handles:
            return
        for name, part in self.parts.items():
            parameters = [p for p in part.parameters(recurse=False) if not p.is_meta]
            self._note(name, "gradient", _norm([p.grad for p in parameters if p.grad is not None]))
            self._before[name] = [p.detach().clone() for p in parameters]

    def after_step(self, step: int) -> None:
        """Note weights and updates."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for name, part in self.parts.items():
            parameters = [p.detach() for p in part.parameters(recurse=False) if not p.is_meta]
            self._note(name, "weight", _norm(parameters))
            if name in self._before:
                pairs = zip(parameters, self._before[name], strict=True)
                self._note(name, "update", _norm([after - before for after, before in pairs]))
        self.steps.append(self._now)
        self._now, self._before = {}, {}

    def _note(self, name: str, quantity: str, value: float) -> None:
        self._now.setdefault(name, {})[quantity] = value

    def table(self) -> list[dict[str, Any]]:
        """The last step: for each layer its norms, and their robust z-scores against the steps before."""
        if not self.steps:
            return []
        *earlier, last = self.steps
        rows = []
        for name in self.parts:
            row: dict[str, Any] = {"layer": name, "z": {}}
            for quantity in QUANTITIES:
                value = last.get(name, {}).get(quantity)
                row[quantity] = value
                before = [step[name][quantity] for step in earlier if quantity in step.get(name, {})]
                if value is not None and len(before) >= FEWEST:
                    row["z"][quantity] = float(robust_z([value], before)[0])
            rows.append(row)
        return rows


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.detach().float().norm() for t in tensors]).norm()) if tensors else 0.0
