"""Copy the library, or one of its components, into a project to edit it there."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from boltcutter.config.errors import ConfigError, hint
from boltcutter.project import BUILTIN_CONFIGS, LIBRARY, Project
from boltcutter.scaffold.add import require_package, write

SOURCE = Path(__file__).resolve().parents[1]


def main(project: Project, arguments: list[str]) -> None:
    """Copy a component, or without one the whole library, or remove that copy.

    Args:
        project: Project to copy into.
        arguments: A component such as ``callback.guard``, or nothing; with ``--undo`` to remove its copy.

    Raises:
        ConfigError: There is no such component or copy, the copy exists already, or the project is the library itself.
    """
    if require_package(project) == LIBRARY:
        raise ConfigError(f"vendor: {project.root} is the repository of the library; edit it in src/{LIBRARY}")
    components = [argument for argument in arguments if argument != "--undo"]
    if len(components) > 1:
        raise ConfigError("vendor: expected one component, as in `boltcutter vendor callback.guard`")
    if "--undo" in arguments:
        remove_component(project, *components) if components else remove_library(project.root)
    elif components:
        copy_component(project, *components)
    else:
        copy_library(project.root)


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
    file = Path(*component.split(".")).with_suffix(".py")
    copy = Path("src", package, file)
    if (SOURCE / file).is_file() and (project.root / copy).exists():
        raise ConfigError(
            f"vendor {component}: {copy} exists already; edit it there, or `boltcutter vendor {component} --undo`"
        )
    # An option of the project replaces a built-in one of the same name, so it comes last.
    folders = reversed(project.config_dirs)
    options = {file.relative_to(folder): file.read_text() for folder in folders for file in folder.rglob("*.yaml")}
    known = {name for text in options.values() for name in re.findall(rf"\b{LIBRARY}\.([\w.]+)\.\w+", text)}
    if component not in known:
        raise ConfigError(f"vendor {component}: no such component{hint(component, known) or '; try callback.guard'}")
    files = {copy: (SOURCE / file).read_text()}
    module = re.compile(rf"\b{LIBRARY}\.{re.escape(component)}\b")
    for option, text in sorted(options.items()):
        if module.search(text):
            files[Path("configs", option)] = module.sub(f"{package}.{component}", text)
    write(project.root, files)


def remove_component(project: Project, component: str) -> None:
    """Move the copy of a component to a temporary folder, and let options use the library's again.

    Options that are then equal to those of the library are moved as well.

    Raises:
        ConfigError: There is no copy.
    """
    package = require_package(project)
    copy = Path("src", package, *component.split(".")).with_suffix(".py")
    if not (project.root / copy).is_file() or not (SOURCE / copy.relative_to("src", package)).is_file():
        raise ConfigError(f"vendor {component} --undo: {copy} is not a copy of the library's; there is nothing to undo")
    moved = [copy]
    module = re.compile(rf"\b{re.escape(package)}\.{re.escape(component)}\b")
    for option in sorted((project.root / "configs").rglob("*.yaml")):
        text = module.sub(f"{LIBRARY}.{component}", before := option.read_text())
        builtin = BUILTIN_CONFIGS / option.relative_to(project.root / "configs")
        if text != before and builtin.is_file() and builtin.read_text() == text:
            moved.append(option.relative_to(project.root))
        elif text != before:
            option.write_text(text)
    folder = Path(tempfile.mkdtemp())
    for file in moved:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(project.root / file, folder / file)
        print(file)
    print(f"The library's {component} is used again. The files above are in {folder}.")
