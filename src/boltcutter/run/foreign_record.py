"""Judge which classes and functions the record of somebody else may call, as run folders may come from anywhere.

A configuration calls its ``_target_`` values, so opening a run folder could execute arbitrary code. Only the project's
own code, targets in the project's configuration files, and layers, optimizers, metrics, callbacks and the like of
PyTorch, torchmetrics and Lightning are allowed, and only URLs of object storage.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache, partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.config.locate import canonical
from boltcutter.config.values import resolved_texts
from boltcutter.files import REMEDY
from boltcutter.project import LIBRARY, Project
from boltcutter.run.foreign_references import check_references, known_texts
from boltcutter.run.lineage import list_files

# Packages of the library whose classes are allowed. Functions are allowed if a configuration file refers to them.
PROJECT_PACKAGES = tuple(
    f"{LIBRARY}.{name}"
    for name in (
        "model",
        "data",
        "task",
        "callback",
        "logger",
        "strategy",
        "checkpoint",
        "launch",
        "scaffold.configured",
    )
)
# Folders of the project with code that runs commands and changes files, which no configuration needs.
TOOL_FOLDERS = ("scripts", "tests", "hooks")
# Folders of the project with files of anybody, also where git tracks these.
DATA_FOLDERS = ("runs", "data")
# Where targets may be, and what their classes must be derived from.
TRUSTED_PACKAGES = (
    *("torch.nn", "torch.optim", "torch.amp", "torch.distributed.fsdp", "torchmetrics"),
    *("lightning.Trainer", "lightning.pytorch.Trainer", "lightning.pytorch.trainer"),
    *(f"lightning.pytorch.{name}" for name in ("callbacks", "loggers", "plugins", "profilers", "strategies")),
    "lightning.fabric.plugins",
)
TRUSTED_BASES = (
    *("torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler", "torch.amp.GradScaler"),
    *("torch.distributed.fsdp.MixedPrecision", "torch.distributed.fsdp.MixedPrecisionPolicy"),
    *("torch.distributed.fsdp.CPUOffload", "torch.distributed.fsdp.OffloadPolicy"),
    *("lightning.pytorch.Trainer", "lightning.pytorch.Callback", "lightning.pytorch.loggers.logger.Logger"),
    *("lightning.pytorch.strategies.Strategy", "lightning.pytorch.profilers.Profiler"),
    *("lightning.fabric.plugins.CheckpointIO", "lightning.fabric.plugins.Precision"),
)
# Modules of these packages whose classes load weights by name, most of them by unpickling a download.
UNTRUSTED_MODULES = (
    *("torchmetrics.multimodal", "torchmetrics.text", "torchmetrics.audio", "torchmetrics.functional"),
    *(f"torchmetrics.image.{name}" for name in ("arniqa", "dists", "fid", "inception", "kid", "lpip", "mifid")),
    "torchmetrics.image.perceptual_path_length",
)
# Modules whose public functions are allowed as well; in other modules, functions may read files or run commands.
TRUSTED_FUNCTIONS = ("torch.nn.functional", "torch.nn.init", "torch.nn.utils.parametrizations")
# Storage of checkpoints and data. Other protocols of fsspec run code, or reach any server.
TRUSTED_PROTOCOLS = ("file", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
URL = re.compile(r"(?P<value>(?P<protocol>[\w+.-]{1,40})://[^\s'\"]*)")  # in linear time, as texts may be long
TARGET = re.compile(r"_target_:\s*['\"]?(?P<value>[\w.]+)")


def judge(node: Any, where: str, folder: Path, project: Project | None, *, instantiates: bool, runs: bool) -> None:
    """Check references, URLs and targets in a record of somebody else; arguments are those of ``trust.check``.

    Raises:
        ConfigError: A reference, URL or target is not allowed.
    """
    check_references(node, where, project)
    known = known_texts(project) if "${" in str(node) else frozenset()
    if text := next(_unsafe_urls([node, *resolved_texts(node, known)], project), None):
        raise ConfigError(
            f"{where}: its record.json has {one_line(text[:200])}, an address that would be contacted; {REMEDY}"
        )
    for target, is_checked in iter_targets(node) if instantiates else ():
        name = canonical(target)
        is_own = name in _configured(project, TARGET) or _is_user_target(name, folder, project)
        if not is_own and not (is_checked and _is_known(name)):
            raise ConfigError(
                f"{where}: its record.json refers to {one_line(target[:200])}, which is neither part of this project "
                f"nor of a well-known package, and would be executed; {REMEDY}"
            )
    if runs:
        raise ConfigError(
            f"{where}: its record holds overrides or launch settings, with commands, that you have not signed; {REMEDY}"
        )


def iter_targets(node: Any) -> Iterator[tuple[str, bool]]:
    """Yield all ``_target_`` values of a configuration, and whether the types of the arguments are checked."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield str(node["_target_"]), node.get("_check_", True) is True
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from iter_targets(inner)


def _unsafe_urls(node: Any, project: Project | None) -> Iterator[str]:
    """Yield URLs that are neither of object storage nor in a configuration file of the project."""
    if isinstance(node, dict | list):
        # Tags are only shown.
        shown = {name: value for name, value in node.items() if name != "tags"} if isinstance(node, dict) else None
        for inner in node if shown is None else [*shown, *shown.values()]:
            yield from _unsafe_urls(inner, project)
    elif isinstance(node, str):
        known = _configured(project, URL)
        found = [match[0] for match in URL.finditer(node) if match["protocol"].lower() not in TRUSTED_PROTOCOLS]
        if "::" in node or any(url not in known for url in found):
            yield node


def _is_known(target: str) -> bool:
    accepted = (*TRUSTED_PACKAGES, *PROJECT_PACKAGES)
    if any(name.startswith("_") for name in target.split(".")):
        return False
    if not _within(target, accepted) or _within(target, UNTRUSTED_MODULES):
        return False
    found = _import_target(target)
    if found is None:  # not installed, so nothing can be executed
        return True
    # Imported modules are attributes of a module, too: torch.nn.functional.torch.hub.load.
    home = str(getattr(found, "__module__", None))
    if not _within(home, accepted) or _within(home, UNTRUSTED_MODULES):
        return False
    if inspect.isclass(found):
        return _within(home, PROJECT_PACKAGES) or any(map(partial(_is_derived, found), TRUSTED_BASES))
    public = inspect.isfunction(found) and found.__qualname__.isidentifier() and not found.__name__.startswith("_")
    return public and _within(target, TRUSTED_FUNCTIONS) and _within(home, TRUSTED_FUNCTIONS)


def _is_derived(kind: type, base: str) -> bool:
    """Return whether a class is derived from one of these names, or is it."""
    return isinstance(found := _import_target(base), type) and issubclass(kind, found)


def _within(path: str, parts: tuple[str, ...]) -> bool:
    return any(f"{path}.".startswith(f"{part}.") for part in parts)


def _is_user_target(target: str, folder: Path, project: Project | None) -> bool:
    """Return whether a target is in the user's own code: importable, but not from an installed package."""
    top = target.partition(".")[0]
    if top == LIBRARY or not _is_user_code(target, folder, project):
        return False
    found = _import_target(target)
    # If it cannot be imported, nothing can be executed. A built-in method, as of sys.path, has no module.
    return found is None or _is_user_code(str(getattr(found, "__module__", None)), folder, project)


def _is_user_code(path: str, folder: Path, project: Project | None) -> bool:
    """Return whether a dotted path refers to the user's own code, and not to the untrusted run folder."""
    top, *names = path.split(".")
    if top in sys.stdlib_module_names or not top.isidentifier():
        return False
    run_folder = folder.resolve()
    try:
        spec = find_spec(top)
    except ValueError:  # a module without a specification
        return False
    if spec is None:
        return False
    places = [Path(p).resolve() for p in (spec.submodule_search_locations or [spec.origin or "/"])]
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    others = {"site-packages", "dist-packages"}  # of the system, of the user, and of cluster modules on PYTHONPATH
    if any(others & set(place.parts) or any(map(place.is_relative_to, installed)) for place in places):
        return False
    root = project.root.resolve() if project else None
    is_data = spec.origin is None and any(_holds_data(place, run_folder, root) for place in places)
    if is_data or (root and any(place.is_relative_to(root / tool) for place in places for tool in TOOL_FOLDERS)):
        return False
    reached = [place.joinpath(*names[:depth]).resolve() for place in places for depth in range(len(names) + 1)]
    if any((place / run_files.RECORD).exists() for place in reached):  # another run folder, of anybody as well
        return False
    if root and root.is_relative_to(run_folder):  # this is the copy of the code that a launcher has created
        return all(place.is_relative_to(root) or not place.is_relative_to(run_folder) for place in reached)
    if any(place.is_relative_to(run_folder) for place in reached):
        return False
    return not (project and root and any(p.is_relative_to(root) for p in places)) or _is_of_project(path, spec, project)


def _is_of_project(path: str, spec: ModuleSpec, project: Project) -> bool:
    """Whether a module in the folder of the project is its code, and not a file beside data that anybody has put there.

    Its code is its package, the modules of targets in its configuration files, and the files that git tracks.
    """
    top, *names = path.split(".")
    if top == project.package or {path, path.rpartition(".")[0]} & _configured_modules(project):
        return True
    found, root = [], project.root.resolve()
    for place in map(Path, spec.submodule_search_locations or [spec.origin or "/"]):
        within = [place.joinpath(*names[:depth]) for depth in range(len(names) + 1)]
        candidates = [place, *(p / "__init__.py" for p in within), *(p.with_suffix(".py") for p in within[1:])]
        found += [file.resolve() for file in candidates if file.is_file()]
    return bool(found) and all(file.is_relative_to(root) and file in _tracked(root) for file in found)


@cache
def _configured_modules(project: Project) -> frozenset[str]:
    return frozenset(target.rpartition(".")[0] for target in _configured(project, TARGET))


@cache
def _tracked(root: Path) -> frozenset[Path]:
    """The files of a project that git tracks."""
    return frozenset(root / name for name in list_files(root, "--cached") or ())


def _holds_data(place: Path, run_folder: Path, root: Path | None) -> bool:
    """Return whether a folder without ``__init__.py`` is one of data, such as that of all runs."""
    is_data = run_folder.is_relative_to(place) or (place.parent == root and place.name in DATA_FOLDERS)
    return is_data or any(place.glob("*/*/record.json"))


@cache
def _import_target(target: str) -> Any:
    """Import a dotted path; return None if it cannot be imported. Call only for packages that may be imported."""
    names, module = target.split("."), None
    for end in range(1, len(names) + 1):
        try:
            module = importlib.import_module(".".join(names[:end]))
        except (Exception, SystemExit):  # any error raised by the import, which locate() reports
            break
        depth = end
    found: Any = module
    for name in names[depth:] if module is not None else ():
        found = getattr(found, name, None)
    return found


@cache
def _configured(project: Project | None, pattern: re.Pattern[str]) -> frozenset[str]:
    """Return all matches of a pattern in the project's configuration files, which include those of the library."""
    texts = project.option_texts() if project else ()
    return frozenset(canonical(match["value"]) for text in texts for match in pattern.finditer(text))
