"""Compilation of a model for training by ``torch.compile``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from shutil import which
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from boltcutter import internals
from boltcutter.structure import tensors
from boltcutter.task.errors import CompilerError

REDUCE_OVERHEAD, CUDA_GRAPH = "reduce-overhead", "cuda-graph"


def forbids_graphs(trainer: Any, *, whole_step: bool = False) -> str | None:
    """Why a model cannot be replayed as CUDA graphs in this training; None: it can.

    A graph computes in the same memory at each replay, so that what one step leaves there, the next one overwrites.

    Args:
        trainer: Of the training.
        whole_step: Whether gradients are added and used within the graph, too.
    """
    if trainer.strategy.root_device.type != "cuda":
        return f"CUDA graphs need a GPU, and this is {trainer.strategy.root_device.type}"
    if trainer.accumulate_grad_batches > 1 and not whole_step:
        batches = trainer.accumulate_grad_batches
        return f"trainer.accumulate_grad_batches={batches} adds to gradients that the next batch would overwrite"
    if trainer.world_size > 1 or not isinstance(trainer.strategy, SingleDeviceStrategy):
        return f"{type(trainer.strategy).__name__} reads and writes gradients while they are computed"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return f"the gradient scaler of trainer.precision={trainer.precision} reads from the device in each step"
    return None


class Inductor:
    """Compiles a model by ``torch.compile``; its parameter names do not change.

    With CUDA graphs, batches of other shapes than the first one, such as a last short batch, are not compiled, as each
    shape would be recorded anew. Outputs are copied, since the next step overwrites them.

    Args:
        model: Compiled in place when it is first called.
        graphs: Whether kernels are recorded and replayed as CUDA graphs.

    Raises:
        CompilerError: There is no C++ compiler.
    """

    def __init__(self, model: nn.Module, *, graphs: bool = False) -> None:
        for text in self.missing():
            raise CompilerError(text)
        internals.clear_compilations(1 << 12)  # the maximum number of recompilations that are reported
        self.model, self.graphs = model, graphs
        self._shapes: list[Any] | None = None  # of the first batch
        model.compile(**({"mode": REDUCE_OVERHEAD} if graphs else {}))

    @staticmethod
    def missing() -> Iterator[str]:
        """What this machine lacks."""
        if not any(map(which, (os.environ.get("CXX", "g++"), "clang++", "cl"))):
            yield "task.compile=true needs a C++ compiler; install g++, or set task.compile=false"

    def __call__(self, inputs: Any) -> Tensor:
        """Return the model's outputs."""
        outputs: Tensor
        if not self.graphs:
            outputs = self.model(inputs)
            return outputs
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors(inputs)]
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            with torch.compiler.set_stance("force_eager"):
                outputs = self.model(inputs)
            return outputs
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # the outputs of the step before are no longer needed
        outputs = self.model(inputs)
        return outputs.clone()

    def recompile_reasons(self) -> list[str]:
        """Return the reason of each recompilation so far."""
        return internals.recompile_reasons()
