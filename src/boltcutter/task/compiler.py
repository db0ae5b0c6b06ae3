"""Compilers that a model may be trained through: torch's own, and XLA."""

from __future__ import annotations

import os
from shutil import which
from typing import Any, Literal, Protocol

from torch import Tensor, nn


class NoCompiler(RuntimeError):
    """This machine, or the way in which it is to train, cannot do what ``compile`` asks for."""

    hide_traceback = True  # needs no traceback


class Compiler(Protocol):
    """Runs a model while it is trained."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """What the model makes of ``inputs``."""

    def recompiled(self) -> list[str]:
        """Why it was compiled anew, once for each time, so far."""


def compiler(model: nn.Module, kind: Literal[True, "xla"], strategy: Any) -> Compiler:
    """The one that is asked for.

    Args:
        model: That is to be trained; keys of its state stay as they are.
        kind: The value of ``task.compile``.
        strategy: Of the trainer.

    Raises:
        NoCompiler: It is not installed, or does not go with the strategy.
    """
    if kind == "xla":
        from boltcutter.task.xla import XLA  # where it is not used, jax need not be there

        return XLA(model, strategy)
    return Inductor(model)


class Inductor:
    """Torch's compiler.

    Args:
        model: Compiled when it is first called.

    Raises:
        NoCompiler: It has nothing to make machine code with.
    """

    def __init__(self, model: nn.Module) -> None:
        if not any(map(which, (os.environ.get("CXX", "g++"), "clang++", "cl"))):
            raise NoCompiler(
                "task.compile=true, but there is no C++ compiler here; install g++, or set task.compile=false"
            )
        from torch._dynamo import utils

        utils.clear_compilation_metrics()
        utils.set_compilation_metrics_limit(1 << 12)  # as many as a run may tell of
        self.model = model
        model.compile()

    def __call__(self, inputs: Tensor) -> Tensor:
        """What the model makes of ``inputs``."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def recompiled(self) -> list[str]:
        """Why it was compiled anew, once for each time, so far."""
        from torch._dynamo.utils import get_compilation_metrics

        return [found.recompile_reason for found in get_compilation_metrics() if found.recompile_reason]
