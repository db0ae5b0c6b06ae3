"""Copy the library, one of its packages or one component into a project to edit it there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from boltcutter.config.errors import ConfigError, hint
from boltcutter.project import LIBRARY, SOURCE, Project, library_packages
from boltcutter_scaffold.add import require_package, write

TARGET = re.compile(rf"\b({LIBRARY}(?:_[a-z]+)?)\.([\w.]+)\.\w+")


def main(project: Project, arguments: list[str]) -> None:
    """Copy the library, one of its packages or one component.

    Args:
        project: Project to copy into.
        arguments: A package (``core``, or a part such as ``launch``), a component such as ``callback.guard``, or
            nothing for the whole library.

    Raises:
        ConfigError: There is no such component, the copy exists already, or the project is the library itself.
    """
    if require_package(project) == LIBRARY:
        raise ConfigError(f"vendor: {project.root} is the repository of the library; edit it in src")
    if len(arguments) > 1:
        raise ConfigError("vendor: expected one component, as in `boltcutter vendor callback.guard`")
    packages = {_package_name(folder.name): folder for folder in library_packages()}
    chosen = [packages[name] for name in arguments or packages if name in packages]
    if chosen:
        copy_packages(project.root, chosen)
    else:
        copy_component(project, arguments[0], [*packages])


def copy_packages(root: Path, packages: list[Path]) -> None:
    """Copy packages of the library to ``src``, where they are used instead of the installed ones."""
    for package in packages:
        if (copy := root / "src" / package.name).exists():
            raise ConfigError(
                f"vendor: {copy} exists already; edit it there, or delete it to use the installed package"
            )
    for package in packages:
        copy = root / "src" / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        print(f"Copied to {copy}, which is now used instead of the installed package")
    print("Where a copy is deleted, the installed package is used again.")


def copy_component(project: Project, component: str, packages: list[str]) -> None:
    """Copy one source file into the project's package, with options in ``configs/`` that use the copy.

    Raises:
        ConfigError: No option uses such a component, or a file exists already.
    """
    package = require_package(project)
    copy = Path("src", package, *component.split(".")).with_suffix(".py")
    if (project.root / copy).exists():
        raise ConfigError(f"vendor {component}: {copy} exists already; edit it there, or delete it to copy it again")
    # An option of the project replaces a built-in one of the same name, so it comes last.
    folders = reversed(project.config_dirs)
    options = {file.relative_to(folder): file.read_text() for folder in folders for file in folder.rglob("*.yaml")}
    targets = {match.groups() for text in options.values() for match in TARGET.finditer(text)}
    known = {_component_name(*target): ".".join(target) for target in sorted(targets)}
    if component not in known:
        near = hint(component, [*known, *packages]) or "; try callback.guard"
        raise ConfigError(f"vendor {component}: no such package or component{near}")
    source = SOURCE / Path(*known[component].split(".")).with_suffix(".py")
    files = {copy: source.read_text()}
    module = re.compile(rf"\b{re.escape(known[component])}\b")
    for option, text in sorted(options.items()):
        if module.search(text):
            files[Path("configs", option)] = module.sub(f"{package}.{component}", text)
    write(project.root, files)
    for other in source.parent.glob(f"*{source.stem}*.sh"):  # a script that the component runs
        shutil.copy2(other, project.root / copy.with_name(other.name))


def _package_name(package: str) -> str:
    return package.removeprefix(LIBRARY).lstrip("_") or "core"


def _component_name(package: str, module: str) -> str:
    """``callback.guard`` of the core, ``launch.slurm`` of a part."""
    return module if package == LIBRARY else f"{_package_name(package)}.{module}"
