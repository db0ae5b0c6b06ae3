"""What one step computes, in its order: samples, inputs, outputs, gradients, updates, each with a digest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from boltcutter.diagnosis.ledger import AVERAGING, digest
from boltcutter.internals import averaged_weights
from boltcutter.structure import count_samples, tensor_names, tensors

FILE = "trace-rank-{}-step-{}.pt"
MAX_KEPT = 1 << 16  # numbers of a value that are kept beside its digest, so that a difference has a size


class StepTrace:
    """What a step computes on a rank.

    Args:
        module: That is trained.
        folder: Where it is written.
        rank: Of this process.
    """

    def __init__(self, module: L.LightningModule, folder: Path, rank: int) -> None:
        self.module, self.folder, self.rank = module, folder, rank
        self.found: list[dict[str, Any]] = []
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self._batch = 0

    def begin(self, trainer: L.Trainer, batch: Any, indices: list[Any] | None) -> None:
        """Follow the batch that comes, as the module gets it.

        Args:
            trainer: Whose optimizers are followed.
            batch: Of any structure.
            indices: Of its samples; None if they are not known.
        """
        if not self._handles:
            self._begin_step(trainer)
        else:
            self._batch += 1
            self._calls = {}
        if indices is not None:
            self._note("samples", "indices", str(indices), indices=[_plain(index) for index in indices])
        size = count_samples(batch) or 0
        for name, value in zip(tensor_names(batch), tensors(batch), strict=False):
            self._add("input", name, value, indices=[_plain(index) for index in indices or ()], size=size)

    def _begin_step(self, trainer: L.Trainer) -> None:
        self.found, self._calls, self._batch = [], {}, 0
        self._add_all("initial weight", self.module.named_parameters())
        self._add_all("initial buffer", self.module.named_buffers())
        for name, part in self.module.named_modules():
            if name and not isinstance(part, Metric | torch.jit.ScriptModule):
                kind = type(part).__name__
                self._handles.append(part.register_forward_pre_hook(partial(self._input, name, kind), with_kwargs=True))
                self._handles.append(part.register_forward_hook(partial(self._output, name, kind)))
        for number, wrapped in enumerate(trainer.optimizers):
            optimizer: Any = getattr(wrapped, "optimizer", wrapped)
            if hasattr(optimizer, "register_step_post_hook"):
                self._handles.append(optimizer.register_step_post_hook(partial(self._after_optimizer, number)))

    def _input(self, name: str, kind: str, part: nn.Module, inputs: Any, options: Any) -> None:
        if torch.is_anomaly_enabled():  # the step is computed once more, to find what is not finite
            return
        self._calls[name] = self._calls.get(name, 0) + 1
        self._add_leaves("module input", name, kind, (inputs, options))

    def _output(self, name: str, kind: str, part: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_anomaly_enabled():
            return
        self._add_leaves("module", name, kind, output)
        for leaf in tensors(output):
            if leaf.requires_grad and leaf.is_floating_point():
                leaf.register_hook(partial(self._gradient, name, kind, self._calls.get(name, 0)))  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, kind: str, call: int, gradient: Tensor) -> None:
        self._add("gradient", name, gradient, call=call, type=kind)

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of the batch."""
        if self._handles:
            self._add("loss", "loss", loss)

    def before_step(self) -> None:
        """Note the gradients of the step, before clipping: those of the last layers first."""
        if self._handles:
            named = reversed([*self.module.named_parameters()])
            self._add_all("weight gradient", ((name, p.grad) for name, p in named if p.grad is not None))

    def _after_optimizer(self, number: int, optimizer: Any, args: Any, options: Any) -> None:
        """Note with what an optimizer has done its step, before a scheduler changes it."""
        for index, group in enumerate(optimizer.param_groups):
            for key, value in sorted(group.items(), key=lambda item: (item[0].startswith("initial_"), item[0])):
                if key != "params":
                    text = repr(value.tolist() if isinstance(value, Tensor) else value)
                    self._note("option", f"{key} of optimizer {number}, group {index}", text)
        self._add_all("used gradient", ((n, p.grad) for n, p in self.module.named_parameters() if p.grad is not None))

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Note what the step has made of weights, states, buffers and averages, and write all."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._add_all("weight", self.module.named_parameters())
        for wrapped in trainer.optimizers:
            optimizer: Any = getattr(wrapped, "optimizer", wrapped)
            for parameter, state in optimizer.state.items():
                named = sorted((str(key), value) for key, value in state.items() if isinstance(value, Tensor))
                name = names.get(id(parameter), "?")
                self._add_all("state", ((f"{key} of {name}", value) for key, value in named))
        self._add_all("buffer", self.module.named_buffers())
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, AVERAGING):
                averages = zip([*names.values()], averaged_weights(callback), strict=False)
                self._add_all("average", ((f"{name} ({type(callback).__name__})", value) for name, value in averages))
        torch.save(self.found, self.folder / FILE.format(self.rank, step))

    def _add_all(self, kind: str, named: Iterable[tuple[str, Any]]) -> None:
        for name, value in named:
            self._add(kind, name, value)

    def _add_leaves(self, kind: str, name: str, type_: str, values: Any) -> None:
        for number, leaf in enumerate(tensors(values)):
            self._add(kind, name, leaf, call=self._calls.get(name, 0), number=number, type=type_)

    def _add(self, kind: str, name: str, value: Tensor, **more: Any) -> None:
        if value.is_meta:
            return
        held = value.detach()
        held = held.to_dense() if held.layout != torch.strided else held
        kept = held.reshape(-1)[:MAX_KEPT].to("cpu", copy=True)
        found = str(int(digest([held.resolve_conj().resolve_neg()])))
        shape, dtype = list(held.shape), str(held.dtype).removeprefix("torch.")
        self._note(kind, name, f"{found} {shape} {dtype}", shape=shape, dtype=dtype, values=kept, **more)

    def _note(self, kind: str, name: str, found: str, **more: Any) -> None:
        self.found.append({"kind": kind, "name": name, "batch": self._batch, "digest": found, **more})


def _plain(index: Any) -> Any:
    return int(index) if hasattr(index, "__index__") else str(index)
