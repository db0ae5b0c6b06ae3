"""Copy the library, one of its packages or one component into a project to edit it there."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from boltcutter.config.errors import ConfigError, hint
from boltcutter.project import BUILTIN_CONFIGS, LIBRARY, SOURCE, Project, library_packages
from boltcutter_scaffold.add import require_package, write

TARGET = re.compile(rf"\b({LIBRARY}(?:_[a-z]+)?)\.([\w.]+)\.\w+")


def main(project: Project, arguments: list[str]) -> None:
    """Copy the library, one of its packages or one component, or remove that copy.

    Args:
        project: Project to copy into.
        arguments: A package (``core``, or a part such as ``launch``), a component such as ``callback.guard``, or
            nothing for the whole library; with ``--undo`` to remove its copy.

    Raises:
        ConfigError: There is no such component or copy, the copy exists already, or the project is the library itself.
    """
    if require_package(project) == LIBRARY:
        raise ConfigError(f"vendor: {project.root} is the repository of the library; edit it in src")
    names = [argument for argument in arguments if argument != "--undo"]
    if flags := [name for name in names if name.startswith("-")]:
        raise ConfigError(f"{flags[0]}: no such flag{hint(flags[0], ['--undo'])} (there is: --undo)")
    if len(names) > 1:
        raise ConfigError(f"vendor {' '.join(names)}: more than one component; give one after the other")
    packages = {_package_name(folder.name): folder for folder in library_packages()}
    undo, chosen = "--undo" in arguments, packages if not names else {n: packages[n] for n in names if n in packages}
    if chosen:
        remove_packages(project.root, names) if undo else copy_packages(project.root, list(chosen.values()), names)
    elif undo:
        remove_component(project, names[0])
    else:
        copy_component(project, names[0], [*packages])


def copy_packages(root: Path, packages: list[Path], names: list[str]) -> None:
    """Copy packages of the library to ``src``, where they are used instead of the installed ones."""
    for package in packages:
        if (copy := root / "src" / package.name).exists():
            undo = " ".join(["boltcutter vendor", *names, "--undo"])
            raise ConfigError(f"vendor: {copy} exists already; remove it by `{undo}`")
    for package in packages:
        copy = root / "src" / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        print(f"Copied to {copy}, which is now used instead of the installed package")
    print(f"`{' '.join(['boltcutter vendor', *names, '--undo'])}` removes the copy.")


def remove_packages(root: Path, names: list[str]) -> None:
    """Move copies of packages to a temporary folder, so that the installed ones are used again."""
    found = [file.parent for file in (root / "src").glob(f"{LIBRARY}*/__init__.py")]
    copies = [folder for folder in found if not names or _package_name(folder.name) in names]
    if not copies:
        raise ConfigError(f"vendor --undo: {root / 'src' / LIBRARY}* does not exist; there is nothing to undo")
    folder = tempfile.mkdtemp()
    for copy in copies:
        shutil.move(copy, folder)
    print(f"The installed library is used again. The copy with its changes is in {folder}.")


def copy_component(project: Project, component: str, packages: list[str]) -> None:
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


def _package_name(package: str) -> str:
    return package.removeprefix(LIBRARY).lstrip("_") or "core"


def _component_name(package: str, module: str) -> str:
    """``callback.guard`` of the core, ``launch.slurm`` of a part."""
    return module if package == LIBRARY else f"{_package_name(package)}.{module}"


def _source(component: str) -> str:
    """The dotted path of a component's module in the library; empty if there is none."""
    paths = [f"{LIBRARY}.{component}", f"{LIBRARY}_{component}"]
    return next((path for path in paths if (SOURCE / path.replace(".", "/")).with_suffix(".py").is_file()), "")
