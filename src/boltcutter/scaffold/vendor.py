"""Copy the library or one of its components into a project to edit it there."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from boltcutter.config.errors import ConfigError, hint
from boltcutter.project import BUILTIN_CONFIGS, LIBRARY, SOURCE, Project
from boltcutter.scaffold.add import require_package, write_files

TARGET = re.compile(rf"\b{LIBRARY}\.([\w.]+)\.\w+")


def vendor_command(project: Project, arguments: list[str]) -> None:
    """Copy the library or one of its components, or remove that copy.

    Args:
        project: Project to copy into.
        arguments: A component such as ``callback.guard``, or nothing for the whole library; with ``--undo`` to remove
            its copy.

    Raises:
        ConfigError: There is no such component or copy, the copy exists already, or the project is the library itself.
    """
    if require_package(project) == LIBRARY:
        raise ConfigError(f"vendor: {project.root} is the repository of the library; edit it in src")
    names = [argument for argument in arguments if argument != "--undo"]
    if flags := [name for name in names if name.startswith("-")]:
        raise ConfigError(
            f"{flags[0]}: no such flag{hint(flags[0], ['--undo'])} (there is: --undo)", kind="unknown_flag"
        )
    if len(names) > 1:
        raise ConfigError(f"vendor {' '.join(names)}: more than one component; give one after the other")
    undo = "--undo" in arguments
    if not names:
        remove_library(project.root) if undo else copy_library(project.root)
    elif undo:
        remove_component(project, names[0])
    else:
        copy_component(project, names[0])


def copy_library(root: Path) -> None:
    """Copy the library to ``src``, where it is used instead of the installed one."""
    if (copy := root / "src" / LIBRARY).exists():
        raise ConfigError(f"vendor: {copy} exists already; remove it by `boltcutter vendor --undo`")
    shutil.copytree(SOURCE / LIBRARY, copy, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"Copied to {copy}, which is now used instead of the installed package")
    print("`boltcutter vendor --undo` removes the copy.")


def remove_library(root: Path) -> None:
    """Move the copy of the library to a temporary folder, so that the installed one is used again."""
    if not ((copy := root / "src" / LIBRARY) / "__init__.py").is_file():
        raise ConfigError(f"vendor --undo: {copy} does not exist; there is nothing to undo")
    shutil.move(copy, folder := tempfile.mkdtemp())
    print(f"The installed library is used again. The copy with its changes is in {folder}.")


def copy_component(project: Project, component: str) -> None:
    """Copy one source file into the project's package, with options in ``configs/`` that use the copy.

    Raises:
        ConfigError: No option uses such a component, or a file exists already.
    """
    package = require_package(project)
    copy = Path("src", package, *component.split(".")).with_suffix(".py")
    if _source(component) and (project.root / copy).exists():
        undo = f"boltcutter vendor {component} --undo"
        raise ConfigError(f"vendor {component}: {copy} exists already; edit it there, or `{undo}`")
    # An option of the project replaces a built-in one of the same name, so it comes last.
    folders = reversed(project.config_dirs)
    options = {file.relative_to(folder): file.read_text() for folder in folders for file in folder.rglob("*.yaml")}
    known = sorted({match[1] for text in options.values() for match in TARGET.finditer(text)})
    if component not in known:
        near = hint(component, known) or "; try callback.guard"
        raise ConfigError(f"vendor {component}: no such component{near}")
    source = SOURCE / Path(LIBRARY, *component.split(".")).with_suffix(".py")
    files = {copy: source.read_text()}
    module = re.compile(rf"\b{LIBRARY}\.{re.escape(component)}\b")
    for option, text in sorted(options.items()):
        if module.search(text):
            files[Path("configs", option)] = module.sub(f"{package}.{component}", text)
    write_files(project.root, files)
    for other in source.parent.glob(f"*{source.stem}*.sh"):  # a script that the component runs
        shutil.copy2(other, project.root / copy.with_name(other.name))


def remove_component(project: Project, component: str) -> None:
    """Move the copy of a component to a temporary folder, and let options use the library's again.

    Options that are then equal to those of the library are moved as well.

    Raises:
        ConfigError: There is no copy.
    """
    package = require_package(project)
    copy = Path("src", package, *component.split(".")).with_suffix(".py")
    if not (project.root / copy).is_file() or not (source := _source(component)):
        raise ConfigError(f"vendor {component} --undo: {copy} is not a copy of the library's; there is nothing to undo")
    moved = [copy]
    module = re.compile(rf"\b{re.escape(package)}\.{re.escape(component)}\b")
    for option in sorted((project.root / "configs").rglob("*.yaml")):
        text = module.sub(source, before := option.read_text())
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


def _source(component: str) -> str:
    """The dotted path of a component's module in the library; empty if there is none."""
    path = f"{LIBRARY}.{component}"
    return path if (SOURCE / path.replace(".", "/")).with_suffix(".py").is_file() else ""
