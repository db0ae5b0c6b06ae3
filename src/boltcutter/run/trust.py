"""Check which classes and functions the record of a run may call, since run folders may come from untrusted sources.

A configuration calls its ``_target_`` values, so opening a run folder could execute arbitrary code. Records that are
signed by this user are trusted. In other records, only the project's own code, targets in the project's configuration
files, and classes of well-known packages are allowed, unless ``trust=true`` is set.
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

from boltcutter.checkpoint.atomic import temporary_path
from boltcutter.config.errors import ConfigError
from boltcutter.config.redaction import VARIABLE, looks_secret
from boltcutter.lightning_alias import canonical
from boltcutter.project import Project

PROJECT = __name__.partition(".")[0]
KEY_FILE = Path("~/.config/boltcutter/key")  # secret key of this user, with which records are signed
# Packages of this library whose classes are allowed. Functions are allowed if a configuration file refers to them.
PROJECT_PACKAGES = ("model", "data", "task", "callback", "logger", "strategy", "launch", "checkpoint")
# Folders of the project with code that runs commands and changes files, which no configuration needs.
TOOL_FOLDERS = ("scripts", "tests", "hooks")
# Packages whose classes only compute.
TRUSTED_PACKAGES = (
    *("torch.nn", "torch.optim", "torch.utils.data", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.amp"),
    *("lightning.pytorch", "lightning.fabric", "torchmetrics"),
    *("torchvision.models", "torchvision.transforms", "torchvision.datasets", "torchvision.ops", "torchaudio"),
    *("timm.models", "timm.layers", "timm.loss", "timm.optim", "timm.scheduler", "timm.data"),
    *("transformers", "peft", "diffusers", "tokenizers", "accelerate", "torchao", "keras", "sklearn"),
    *("torch_geometric.nn", "torch_geometric.loader", "torch_geometric.transforms", "kornia", "chemprop"),
    *("monai.networks", "monai.losses", "monai.metrics", "monai.transforms", "monai.inferers", "monai.optimizers"),
    *("segmentation_models_pytorch", "pytorch_forecasting", "torchrl.modules", "torchrl.objectives"),
)
# Modules of these packages whose classes import by name, start processes or unpickle files.
UNTRUSTED_MODULES = (
    *("lightning.pytorch.cli", "torchvision.datasets.lsun", "kornia.core.external"),
    *("transformers.data", "transformers.utils", "transformers.commands", "accelerate.commands"),
)
# Modules whose public functions are allowed as well; in other modules, functions may read files or run commands.
TRUSTED_FUNCTIONS = (
    *("torch.nn.functional", "torch.nn.init", "torch.nn.utils.parametrizations", "torchmetrics.functional"),
    *("torchvision.models", "torchvision.transforms", "torchvision.ops"),
)
# A reference to another key or to an environment variable. Other resolvers compute values, which may contain _target_.
PLAIN_REFERENCE = re.compile(
    r"\$\{\s*(?:oc\.(?:env|select):\s*[\w.]+\s*(?:,[^{}]*)?|oc\.decode:\s*\$\{oc\.env:\w+(?:,[\w.+-]*)?\}|[\w.\[\]/\0-]+)\s*\}"
)
_granted = False


def apply_overrides(overrides: list[str]) -> list[str]:
    """Apply ``trust=…`` to this process, and return the other overrides."""
    global _granted
    for override in overrides:
        if override.startswith("trust="):
            if override.lower() not in ("trust=true", "trust=false"):
                raise ConfigError(f"{override}: expected trust=true or trust=false")
            _granted = override.lower() == "trust=true"
    return [override for override in overrides if not override.startswith("trust=")]


def is_granted() -> bool:
    """Return whether ``trust=true`` is set."""
    return _granted


def check(
    node: Any, where: str, folder: Path, project: Project | None = None, *, signature: object = None, runs: bool = False
) -> None:
    """Check that all targets in a record are allowed, unless this user has signed it or has set ``trust=true``.

    Args:
        node: Part of the record.
        where: The override that opens the run, for error messages.
        folder: Folder of the run.
        project: The project, whose configuration files are searched for targets.
        signature: Signature of ``node``, from ``sign``.
        runs: Whether commands in ``node`` will be run, so that a signature is required.

    Raises:
        ConfigError: A target is not allowed.
    """
    if _granted or is_signed(node, signature):
        return
    remedy = "set trust=true if you trust the source of the folder"
    if text := next(_unsafe_references(node), None):
        raise ConfigError(f"{where}: its record.json has {text}, which computes a value or reads a secret; {remedy}")
    for target in iter_targets(node):
        name = canonical(target)
        configured = project and name in _configured_targets(project)
        if not (configured or _is_user_target(name, folder, project) or _is_known(name)):
            raise ConfigError(
                f"{where}: its record.json refers to {target}, which is neither part of this project nor of a "
                f"well-known package, and would be executed; {remedy}"
            )
    if runs:
        raise ConfigError(
            f"{where}: its record.json holds launch settings, with commands, that you have not signed; {remedy}"
        )


def sign(node: Any) -> str | None:
    """Sign plain values with this user's key; return None if no key can be stored."""
    with suppress(OSError, RuntimeError):  # a folder that is not writable, or no home directory
        path = KEY_FILE.expanduser()
        if not path.is_file():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = temporary_path(path)
            os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            try:
                draft.write_text(secrets.token_hex(32))
                os.link(draft, path)  # fails if another process has created it
            finally:
                draft.unlink()
    return _signature(node)


def is_signed(node: Any, signature: object) -> bool:
    """Return whether ``signature`` is this user's signature of these values."""
    expected = _signature(node) if isinstance(signature, str) else None
    return expected is not None and hmac.compare_digest(expected.encode(), str(signature).encode())


def signed_content(node: Any) -> bytes:
    """Return the bytes that are signed: the values as stored in the record, without the location of the folder."""
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
    """Yield all ``_target_`` values of a configuration."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield str(node["_target_"])
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from iter_targets(inner)


def _unsafe_references(node: Any) -> Iterator[str]:
    """Yield strings with resolvers that could create a ``_target_``, as ``oc.create``, or read a secret variable."""
    if isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _unsafe_references(inner)
    elif isinstance(node, str) and "${" in node:
        left, before = node, ""
        while left != before:  # from the innermost reference outwards
            left, before = PLAIN_REFERENCE.sub("\0", left), left
        if "${" in left or any(map(looks_secret, VARIABLE.findall(node))):
            yield node


def _is_known(target: str) -> bool:
    accepted = (*TRUSTED_PACKAGES, *(f"{PROJECT}.{package}" for package in PROJECT_PACKAGES))
    if not _within(target, accepted) or _within(target, UNTRUSTED_MODULES):
        return False
    found = _import_target(target)
    if found is None:  # not installed, so nothing can be executed
        return True
    # Imported modules are attributes of a module, too: torch.nn.functional.torch.hub.load.
    home = canonical(str(getattr(found, "__module__", None)))
    if not _within(home, accepted) or _within(home, UNTRUSTED_MODULES):
        return False
    if inspect.isclass(found):
        return True
    public = inspect.isfunction(found) and found.__qualname__.isidentifier() and not found.__name__.startswith("_")
    return public and _within(target, TRUSTED_FUNCTIONS) and _within(home, TRUSTED_FUNCTIONS)


def _within(path: str, parts: tuple[str, ...]) -> bool:
    return any(f"{path}.".startswith(f"{part}.") for part in parts)


def _is_user_target(target: str, folder: Path, project: Project | None) -> bool:
    """Return whether a target is in the user's own code: importable, but not from an installed package."""
    top = target.partition(".")[0]
    if top == PROJECT or not _is_user_code(target, folder, project):
        return False
    found = _import_target(target)
    # If it cannot be imported, nothing can be executed. A built-in method, as of sys.path, has no module.
    return found is None or _is_user_code(str(getattr(found, "__module__", None)), folder, project)


def _is_user_code(path: str, folder: Path, project: Project | None) -> bool:
    """Return whether a dotted path refers to the user's own code, and not to the untrusted run folder."""
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
    # Also those of the system, of the user, and of cluster modules on PYTHONPATH.
    if any({"site-packages", "dist-packages"} & set(place.parts) for place in places):
        return False
    run_folder = folder.resolve()
    root = project.root.resolve() if project else None
    if root and any(place.is_relative_to(root / tool) for place in places for tool in TOOL_FOLDERS):
        return False
    reached = [place.joinpath(*names[:depth]) for place in places for depth in range(len(names) + 1)]
    if root and root.is_relative_to(run_folder):  # this is the copy of the code that a launcher has created
        return all(place.is_relative_to(root) or not place.is_relative_to(run_folder) for place in reached)
    return not any(place.is_relative_to(run_folder) for place in reached)


@cache
def _import_target(target: str) -> Any:
    """Import a dotted path; return None if it cannot be imported. Call only for packages that may be imported."""
    names, module = target.split("."), None
    for end in range(1, len(names) + 1):
        try:
            module = importlib.import_module(".".join(names[:end]))
        except Exception:  # any error raised by the import, which locate() reports
            break
        depth = end
    found: Any = module
    for name in names[depth:] if module is not None else ():
        found = getattr(found, name, None)
    return found


@cache
def _configured_targets(project: Project) -> frozenset[str]:
    """Return all ``_target_`` values in the project's configuration files."""
    files = (file for place in project.config_dirs for file in place.rglob("*.yaml"))
    found = (re.findall(r"_target_:\s*['\"]?([\w.]+)", file.read_text()) for file in files)
    return frozenset(canonical(target) for names in found for target in names)
