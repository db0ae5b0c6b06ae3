"""Imports transformers only when a metric needs it.

Where transformers is installed, ``import torchmetrics``, and so ``import lightning``, imports it for two metrics of
text, which takes nearly as long as all other imports. While torchmetrics is imported, its modules are given classes
that import transformers when they are first used; all others that import it then get the real package.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

CALLER, PACKAGE = "torchmetrics", "transformers"


def find_torchmetrics() -> ModuleSpec | None:
    """The specification of torchmetrics, whose import defers that of transformers."""
    spec = PathFinder.find_spec(CALLER)
    deferred_spec = None if PACKAGE in sys.modules else PathFinder.find_spec(PACKAGE)
    if spec and spec.loader and deferred_spec:
        execute = spec.loader.exec_module

        def execute_deferred(module: ModuleType) -> None:
            deferred = sys.modules[PACKAGE] = _Deferred(PACKAGE)
            deferred.__spec__ = deferred_spec
            try:
                execute(module)
            finally:
                deferred.end()

        setattr(spec.loader, "exec_module", execute_deferred)  # noqa: B010 (mypy refuses an assignment)
    return spec


class _Deferred(ModuleType):
    """Stands for transformers while torchmetrics is imported."""

    def __getattr__(self, name: str) -> Any:
        caller = inspect.currentframe().f_back.f_globals.get("__name__", "")  # type: ignore[union-attr]
        is_caller = caller.startswith(f"{CALLER}.")
        if name.startswith("__") and (is_caller or name != "__path__"):  # which an import of a submodule reads
            raise AttributeError(name)  # as for __file__, which inspect reads of all modules
        if is_caller:
            return _DeferredClass(name, (), {})
        self.end()
        return getattr(import_module(PACKAGE), name)

    def end(self) -> None:
        """Let transformers be imported from here on."""
        if sys.modules.get(PACKAGE) is self:
            del sys.modules[PACKAGE]


class _DeferredClass(type):
    """Stands for a class of transformers, which is imported when an attribute is first read."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(getattr(import_module(PACKAGE), cls.__name__), name)
