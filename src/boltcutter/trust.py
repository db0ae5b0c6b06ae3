"""Which classes and functions the record of a run may name, given that whoever made the folder may be a stranger.

A configuration calls what its ``_target_`` keys name, so that opening a run folder would execute whatever its record
says. Accepted are the project's own code, what the project's configuration files name, and the classes of well-known
packages; ``trust=true`` accepts everything.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from boltcutter.config import ConfigError

PROJECT = __name__.partition(".")[0]
# Of this project, what configurations build; the rest runs commands and reads any file.
OWN = ("model", "data", "task", "callback", "logger", "strategy", "launch", "checkpoint")
# Packages, and parts of packages, whose classes only compute; of those with a star functions, too.
KNOWN = (
    *(
        "torch.nn.*",
        "torch.optim",
        "torch.utils.data",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.amp",
    ),
    *("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric", "torchmetrics.*"),
    *("torchvision.models.*", "torchvision.transforms.*", "torchvision.datasets", "torchvision.ops.*", "torchaudio"),
    *("timm.*", "transformers", "peft", "diffusers", "torch_geometric", "torchao", "keras", "kornia.*", "monai"),
    *(
        "segmentation_models_pytorch",
        "pytorch_forecasting",
        "chemprop",
        "sklearn",
        "accelerate",
        "torchrl",
        "tokenizers",
    ),
)
_granted = False


def take(words: list[str]) -> list[str]:
    """Words without ``trust=…``, which counts from now on.

    Raises:
        ConfigError: It is neither true nor false.
    """
    global _granted
    for word in words:
        if word.startswith("trust="):
            if word.lower() not in ("trust=true", "trust=false"):
                raise ConfigError(f"{word}: expected trust=true or trust=false")
            _granted = word.lower() == "trust=true"
    return [word for word in words if not word.startswith("trust=")]


def granted() -> bool:
    """Whether everything is accepted."""
    return _granted


def check(node: Any, where: str, folder: Path, configs: Path | None = None) -> None:
    """Refuse what a record names, unless it is known or the user has said ``trust=true``.

    Args:
        node: Part of the record.
        where: The setting that opens the run.
        folder: Of the run.
        configs: Folder of the project's configuration.

    Raises:
        ConfigError: Something else is named.
    """
    if _granted:
        return
    for target in targets(node):
        if not ((configs and target in _configured(configs)) or _is_own(target, folder) or _is_known(target)):
            raise ConfigError(
                f"{where}: its record.json names {target}, which is neither this project's nor of a known package, and "
                "would be executed; say trust=true if you know who made the folder"
            )


def targets(node: Any) -> Iterator[str]:
    """All that a configuration calls."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield str(node["_target_"])
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from targets(inner)


def _is_known(target: str) -> bool:
    accepted = [*KNOWN, *(f"{PROJECT}.{room}.*" for room in OWN)]
    if not (part := _part(target, accepted)):
        return False
    found = _located(target)
    if found is None:  # not installed here, so that nothing is executed here
        return True
    # What a module has imported is reached by its name as well: torch.nn.functional.torch.hub.load.
    home = _part(f"{getattr(found, '__module__', '')}.", accepted)
    return bool(home) and (inspect.isclass(found) or (part.endswith("*") and inspect.isfunction(found)))


def _part(target: str, accepted: list[str]) -> str:
    return next((part for part in accepted if f"{target}.".startswith(f"{part.removesuffix('.*')}.")), "")


def _is_own(target: str, folder: Path) -> bool:
    """Whether something is written in the user's own code: on the path, but in no installed package."""
    top = target.partition(".")[0]
    if top == PROJECT or not _is_users(target, folder):
        return False
    home = getattr(_located(target), "__module__", None)  # None where it is not importable, so that nothing is executed
    return home is None or _is_users(home, folder)


def _is_users(path: str, folder: Path) -> bool:
    """Whether a dotted path leads to the user's own code, and not into the run's folder, which is as strange."""
    top, *names = path.split(".")
    if top in sys.stdlib_module_names or not top.isidentifier():
        return False
    try:
        spec = find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return False
    places = [Path(p).resolve() for p in (spec.submodule_search_locations or [spec.origin or "/"])] if spec else []
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    if not places or any(place.is_relative_to(lib) for place in places for lib in installed):
        return False
    root, strange = Path(__file__).resolve().parents[2], folder.resolve()
    reached = [place.joinpath(*names[:depth]) for place in places for depth in range(len(names) + 1)]
    if root.is_relative_to(strange):  # this is the copy of the code that a launcher has put there
        return all(place.is_relative_to(root) or not place.is_relative_to(strange) for place in reached)
    return not any(place.is_relative_to(strange) for place in reached)


@cache
def _located(target: str) -> Any:
    """What a dotted path names; None where it cannot be imported. Only for packages that may be imported."""
    names, module = target.split("."), None
    for end in range(1, len(names) + 1):
        try:
            module = importlib.import_module(".".join(names[:end]))
        except ImportError:
            break
        depth = end
    found: Any = module
    for name in names[depth:] if module is not None else ():
        found = getattr(found, name, None)
    return found


@cache
def _configured(configs: Path) -> frozenset[str]:
    """All that the project's own configuration files name."""
    found = (re.findall(r"_target_:\s*['\"]?([\w.]+)", file.read_text()) for file in configs.rglob("*.yaml"))
    return frozenset(target for names in found for target in names)
