"""One Lightning under both of its names: ``pytorch_lightning`` is imported as ``lightning.pytorch``.

The two packages hold the same code, but a ``Trainer`` of one refuses a module of the other. With an alias, classes of
both names are the same, also where only ``lightning`` is installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from boltcutter.config.locate import SAME_PACKAGE


def install() -> AliasFinder:
    """Let the names of both packages refer to the same modules in this process.

    If ``pytorch_lightning`` has been imported already, as in a notebook, ``lightning.pytorch`` becomes the alias. Once
    both have been imported, nothing can be changed.
    """
    aliases = SAME_PACKAGE
    imported = sys.modules.get("pytorch_lightning")
    if imported and "lightning" not in sys.modules:
        from importlib.metadata import version  # takes longer to import than the rest

        if version("lightning") == imported.__version__:
            aliases = {name: alias for alias, name in SAME_PACKAGE.items()}
    finder = AliasFinder(aliases)
    sys.meta_path.insert(0, finder)
    return finder


def _renamed(path: str, names: dict[str, str]) -> str | None:
    for name, new in names.items():
        if path == name or path.startswith(f"{name}."):
            return new + path[len(name) :]
    return None


class AliasFinder:
    """Finds modules of one package under the name of the other, without importing anything.

    Args:
        aliases: For each alias, the name of the package that is imported.
    """

    def __init__(self, aliases: dict[str, str]) -> None:
        self.aliases = aliases

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec that loads the other module; None if ``name`` is no alias, or there is no such module."""
        real = _renamed(name, self.aliases)
        if real is None:
            return None
        if name in self.aliases:
            package = real.rpartition(".")[0]
            parent = find_spec(package) if package else None
            path = parent.submodule_search_locations if parent else None
        found = PathFinder.find_spec(real, path)
        if found is None:
            return None
        spec = ModuleSpec(name, AliasLoader(real), origin=found.origin)  # type: ignore[arg-type]  # not an abc.Loader
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


class AliasLoader:
    """Imports a module under its own name.

    Args:
        name: That name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module, which may have been imported before."""
        module = import_module(self.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system replaced by that of the alias."""
        module.__spec__ = self._spec
