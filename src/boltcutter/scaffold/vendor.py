"""Copy the library, or one of its components, into a project to edit it there."""

from __future__ import annotations

import re
import shutil
import subprocess
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
        ConfigError: There is no such component, or the copy exists already or has changes that are not committed.
    """
    require_package(project)
    if arguments == ["--undo"]:
        remove_library(project.root)
    elif not arguments:
        copy_library(project.root)
    elif len(arguments) == 1 and not arguments[0].startswith("-"):
        copy_component(project, arguments[0])
    else:
        raise ConfigError("vendor: expected one component or --undo, as in `boltcutter vendor callback.guard`")


def copy_library(root: Path) -> None:
    """Copy the library to ``src/boltcutter``, where it is used instead of the installed one."""
    copy = root / "src" / LIBRARY
    if copy.exists():
        raise ConfigError(f"vendor: {copy} exists already; remove it by `boltcutter vendor --undo`")
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"Copied the library to {copy}, which is now used instead of the installed one; `vendor --undo` removes it.")


def remove_library(root: Path) -> None:
    """Remove the copy, so that the installed library is used again.

    Raises:
        ConfigError: There is none, or it has changes that are not committed.
    """
    copy = root / "src" / LIBRARY
    if not copy.is_dir():
        raise ConfigError(f"vendor: {copy} does not exist; there is nothing to undo")
    done = subprocess.run(["git", "status", "--porcelain", "--", str(copy)], cwd=root, capture_output=True, text=True)
    changed = [line[3:] for line in done.stdout.splitlines() if not line.startswith("??")]
    if changed:
        raise ConfigError(f"vendor: {changed[0]} has changes that are not committed; commit them or restore the file")
    shutil.rmtree(copy)
    print(f"Removed {copy}; the installed library is used again.")


def copy_component(project: Project, component: str) -> None:
    """Copy one source file into the project's package, with options in ``configs/`` that use the copy.

    Raises:
        ConfigError: There is no such component, or a file exists already.
    """
    package = require_package(project)
    source = SOURCE.joinpath(*component.split(".")).with_suffix(".py")
    if not re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", component) or not source.is_file():
        known = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in SOURCE.glob("*/*.py")]
        raise ConfigError(f"vendor {component}: no such component{hint(component, known)}; try callback.guard")
    files = {Path("src", package, *component.split(".")).with_suffix(".py"): source.read_text()}
    module = re.compile(rf"\b{LIBRARY}\.{re.escape(component)}\b")
    for folder in reversed(project.config_dirs):  # an option of the project replaces a built-in one of the same name
        for option in sorted(folder.rglob("*.yaml")):
            if module.search(text := option.read_text()):
                files[Path("configs", option.relative_to(folder))] = module.sub(f"{package}.{component}", text)
    if (project.root / next(iter(files))).exists():
        raise ConfigError(f"vendor {component}: {next(iter(files))} exists already; edit it there")
    for file, text in files.items():
        write(project.root, file, text)
        print(file)
