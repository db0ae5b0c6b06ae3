"""What a part adds to Boltcutter, and how the core finds it.

A part is a package with a module ``part`` whose ``PART`` describes what it adds: commands, options of config groups,
callbacks of each run, a section of the report, and implementations that the core asks for by name (``Part.offers``).
Parts of the library lie beside the core, as ``boltcutter_<part>``. Those of other distributions declare an entry point:

    [project.entry-points."boltcutter.parts"]
    acme = "acme.part:PART"

Options of config groups lie in ``configs/<group>/`` of the package of a part.
Everything is given as the dotted path of a module and a name in it, ``acme.command:main``, which is imported when it is
used, so a part costs nothing before. ``docs/extending.md`` shows a whole part.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from boltcutter.config.errors import ConfigError, one_line
from boltcutter.project import LIBRARY, SOURCE, Project, declared_parts, install_command

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from torch import Tensor

    from boltcutter.config.compose import DictConfig

RUNS = ("run", "with", "resume", "reproduce")  # keys of overrides whose values are runs


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
        resolves_runs: Whether the values of ``run=`` and the like are replaced by local folders before the call.
        by_flag: Names of offers, by the flag with which they are called in place of the function, with all arguments.
    """

    target: str
    usage: str
    flags: str | None = None
    begin: str | None = None
    config: str | None = None
    is_plain: bool = False
    resolves_runs: bool = True
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
        names: Modules of the classes and functions that are public names of ``boltcutter``.
        components: Modules whose classes the record of a run may name although this user has not signed it.
        callbacks: ``module:function`` that takes the configuration of a training and returns callbacks for it.
        references: ``module:function`` that takes the project and the overrides, and replaces names of runs.
        ranks: ``module:function`` that sets torchrun's variables, such as ``RANK``, if this part's launcher started
            the process; raises ConfigError.
        section: A section of the report.
        offers: ``module:name`` of the implementations that the core, or another part, asks for by name.
    """

    name: str
    commands: Mapping[str, Command] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    components: tuple[str, ...] = ()
    callbacks: str | None = None
    references: str | None = None
    ranks: str | None = None
    section: Section | None = None
    offers: Mapping[str, str] = field(default_factory=dict)


class NegativeResult(SystemExit):
    """Ends a command with exit status 1 as its result is negative, such as two runs that differ.

    Args:
        result: What the command returns otherwise.
    """

    def __init__(self, result: Any) -> None:
        super().__init__(1)
        self.result = result


class Predictor(Protocol):
    """A model that predicts without its task, such as an export; offered as ``predictor``.

    The offer is called with the folder of a run and the name or path of an export.
    """

    context_length: int
    supports_cache: bool
    statistics: dict[str, Any]

    def __call__(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor:
        """Return the logits, shape (N, T, V), of tokens, shape (N, T), that follow those in the cache."""

    def predict_batches(self, batches: Any) -> Iterator[Any]:
        """Yield the outputs for batches of a loader, as ``predict_step`` would return them."""


class PartError(ConfigError):
    """A part cannot be imported, or two parts add the same thing."""


@cache
def parts() -> tuple[Part, ...]:
    """All parts: those beside the core, and those that installed distributions declare.

    Raises:
        PartError: A part cannot be imported, or two add a command, name or implementation of the same name.
    """
    beside = {f"{file.parent.name}.part:PART": file.parent.name for file in SOURCE.glob(f"{LIBRARY}_*/part.py")}
    found = tuple(_import(name, path) for path, name in sorted({**beside, **declared_parts()}.items()))
    for what in ("commands", "names", "offers"):
        owners: dict[str, str] = {}
        for part in found:
            for name in getattr(part, what):
                if name in owners:
                    raise PartError(f"{name}: one of the {what} of both {owners[name]} and {part.name}; uninstall one")
                owners[name] = part.name
    return found


def _import(name: str, path: str) -> Part:
    try:
        found = load(path)
    except Exception as error:  # an import can raise anything
        raise PartError(
            f"{name}: {path} cannot be imported ({one_line(error)}); uninstall it, or correct it"
        ) from error
    if not isinstance(found, Part):
        raise PartError(f"{name}: {path} is no boltcutter.extend.Part; correct the entry point")
    return found


def load(path: str) -> Any:
    """Import a module, given as ``package.module``, or a name in it, as ``package.module:name``."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@cache
def added(what: str) -> dict[str, Any]:
    """What all parts add to one of ``commands``, ``names`` and ``offers``, by name."""
    return {name: entry for part in parts() for name, entry in getattr(part, what).items()}


def require(offer: str, setting: str) -> Any:
    """The implementation that a part offers.

    Args:
        offer: Its name.
        setting: What needs it, such as ``task.compile=xla``, for the message.

    Raises:
        ConfigError: No part offers it.
    """
    return load(_path(offer, setting))


def find(offer: str) -> Any:
    """The implementation that a part offers; None if no part does."""
    return load(added("offers")[offer]) if offer in added("offers") else None


def call(offer: str, *arguments: Any) -> Any:
    """The result of the implementation that a part offers; None if no part does."""
    implementation = find(offer)
    return implementation(*arguments) if implementation else None


def target(offer: str, setting: str) -> str:
    """The ``_target_`` of an implementation that a part offers; arguments and errors are those of ``require``."""
    return _path(offer, setting).replace(":", ".")


def _path(offer: str, setting: str) -> str:
    if offer not in added("offers"):
        raise ConfigError(f"{setting}: no installed part offers {offer}; {install_command(LIBRARY)}")
    return str(added("offers")[offer])


def groups() -> tuple[str, ...]:
    """Config groups that commands of parts instantiate."""
    return tuple(group for part in parts() for group in part.groups)


def callbacks(cfg: DictConfig) -> list[Callback]:
    """The callbacks that parts add to the training of a configuration."""
    return [callback for part in parts() if part.callbacks for callback in load(part.callbacks)(cfg)]


def sections() -> list[Section]:
    """The sections that parts add to the report of a run."""
    return [part.section for part in parts() if part.section]


def rank_readers() -> list[Callable[[], None]]:
    """Functions that set torchrun's variables for processes that other launchers started."""
    return [load(part.ranks) for part in parts() if part.ranks]


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
            found = load(part.references)(project, found)
    return found
