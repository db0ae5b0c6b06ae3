"""Where the project is: its root folder, its package and its configuration folders.

A project is a folder whose ``pyproject.toml`` has a table ``[tool.boltcutter]``. Its options in ``configs/`` take
precedence over the built-in options that come with the library.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Set
from configparser import ConfigParser
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from boltcutter import files, run_files

LIBRARY = __name__.partition(".")[0]
SOURCE = Path(__file__).resolve().parents[1]  # the folder of the library's packages
BUILTIN_CONFIGS = Path(__file__).parent / "configs"
VARIABLE = "BOLTCUTTER_PROJECT"  # a folder of the project, for processes that start elsewhere
PRIVATE = "BOLTCUTTER_PRIVATE"  # names of the variables in .env, which is not in the code of a job or a trial
TABLE = "[tool.boltcutter]"
PARTS = "boltcutter.parts"  # the entry points of parts, see ``boltcutter.extend``
EXECUTED = (
    "configs",
    "src",
    "scripts",
    ".env",
)  # files of a project that decide what is executed, besides its pyproject.toml


class ProjectError(Exception):
    """A ``pyproject.toml`` that cannot be used."""


@dataclass(frozen=True)
class Project:
    """The folder that a researcher works in.

    Args:
        root: Folder with ``pyproject.toml``.
        package: Python package of the project's own code, in ``src`` or in the root; None if it has none.
        config_dirs: Folders in which options are searched, in this order.
        resolvers: Module of the project that registers resolvers of OmegaConf, such as ``${eval:…}``; None if there is
            none. It is imported before a configuration is composed.
        is_shared: Whether the folder is none of a project, and others may write to it, as ``/tmp``: nothing in it is
            used.
    """

    root: Path
    package: str | None = None
    config_dirs: tuple[Path, ...] = (BUILTIN_CONFIGS,)
    resolvers: str | None = None
    is_shared: bool = False

    @classmethod
    def find(cls, start: Path | str | None = None) -> Project:
        """Search upwards for a ``pyproject.toml`` with a table ``[tool.boltcutter]``.

        Without one, ``start`` itself is the project, which then has no package.

        Args:
            start: A file or folder of the project; by default the environment variable ``BOLTCUTTER_PROJECT``, or else
                the working directory.

        Raises:
            ProjectError: The table cannot be read, the working directory has been removed, or the project, or a part
                of it, belongs to another user, whose code and settings would be executed.
        """
        try:
            place = Path(start or os.environ.get(VARIABLE) or Path.cwd()).absolute()
        except FileNotFoundError as error:
            raise ProjectError("the working directory has been removed; change to one that exists") from error
        is_named = bool(start or os.environ.get(VARIABLE))
        owners = set(files.trusted_owners())
        if is_named and place.exists():
            owners |= {place.stat().st_uid, place.lstat().st_uid}
        place = place.parent if place.is_file() else place
        if ".." in place.parts:  # of a script that was started from a folder beside it
            place = place.resolve()
        for folder in (place, *place.parents):
            settings = _read_settings(folder / "pyproject.toml")
            if settings is not None:
                package = settings.get("package")
                # Where anybody may put them.
                parts = (*EXECUTED, package) if folder.stat().st_mode & stat.S_IWOTH else ()
                _check_owner(folder, owners, folder, *(folder / name for name in ("pyproject.toml", *parts) if name))
                return cls.at(folder, package, settings.get("resolvers"))
        _check_owner(place, owners, place)
        if is_named or not place.exists() or files.is_ours(place.stat()):
            return cls.at(place)
        has_no_safe_path = sys.version_info < (3, 11)  # so that python -m imports modules of the working directory
        if has_no_safe_path or os.path.lexists(place / "configs"):
            raise ProjectError(
                f"{place}: others may write to it, and its {'modules' if has_no_safe_path else 'configs'} would be "
                f"executed; change to a folder of yours, or set {VARIABLE}={place} if you trust it"
            )
        return cls(place, config_dirs=(BUILTIN_CONFIGS, *_part_configs()), is_shared=True)

    @classmethod
    def at(cls, root: Path, package: str | None = None, resolvers: str | None = None) -> Project:
        """The project with this root folder; its ``configs/``, if any, comes before the built-in options."""
        if os.path.lexists(root / run_files.RECORD):  # of anybody, as may be its code and its .env
            raise ProjectError(f"{root}: a run folder is no project; change to the folder of your project")
        own, others = root / "configs", _part_configs()
        if not own.is_dir():
            return cls(root, package, (BUILTIN_CONFIGS, *others), resolvers)
        is_builtin = own.resolve() == BUILTIN_CONFIGS.resolve()  # in the library's own repository
        return cls(root, package, (own, *others) if is_builtin else (own, BUILTIN_CONFIGS, *others), resolvers)

    def activate(self) -> None:
        """Make the project's own modules importable, and have its package treated as the user's own code."""
        if self.is_shared:
            os.environ["PYTHONSAFEPATH"] = "1"  # processes of this one import nothing of their working directory
            return
        source, root = str(self.root / "src"), str(self.root)
        if source not in sys.path and os.path.isdir(source):
            sys.path.insert(1, source)  # before another installation of the same package
        if root not in sys.path:
            sys.path.append(root)
        self._read_variables()
        _own_folders.update((self.root, self.root / "src"))
        if self.package:
            _own_packages.add(self.package)

    def _read_variables(self) -> None:
        """Set the environment variables of the project's ``.env`` that are not set yet."""
        private_variables.update(filter(None, os.environ.get(PRIVATE, "").split(",")))
        if (file := self.root / ".env").is_file():
            from dotenv import dotenv_values  # not imported without such a file

            values = {name: value for name, value in dotenv_values(file).items() if value is not None}
            private_variables.update(values)
            os.environ[PRIVATE] = ",".join(sorted(private_variables))
            os.environ.update({name: value for name, value in values.items() if name not in os.environ})

    def unused_vendored_library(self) -> Path | None:
        """The project's own copy of the library in ``src``, if it has one that this process should use but does not.

        A library that is found by ``PYTHONPATH``, such as the snapshot of a launched run, is used as it is.
        """
        if self.is_shared:
            return None
        copy = self.root / "src"
        given = {Path(folder).resolve() for folder in _python_path()}
        if not any(copy.glob(f"{LIBRARY}*/__init__.py")) or {SOURCE, copy.resolve()} & given:
            return None
        return None if copy.resolve() == SOURCE else copy

    def use_vendored_library(self) -> None:
        """Restart this process with the project's own copy of the library, if it has one in ``src``."""
        if copy := self.unused_vendored_library():
            restart(PYTHONPATH=os.pathsep.join([str(copy), *_python_path()]))

    @property
    def is_declared(self) -> bool:
        """Whether the folder is a project by its files, or was named as one, rather than any working directory."""
        has_files = (self.root / "configs").is_dir() or _read_settings(self.root / "pyproject.toml") is not None
        return has_files or VARIABLE in os.environ

    @property
    def train_command(self) -> list[str]:
        """Arguments of a Python interpreter that trains in this project; elsewhere it needs ``environment``."""
        script = self.root / "scripts" / "train.py"
        return [str(script)] if script.is_file() and not self.is_shared else ["-m", LIBRARY, "train"]

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process finds this project from any working directory."""
        return {} if self.is_shared else {VARIABLE: str(self.root)}

    def has_group(self, name: str) -> bool:
        """Whether there are options for a group of this name."""
        return name.isidentifier() and any((folder / name).is_dir() for folder in self.config_dirs)

    def groups(self) -> dict[str, dict[str, Path]]:
        """The options of each group and their files; the project's own replaces a built-in option of the same name."""
        found: dict[str, dict[str, Path]] = {}
        for folder in reversed(self.config_dirs):
            for group in (path for path in folder.iterdir() if path.is_dir()):
                found.setdefault(group.name, {}).update({file.stem: file for file in group.glob("*.yaml")})
        return {name: dict(sorted(options.items())) for name, options in sorted(found.items())}

    def option_texts(self) -> Iterator[str]:
        """The texts of all files of options; none of a file that cannot be read, or is not in UTF-8."""
        for file in (file for folder in self.config_dirs for file in folder.rglob("*.yaml")):
            with suppress(UnicodeDecodeError):
                yield _read(file).decode()

    def origin(self, file: Path) -> str:
        """``project``, ``built-in`` for an option of the library, or the package of the part that brings it."""
        folder = next(folder for folder in self.config_dirs if file.is_relative_to(folder))
        if folder.resolve() == BUILTIN_CONFIGS.resolve():
            return "built-in"
        return "project" if folder == self.root / "configs" else folder.parent.name

    def describe_options(self, group: str) -> dict[str, str]:
        """What each option of a group is, and which ones are the project's own."""
        origins = {"built-in": "", "project": " (of the project)"}
        return {
            name: summary(file) + origins.get(origin := self.origin(file), f" (of {origin})")
            for name, file in self.groups().get(group, {}).items()
        }

    def help_lines(self, group: str) -> list[str]:
        """A group and its options, one on each line."""
        return [f"{group}=", *(f"  {name:18}{text}" for name, text in self.describe_options(group).items())]

    def list_options(self, group: str) -> str:
        """The options of a group in parentheses, by their origin."""
        found: dict[str, list[str]] = {}
        for name, file in self.groups().get(group, {}).items():
            found.setdefault(self.origin(file), []).append(name)
        if len(found) > 1:
            order = sorted(found, key=lambda origin: (origin != "project", origin != "built-in", origin))
            return f" ({'; '.join(origin + ': ' + ', '.join(found[origin]) for origin in order)})"
        return "".join(f" (there are: {', '.join(names)})" for names in found.values())


def _check_owner(root: Path, owners: Set[int], *places: Path) -> None:
    """Check that a project which was found, not named, belongs to this user or root, as git does for a repository."""
    for place in (place for place in places if place.exists()):
        if not {place.stat().st_uid, place.lstat().st_uid} <= owners:
            raise ProjectError(
                f"{place} belongs to another user ({files.owner_name(place.resolve())}), whose code would be executed; "
                f"change to a folder of yours, or set {VARIABLE}={root} if you trust it"
            )


def restart(**variables: str) -> None:
    """Restart this process with these environment variables."""
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})  # noqa: S606


def summary(file: Path) -> str:
    """The comment in the first line of an option."""
    first = _read(file).decode(errors="replace").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def command(name: str, *arguments: str) -> str:
    """How to call a command: by a script of the project if this process was started by one, else by ``boltcutter``.

    Args:
        name: Name of the command.
        arguments: Its arguments, which are quoted for a shell.
    """
    program = Path(sys.argv[0])
    script = program.with_name(f"{name}.py")
    if program.suffix == ".py" and program.name != "__main__.py" and script.is_file():
        return shlex.join(["python", str(script), *arguments])
    return shlex.join(["boltcutter", name, *arguments])


SAME_NAME = """
accelerate adlfs aim albumentations bitsandbytes captum datasets deepspeed diffusers einops evaluate gcsfs google-auth
gymnasium h5py horovod jax joblib kornia kubernetes librosa lightning matplotlib mlflow monai nibabel nltk numba onnx
onnxruntime openai optuna pandas peft polars pyarrow pydicom ray rich s3fs safetensors scipy seaborn sentencepiece
soundfile spacy submitit tensorboard tensorboardX tiktoken timm tokenizers torchaudio torchmetrics torchvision tqdm
trackio transformer_engine transformers wandb xgboost
"""
# Distributions by the module that they install. A module of another name may be anybody's on the index.
DISTRIBUTIONS = {name: name for name in SAME_NAME.split()} | {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "hydra": "hydra-core",
    "pytorch_forecasting": "pytorch-forecasting",
    "pytorch_lightning": "pytorch-lightning",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "torch_geometric": "torch-geometric",
    "yaml": "PyYAML",
}


def install_command(module: str) -> str:
    """How to install a missing module: as an extra of the library where one has it, or by the name of its distribution.

    No name is given that is not known to be that of the distribution: a wrong one on the index may be an attack.
    """
    from importlib import metadata  # slow import

    if module == LIBRARY:
        return f"pip install {LIBRARY}"
    package = DISTRIBUTIONS.get(module)
    wanted = (package or module).lower().replace("-", "_")
    with suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires(LIBRARY) or ():
            name, extra = re.match(r"([\w.-]+)(?:.*\bextra == .(\w+))?", requirement).groups()  # type: ignore[union-attr]
            if name.lower().replace("-", "_") == wanted:
                return f"pip install '{LIBRARY}[{extra}]'" if extra else f"pip install {name}"
    # Of a distribution that is installed in part, such as one of several that share a namespace.
    package = package or next(iter(metadata.packages_distributions().get(module, ())), None)
    return f"pip install {package}" if package else f"install the distribution that has {module}"


private_variables = set[str]()  # those of the project's .env, whose values are never recorded
_own_packages = set[str]()
_own_folders = set[Path]()


def is_own_package(name: str) -> bool:
    """Whether a top-level package is the library's or the active project's, rather than somebody else's."""
    if name in _own_packages or name == LIBRARY:
        return True
    try:
        found = find_spec(name)
    except (ImportError, ValueError):  # ValueError: __main__
        return False
    places = [*(found.submodule_search_locations or ()), found.origin or ""] if found else []
    return any(Path(place).parent in _own_folders for place in places)


@cache
def declared_parts() -> dict[str, str]:
    """The entry points of other distributions' parts, ``module:name``, and the distribution that declares each.

    The files are read directly, as the import of ``importlib.metadata`` takes longer than all that ``--help`` needs.
    """
    found: dict[str, str] = {}
    for file in (file for folder in sys.path if folder for file in Path(folder).glob("*-info/entry_points.txt")):
        if f"[{PARTS}]".encode() in (content := _read(file)):
            entries = ConfigParser(delimiters=["="])
            entries.read_string(content.decode())
            for path in entries[PARTS].values():
                found.setdefault(path, file.parent.stem.partition("-")[0])
    return {path: name for path, name in found.items() if name != LIBRARY}  # that of an older installation


def _part_configs() -> tuple[Path, ...]:
    """The folders of options of other distributions' parts: ``configs`` in their packages."""
    packages = {path.partition(":")[0].partition(".")[0] for path in declared_parts()}
    specs = [find_spec(name) for name in sorted(packages)]
    folders = [Path(place, "configs") for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return tuple(folder for folder in folders if folder.is_dir())


def display_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _python_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _read(file: Path) -> bytes:
    """The content of a file; nothing if it cannot be read, or is none, as a FIFO in a folder above of somebody else."""
    try:
        with files.open_file(file, follows=True) as opened:
            return opened.read()
    except (OSError, ValueError):
        return b""


def _read_settings(file: Path) -> dict[str, Any] | None:
    """The table of this library in a ``pyproject.toml``; None where there is none."""
    content = _read(file)
    if b"boltcutter" not in content:
        return None
    try:
        settings = tomllib.loads(content.decode()).get("tool", {}).get(LIBRARY)
    except ValueError as error:
        raise ProjectError(f"{file}: not valid TOML: {error}; correct it") from error
    if settings is None:
        return None
    names = {"package": LIBRARY, "resolvers": LIBRARY} | settings if isinstance(settings, dict) else {"": None}
    parts = [str(names.get("package")), *str(names.get("resolvers")).split(".")]
    if names.keys() != {"package", "resolvers"} or not all(part.isidentifier() for part in parts):
        raise ProjectError(
            f'{file}: {TABLE} takes the name of a package only, as in package = "my_project", and of a module, as in '
            f'resolvers = "my_project.resolvers"; correct {settings!r}'
        )
    return dict(settings)
