"""Compilation of a model for training by ``torch.compile``."""

from __future__ import annotations

import os
from shutil import which
from typing import Any

from torch import Tensor, nn

from boltcutter import internals
from boltcutter.task.errors import CompilerError


class Inductor:
    """Compiles a model by ``torch.compile``; its parameter names do not change.

    Args:
        model: Compiled in place when it is first called.
        strategy: Strategy of the trainer; any is supported.

    Raises:
        CompilerError: There is no C++ compiler.
    """

    def __init__(self, model: nn.Module, strategy: Any = None) -> None:
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
