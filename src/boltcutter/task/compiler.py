"""Compilation of models for training: ``torch.compile`` or XLA."""

from __future__ import annotations

import os
from shutil import which
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from boltcutter import extend, internals
from boltcutter.task.errors import CompilerError


class Compiler(Protocol):
    """Calls a compiled model."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs."""

    def recompile_reasons(self) -> list[str]:
        """Return the reason of each recompilation so far."""


def make_compiler(model: nn.Module, backend: Literal[True, "xla"], strategy: Any) -> Compiler:
    """Return a compiler for ``model``.

    Args:
        model: Its parameter names do not change.
        backend: Value of ``task.compile``.
        strategy: Strategy of the trainer.

    Raises:
        CompilerError: The compiler is not installed, or does not support the strategy.
    """
    if backend == "xla":
        compiler: Compiler = extend.require("compiler.xla", "task.compile=xla")(model, strategy)
        return compiler
    return Inductor(model)


class Inductor:
    """Compiles a model by ``torch.compile``.

    Args:
        model: Compiled in place when it is first called.

    Raises:
        CompilerError: There is no C++ compiler.
    """

    def __init__(self, model: nn.Module) -> None:
        if not any(map(which, (os.environ.get("CXX", "g++"), "clang++", "cl"))):
            raise CompilerError("task.compile=true needs a C++ compiler; install g++, or set task.compile=false")
        internals.clear_compilations(1 << 12)  # the maximum number of recompilations that are reported
        self.model = model
        model.compile()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def recompile_reasons(self) -> list[str]:
        """Return the reason of each recompilation so far."""
        return internals.recompile_reasons()
