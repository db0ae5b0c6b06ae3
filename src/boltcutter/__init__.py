"""A Lightning project template: every run is checked, recorded, resumed exactly and reproduced.

The names below are the public API. Each is imported when it is first used, so ``import boltcutter`` imports neither
torch nor Lightning.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text().splitlines()
_MODULES = {line.split()[-1]: line.split()[1] for line in _STUB if line.startswith(f"from {__name__}.")}


class _OtherName:
    """Has ``pytorch_lightning`` imported as ``lightning.pytorch``, and torchmetrics without transformers.

    By modules that are loaded only then.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchmetrics":
            return import_module(f"{__name__}.environment.deferred").find_torchmetrics()  # type: ignore[no-any-return]
        if name.partition(".")[0] not in ("pytorch_lightning", "lightning_fabric"):
            return None
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
        alias = import_module(f"{__name__}.environment.lightning_alias").install()
        spec: ModuleSpec | None = alias.find_spec(name, path, target)
        return spec


if _OtherName not in sys.meta_path:
    sys.meta_path.insert(0, _OtherName)
    if "pytorch_lightning" in sys.modules:
        _OtherName.find_spec("pytorch_lightning")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_MODULES)
    if name == "__version__":
        return _installed_version()
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def _installed_version() -> str:
    from importlib import metadata  # slow import

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:
        return "0+unknown"  # a copy on the path that is not installed, as in an image


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
