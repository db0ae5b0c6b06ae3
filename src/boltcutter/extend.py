"""What other distributions add to Boltcutter, and how it is found.

A part is a package with a module ``part`` whose ``PART`` describes what it adds: commands, options of config groups,
callbacks of each run, and a section of the report. Another distribution declares it by an entry point:

    [project.entry-points."boltcutter.parts"]
    acme = "acme.part:PART"

Options of config groups lie in ``configs/<group>/`` of the package of a part.
Everything is given as the dotted path of a module and a name in it, ``acme.command:main``, which is imported when it is
used, so a part costs nothing before. ``docs/extending.md`` shows a whole part.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from boltcutter.config.errors import ConfigError, one_line
from boltcutter.project import Project, declared_parts

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from boltcutter.config.settings import Settings

RUNS = ("run", "with", "resume", "reproduce")  # keys of overrides whose values are runs
GROUPS = ("export", "launch", "search")  # that commands of the library instantiate


@dataclass(frozen=True)
class Command:
    """A command; all that it needs is imported only when it is run.

    Args:
        target: ``module:function`` that takes the project and the list of overrides.
        usage: First part of ``--help``; its first line is ``<summary>: boltcutter <command> <arguments>``.
        flags: ``module:name`` of the flags that the function handles itself, a mapping to their help texts.
        begin: ``module:function`` without arguments, called before heavy imports.
        config: ``module:function`` that takes the project and the overrides, and returns the configuration that
            ``--print`` shows; by default that of training or evaluation.
        is_plain: Whether the function parses all arguments itself, as it takes no configuration.
        runs: Keys of overrides whose values may be names of runs, such as ``latest``, in place of which it gets their
            folders or URLs.
        is_local: Whether it gets local folders for URLs, to which the files are copied.
        by_flag: Other functions, by the flag with which they are called in place of the function, with all arguments.
    """

    target: str
    usage: str
    flags: str | None = None
    begin: str | None = None
    config: str | None = None
    is_plain: bool = False
    runs: tuple[str, ...] = RUNS
    is_local: bool = True
    by_flag: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What the command does, in a few words."""
        return self.usage.partition(": boltcutter")[0]


@dataclass(frozen=True)
class Section:
    """A section of the report of a run.

    Args:
        title: Heading, which is also its entry in the navigation.
        file: File below the run folder; the section is shown if it exists.
        render: ``module:function`` that takes the file and returns HTML, in which all text is escaped.
    """

    title: str
    file: str
    render: str


@dataclass(frozen=True)
class Part:
    """What a package adds.

    Args:
        name: Name of the package.
        commands: Commands by name.
        groups: Config groups that commands of this part instantiate. Other groups are built only where the
            configuration of training refers to them.
        callbacks: ``module:function`` that takes the ``Settings`` of a training and returns callbacks for it.
        references: ``module:function`` that takes the project and the overrides, and replaces names of runs.
        ranks: ``module:function`` that sets torchrun's variables, such as ``RANK``, if this part's launcher started
            the process; raises ConfigError.
        section: A section of the report.
    """

    name: str
    commands: Mapping[str, Command] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    callbacks: str | None = None
    references: str | None = None
    ranks: str | None = None
    section: Section | None = None


class NegativeResult(SystemExit):
    """Ends a command with exit status 1 as its result is negative, such as two runs that differ.

    Args:
        result: What the command returns otherwise.
        status: Another exit status.
    """

    def __init__(self, result: Any, status: int = 1) -> None:
        super().__init__(status)
        self.result = result


class PartError(ConfigError):
    """A part cannot be imported, or two parts add the same thing."""


@cache
def parts() -> tuple[Part, ...]:
    """The parts that installed distributions declare.

    Raises:
        PartError: A part cannot be imported, or two add a command of the same name.
    """
    found = tuple(_import(name, path) for path, name in sorted(declared_parts().items()))
    owners: dict[str, str] = {}
    for part in found:
        for name in part.commands:
            if name in owners:
                raise PartError(f"{name}: a command of both {owners[name]} and {part.name}; uninstall one")
            owners[name] = part.name
    return found


def _import(name: str, path: str) -> Part:
    try:
        found = load_object(path)
    except Exception as error:  # an import can raise anything
        raise PartError(
            f"{name}: {path} cannot be imported ({one_line(error)}); uninstall it, or correct it"
        ) from error
    if not isinstance(found, Part):
        raise PartError(f"{name}: {path} is no boltcutter.extend.Part; correct the entry point")
    return found


def load_object(path: str) -> Any:
    """Import a module, given as ``package.module``, or a name in it, as ``package.module:name``."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@cache
def commands() -> dict[str, Command]:
    """The commands that parts add, by name."""
    return {name: command for part in parts() for name, command in part.commands.items()}


def groups() -> tuple[str, ...]:
    """Config groups that commands instantiate."""
    return (*GROUPS, *(group for part in parts() for group in part.groups))


def callbacks(cfg: Settings) -> list[Callback]:
    """The callbacks that parts add to the training of a configuration."""
    return [callback for part in parts() if part.callbacks for callback in load_object(part.callbacks)(cfg)]


def sections() -> list[Section]:
    """The sections that parts add to the report of a run."""
    return [part.section for part in parts() if part.section]


def rank_readers() -> list[Callable[[], None]]:
    """Functions that set torchrun's variables for processes that other launchers started."""
    return [load_object(part.ranks) for part in parts() if part.ranks]


def resolve_references(project: Project, overrides: Sequence[str]) -> list[str]:
    """Replace the names of runs in overrides, such as ``run=best:val/loss``, by their folders or URLs.

    Raises:
        ConfigError: A name refers to nothing.
    """
    found = list(overrides)
    if not any(override.partition("=")[0] in RUNS for override in found):
        return found
    for part in parts():
        if part.references:
            found = load_object(part.references)(project, found)
    return found
