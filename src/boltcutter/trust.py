"""Which classes and functions the record of a run may name, given that whoever made the folder may be a stranger.

A configuration calls what its ``_target_`` keys name, so that opening a run folder would execute whatever its record
says. A record that carries this user's own signature is accepted as it is. Of any other the project's own code, what
the project's configuration files name, and the classes of well-known packages are accepted; ``trust=true`` accepts
everything.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import inspect
import json
import os
import re
import secrets
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from boltcutter.atomic import temporary_path
from boltcutter.config import ConfigError
from boltcutter.project import Project
from boltcutter.redaction import VARIABLE, looks_secret

PROJECT = __name__.partition(".")[0]
KEY_FILE = Path("~/.config/boltcutter/key")  # of this user; whoever has it can sign records
# Of this project, whose classes configurations name. Functions are accepted where a configuration file names them.
PROJECT_PACKAGES = ("model", "data", "task", "callback", "logger", "strategy", "launch", "checkpoint")
# Folders of the project that run commands and change files; no configuration has to name them.
TOOL_FOLDERS = ("scripts", "tests", "hooks")
# Packages, and parts of packages, whose classes only compute.
TRUSTED_PACKAGES = (
    *("torch.nn", "torch.optim", "torch.utils.data", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.amp"),
    *("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric", "torchmetrics"),
    *("torchvision.models", "torchvision.transforms", "torchvision.datasets", "torchvision.ops", "torchaudio"),
    *("timm.models", "timm.layers", "timm.loss", "timm.optim", "timm.scheduler", "timm.data"),
    *("transformers", "peft", "diffusers", "tokenizers", "accelerate", "torchao", "keras", "sklearn"),
    *("torch_geometric.nn", "torch_geometric.loader", "torch_geometric.transforms", "kornia", "chemprop"),
    *("monai.networks", "monai.losses", "monai.metrics", "monai.transforms", "monai.inferers", "monai.optimizers"),
    *("segmentation_models_pytorch", "pytorch_forecasting", "torchrl.modules", "torchrl.objectives"),
)
# Parts of these whose classes import by name, start processes or unpickle files.
UNTRUSTED_MODULES = (
    *("lightning.pytorch.cli", "pytorch_lightning.cli", "torchvision.datasets.lsun", "kornia.core.external"),
    *("transformers.data", "transformers.utils", "transformers.commands", "accelerate.commands"),
)
# Of these, public functions as well; of others a function may read any file or run any command.
TRUSTED_FUNCTIONS = (
    *("torch.nn.functional", "torch.nn.init", "torch.nn.utils.parametrizations", "torchmetrics.functional"),
    *("torchvision.models", "torchvision.transforms", "torchvision.ops"),
)
# A reference to another key, or to an environment variable; all others compute, and might make a _target_.
PLAIN_REFERENCE = re.compile(
    r"\$\{\s*(?:oc\.(?:env|select):\s*[\w.]+\s*(?:,[^{}]*)?|oc\.decode:\s*\$\{oc\.env:\w+(?:,[\w.+-]*)?\}|[\w.\[\]/\0-]+)\s*\}"
)
_granted = False


def apply_overrides(words: list[str]) -> list[str]:
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


def is_granted() -> bool:
    """Whether everything is accepted."""
    return _granted


def check(
    node: Any, where: str, folder: Path, project: Project | None = None, *, signature: object = None, runs: bool = False
) -> None:
    """Refuse what a record names, unless this user has signed it, it is known, or the user has said ``trust=true``.

    Args:
        node: Part of the record.
        where: The setting that opens the run.
        folder: Of the run.
        project: Whose configuration is used.
        signature: Of ``node``, as ``sign`` has made it.
        runs: Whether commands in ``node`` are to be run, so that known classes are not enough.

    Raises:
        ConfigError: Something else is named.
    """
    if _granted or is_signed(node, signature):
        return
    remedy = "say trust=true if you know who made the folder"
    if text := next(_odd_references(node), None):
        raise ConfigError(f"{where}: its record.json has {text}, which computes a value or reads a secret; {remedy}")
    for target in iter_targets(node):
        if not ((project and target in _configured(project)) or _is_own(target, folder, project) or _is_known(target)):
            raise ConfigError(
                f"{where}: its record.json names {target}, which is neither this project's nor of a known package, and "
                f"would be executed; {remedy}"
            )
    if runs:
        raise ConfigError(
            f"{where}: its record.json holds settings of a launch, with commands, that are not your own; {remedy}"
        )


def sign(node: Any) -> str | None:
    """A signature of plain values that only this user can make; None where no key can be stored."""
    with suppress(OSError, RuntimeError):  # a folder that cannot be written, or no home
        path = KEY_FILE.expanduser()
        if not path.is_file():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = temporary_path(path)
            os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            try:
                draft.write_text(secrets.token_hex(32))
                os.link(draft, path)  # fails where another process was first
            finally:
                draft.unlink()
    return _signature(node)


def is_signed(node: Any, signature: object) -> bool:
    """Whether this user has signed just these values."""
    expected = _signature(node) if isinstance(signature, str) else None
    return expected is not None and hmac.compare_digest(expected.encode(), str(signature).encode())


def signed_content(node: Any) -> bytes:
    """What is signed: the values as they are read again from the record, wherever the folder lies."""
    stored = json.loads(json.dumps(node, default=str))
    if isinstance(stored, dict):
        stored = {key: value for key, value in stored.items() if key not in ("folder", "resume", "reproduce")}
    return json.dumps(stored, sort_keys=True).encode()


def _signature(node: Any) -> str | None:
    try:
        key = KEY_FILE.expanduser().read_bytes()
    except (OSError, RuntimeError):
        return None
    return hmac.new(key, signed_content(node), hashlib.sha256).hexdigest() if len(key) >= 64 else None


def iter_targets(node: Any) -> Iterator[str]:
    """All that a configuration calls."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield str(node["_target_"])
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from iter_targets(inner)


def _odd_references(node: Any) -> Iterator[str]:
    """Texts whose references could make a ``_target_``, as ``oc.create`` does, or bring in a secret variable."""
    if isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _odd_references(inner)
    elif isinstance(node, str) and "${" in node:
        left, before = node, ""
        while left != before:  # from the innermost reference on
            left, before = PLAIN_REFERENCE.sub("\0", left), left
        if "${" in left or any(map(looks_secret, VARIABLE.findall(node))):
            yield node


def _is_known(target: str) -> bool:
    accepted = (*TRUSTED_PACKAGES, *(f"{PROJECT}.{room}" for room in PROJECT_PACKAGES))
    if not _within(target, accepted) or _within(target, UNTRUSTED_MODULES):
        return False
    found = _located(target)
    if found is None:  # not installed here, so that nothing is executed here
        return True
    # What a module has imported is reached by its name as well: torch.nn.functional.torch.hub.load.
    home = str(getattr(found, "__module__", None))
    if not _within(home, accepted) or _within(home, UNTRUSTED_MODULES):
        return False
    if inspect.isclass(found):
        return True
    public = inspect.isfunction(found) and found.__qualname__.isidentifier() and not found.__name__.startswith("_")
    return public and _within(target, TRUSTED_FUNCTIONS) and _within(home, TRUSTED_FUNCTIONS)


def _within(path: str, parts: tuple[str, ...]) -> bool:
    return any(f"{path}.".startswith(f"{part}.") for part in parts)


def _is_own(target: str, folder: Path, project: Project | None) -> bool:
    """Whether something is written in the user's own code: on the path, but in no installed package."""
    top = target.partition(".")[0]
    if top == PROJECT or not _is_users(target, folder, project):
        return False
    found = _located(target)
    # None where it is not importable, so that nothing is executed. A built-in method, as of sys.path, has no module.
    return found is None or _is_users(str(getattr(found, "__module__", None)), folder, project)


def _is_users(path: str, folder: Path, project: Project | None) -> bool:
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
    # Also of the system, the user, or a module of the cluster on PYTHONPATH.
    if any({"site-packages", "dist-packages"} & set(place.parts) for place in places):
        return False
    strange = folder.resolve()
    root = project.root.resolve() if project else None
    if root and any(place.is_relative_to(root / tool) for place in places for tool in TOOL_FOLDERS):
        return False
    reached = [place.joinpath(*names[:depth]) for place in places for depth in range(len(names) + 1)]
    if root and root.is_relative_to(strange):  # this is the copy of the code that a launcher has put there
        return all(place.is_relative_to(root) or not place.is_relative_to(strange) for place in reached)
    return not any(place.is_relative_to(strange) for place in reached)


@cache
def _located(target: str) -> Any:
    """What a dotted path names; None where it cannot be imported. Only for packages that may be imported."""
    names, module = target.split("."), None
    for end in range(1, len(names) + 1):
        try:
            module = importlib.import_module(".".join(names[:end]))
        except Exception:  # whatever a foreign module raises while it is imported; locate() reports it
            break
        depth = end
    found: Any = module
    for name in names[depth:] if module is not None else ():
        found = getattr(found, name, None)
    return found


@cache
def _configured(project: Project) -> frozenset[str]:
    """All that the project's own configuration files name."""
    files = (file for place in project.config_dirs for file in place.rglob("*.yaml"))
    found = (re.findall(r"_target_:\s*['\"]?([\w.]+)", file.read_text()) for file in files)
    return frozenset(target for names in found for target in names)
