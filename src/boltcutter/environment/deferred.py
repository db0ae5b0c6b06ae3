"""Imports transformers and scipy.signal only when a metric needs them.

``import torchmetrics``, and so ``import lightning``, imports transformers, where it is installed, for two metrics of
text, which takes nearly as long as all other imports, and scipy.signal to give it an old name. While torchmetrics is
imported, its modules are given classes that import the package when they are first used; all others that import it then
get the real one.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

CALLER, PACKAGES = "torchmetrics", ("transformers", "scipy.signal")


def find_torchmetrics() -> ModuleSpec | None:
    """The specification of torchmetrics, whose import defers those of other packages."""
    spec = PathFinder.find_spec(CALLER)
    names = [name for name in PACKAGES if name not in sys.modules and PathFinder.find_spec(name.partition(".")[0])]
    if spec and spec.loader and names:
        execute = spec.loader.exec_module

        def execute_deferred(module: ModuleType) -> None:
            deferred = [_Deferred(name) for name in names]
            for each in deferred:
                each.__spec__ = find_spec(each.__name__)
                sys.modules[each.__name__] = each
            try:
                execute(module)
            finally:
                for each in deferred:
                    each.end()

        setattr(spec.loader, "exec_module", execute_deferred)  # noqa: B010 (mypy refuses an assignment)
    return spec


class _Deferred(ModuleType):
    """Stands for a package while torchmetrics is imported."""

    def __getattr__(self, name: str) -> Any:
        caller = inspect.currentframe().f_back.f_globals.get("__name__", "")  # type: ignore[union-attr]
        is_caller = caller.partition(".")[0] == CALLER
        if name.startswith("__") and (is_caller or name != "__path__"):  # which an import of a submodule reads
            raise AttributeError(name)  # as for __file__, which inspect reads of all modules
        if is_caller:
            return _DeferredClass(name, (), {"package": self.__name__})
        self.end()
        return getattr(import_module(self.__name__), name)

    def end(self) -> None:
        """Let the package be imported from here on."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _DeferredClass(type):
    """Stands for a class of a package, which is imported when an attribute is first read."""

    package: str

    def __getattr__(cls, name: str) -> Any:
        return getattr(getattr(import_module(cls.package), cls.__name__), name)
