"""Copy the library, or one of its components, into a project to edit it there."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from boltcutter.config.errors import ConfigError, hint
from boltcutter.project import LIBRARY, Project
from boltcutter.scaffold.add import require_package, write

SOURCE = Path(__file__).resolve().parents[1]


def main(project: Project, arguments: list[str]) -> None:
    """Copy a component, or without one the whole library, or remove that copy.

    Args:
        project: Project to copy into.
        arguments: A component such as ``callback.guard``, or ``--undo``, or nothing.

    Raises:
        ConfigError: There is no such component or copy, the copy exists already, or the project is the library itself.
    """
    if require_package(project) == LIBRARY:
        raise ConfigError(f"vendor: {project.root} is the repository of the library; edit it in src/{LIBRARY}")
    if len(arguments) > 1:
        raise ConfigError("vendor: expected one component or --undo, as in `boltcutter vendor callback.guard`")
    if not arguments:
        copy_library(project.root)
    elif arguments == ["--undo"]:
        remove_library(project.root)
    else:
        copy_component(project, arguments[0])


def copy_library(root: Path) -> None:
    """Copy the library to ``src/boltcutter``, where it is used instead of the installed one."""
    copy = root / "src" / LIBRARY
    if copy.exists():
        raise ConfigError(f"vendor: {copy} exists already; remove it by `boltcutter vendor --undo`")
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"Copied the library to {copy}, which is now used instead of the installed one; `vendor --undo` removes it.")


def remove_library(root: Path) -> None:
    """Move the copy to a temporary folder, so that the installed library is used again."""
    copy = root / "src" / LIBRARY
    if not copy.is_dir():
        raise ConfigError(f"vendor --undo: {copy} does not exist; there is nothing to undo")
    moved = shutil.move(copy, tempfile.mkdtemp())
    print(f"The installed library is used again. The copy with its changes is in {moved}.")


def copy_component(project: Project, component: str) -> None:
    """Copy one source file into the project's package, with options in ``configs/`` that use the copy.

    Raises:
        ConfigError: No option uses such a component, or a file exists already.
    """
    package = require_package(project)
    # An option of the project replaces a built-in one of the same name, so it comes last.
    folders = reversed(project.config_dirs)
    options = {file.relative_to(folder): file.read_text() for folder in folders for file in folder.rglob("*.yaml")}
    known = {name for text in options.values() for name in re.findall(rf"\b{LIBRARY}\.([\w.]+)\.\w+", text)}
    if component not in known:
        raise ConfigError(f"vendor {component}: no such component{hint(component, known) or '; try callback.guard'}")
    file = Path(*component.split(".")).with_suffix(".py")
    copy = Path("src", package, file)
    if (project.root / copy).exists():
        raise ConfigError(f"vendor {component}: {copy} exists already; edit it there")
    files = {copy: (SOURCE / file).read_text()}
    module = re.compile(rf"\b{LIBRARY}\.{re.escape(component)}\b")
    for option, text in sorted(options.items()):
        if module.search(text):
            files[Path("configs", option)] = module.sub(f"{package}.{component}", text)
    write(project.root, files)
