"""What all commands share: overrides, help, shell completion and one-line errors."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

from boltcutter.cli.own_arguments import suggest_own_arguments
from boltcutter.config.errors import ConfigError, hint, quoted
from boltcutter.config.redaction import hide_variables
from boltcutter.config.settings import Settings
from boltcutter.config.values import as_yaml, split_overrides
from boltcutter.environment import cluster_variables, mpi_environment, threads
from boltcutter.environment import platform_facts as platform
from boltcutter.environment.process import distributed_rank, is_rank_zero, launched_rank, retain_freed_memory
from boltcutter.environment.variables import check_variables
from boltcutter.extend import RUNS, Command, PartError, load_object, rank_readers, resolve_references
from boltcutter.project import LIBRARY, Project, ProjectError, install_command, is_own_package
from boltcutter.run import trust
from boltcutter.run.remote.store import run_store
from boltcutter.run.store import UploadError

FLAGS = {
    "--help": "show this help",
    "--print": "print the resolved configuration",
    "--check": "validate the configuration",
    "--describe": "list keys below the next argument, with type, value and documentation, and the options of a group",
    "--json": "print the result, or the mistakes with their corrections, as one JSON object",
    "--completion": 'enable completion in bash and zsh: eval "$(boltcutter train --completion)"',
}
# A file or folder cannot be opened because of what is in its place, such as a folder in place of a file.
OBSTACLES = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENXIO, errno.ELOOP, errno.EACCES, errno.EROFS}
OBSTACLES |= {errno.EPERM}  # a link or a file with several names, by ``files.open_within``


def dispatch_command(
    project: Project, command: Command, usage: str | None = None, arguments: Sequence[str] | None = None
) -> Any:
    """Handle the shared flags, or else run a command and return its result.

    Args:
        project: Project whose configuration is used.
        command: Its function is imported only if needed, as it may import torch.
        usage: First part of ``--help``; by default that of the command.
        arguments: Command-line arguments; by default those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--complete" not in arguments:
        arguments = [expand_home(argument) for argument in arguments]
    project.activate()
    with one_line_errors(), suggest_own_arguments((project, command, arguments)):
        arguments = trust.apply_overrides(arguments)
        own = load_object(command.flags) if command.flags else {}
        flags = [argument for argument in arguments if argument.startswith("-")]
        if set(flags) <= own.keys():
            check_variables()
            if command.begin:
                load_object(command.begin)()
            prepare_process()
            arguments = local_runs(project, arguments, command.runs, is_local=command.is_local)
            return _import(command.target)(project, arguments)
        with _faster_imports():
            known = {**FLAGS, **own, **dict.fromkeys(command.by_flag, "see above")}
            _answer(project, command, usage or command.usage, flags, arguments, known)
    return None


def local_runs(
    project: Project, overrides: Sequence[str], keys: Sequence[str] = RUNS, *, is_local: bool = True
) -> list[str]:
    """Replace names of runs in overrides of some keys by their places, and these by local folders with their files.

    Raises:
        ConfigError: There is no such run.
    """
    found = list(overrides)
    named = [index for index, override in enumerate(found) if override.partition("=")[0] in keys]
    if named:
        from boltcutter.analysis.references import resolve  # takes time

        given = [found[index] for index in named]
        places = [override for override in found if override.startswith("runs=")]  # where names are searched
        resolved = resolve_references(project, resolve(project, [*given, *places]))
        for index, override in zip(named, resolved, strict=False):
            found[index] = override
    return run_store().localize(found) if is_local else found


@contextmanager
def _faster_imports() -> Iterator[None]:
    """Collect no garbage, which would search the growing heap again and again: a quarter of the time of imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # modules stay until the process ends: libraries such as Triton report what is left then as leaked
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)
        gc.enable()


def _import(target: str) -> Any:
    """Import a function of a command.

    Raises:
        ConfigError: It needs a package that is not installed.
    """
    try:
        with _faster_imports():
            return load_object(target)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if is_own_package(package):
            raise
        raise ConfigError(
            f"{package}: not installed, but needed by this command; {install_command(package)}", kind="not_installed"
        ) from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print expected errors without a traceback; exit with 2 for a user's mistake, with 1 for a failure."""
    try:
        yield
    except Exception as error:
        is_mistake = isinstance(error, ConfigError | ProjectError) or getattr(error, "errno", 0) == errno.ENAMETOOLONG
        # An error with a remedy needs no traceback; any other is a bug.
        is_expected = is_mistake or _is_obstructed(error) or getattr(error, "hide_traceback", False)
        if os.environ.get("BOLTCUTTER_DEBUG") == "1" or not is_expected:
            raise
        print(*(_mistake_lines(error) if is_mistake else _failure_lines(error)), sep="", end="", file=sys.stderr)
        sys.exit(2 if is_mistake else 1)


def _mistake_lines(error: Exception) -> Iterator[str]:
    """The lines of a user's mistake; a later rank lets rank 0 report it first, on whose exit launchers end others."""
    lost = isinstance(error.__cause__, platform.PlatformError)  # then no rank may know that it is rank 0
    waits = not (is_rank_zero() or lost)
    time.sleep(5 if waits else 0)
    place = f" on rank {launched_rank() or 'above 0'}" if waits else ""
    for line in _shown(error):
        yield f"error{place}: {line}\n"


def _failure_lines(error: Exception) -> Iterator[str]:
    """The line of a failure; none if it has been reported."""
    if not getattr(error, "is_reported", False):
        rank = distributed_rank()
        place = "" if rank is None else f" on rank {rank}"
        denied = isinstance(error, PermissionError) and error.errno == errno.EACCES
        remedy = f"; {'change its permissions' if denied else 'move away what is there'}, or choose another place"
        remedy = remedy if _is_obstructed(error) else ""
        yield f"error{place}: {' '.join(_shown(error))}{remedy}\n"


def _is_obstructed(error: Exception) -> bool:
    """Whether something is in the place of a file or folder that the library, not the project's code, opens."""
    return isinstance(error, OSError) and error.errno in OBSTACLES and not _is_of_project(error)


def _is_of_project(error: BaseException) -> bool:
    """Whether a function of the project, such as its data module, has led to the error."""
    names = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    return any(is_own_package(name) and name != LIBRARY for name in names)


def _shown(error: Exception) -> Sequence[str]:
    """A line for each mistake; of local folders of runs at a URL it shows the URL, unless it is about these folders."""
    lines = [*map(hide_variables, error.args if isinstance(error, ConfigError) else [quoted(str(error))])]
    return lines if isinstance(error, PartError | UploadError) else list(map(run_store().show, lines))


def expand_home(argument: str) -> str:
    """Expand ``~/`` in a value, as shells do only at the beginning of a word."""
    key, equals, value = argument.partition("=")
    return f"{key}={os.path.expanduser(value)}" if equals and value.startswith("~/") else argument


def prepare_process() -> None:
    """Set rank, threads and memory allocation; a ConfigError if variables of the launcher contradict one another."""
    read_ranks()
    threads.prepare()
    retain_freed_memory()


def read_ranks() -> None:
    """Read rank and world size from the environment of the launcher, if there is one.

    Raises:
        ConfigError: The variables of the launcher contradict one another.
    """
    try:
        cluster_variables.read_ranks()
        mpi_environment.export_torchrun_env()
        for read in rank_readers():
            read()
    except platform.PlatformError as error:
        raise ConfigError(str(error)) from error


def _answer(
    project: Project, command: Command, usage: str, flags: list[str], arguments: list[str], known: Mapping[str, str]
) -> None:
    flag = "--help" if flags[0] == "-h" else flags[0]
    at = arguments.index(flags[0])
    rest = arguments[:at] + arguments[at + 1 :]
    if flag == "--complete":
        from boltcutter.cli.completion import print_candidates

        print_candidates(project, usage, arguments[at + 1 :], known)
        return
    for other in flags:
        if other not in (*known, "-h"):
            raise ConfigError(
                f"{other}: no such flag{hint(other, known)} (there are: {', '.join(known)})", kind="unknown_flag"
            )
    if len(flags) > 1:
        raise ConfigError(f"{flags[1]}: cannot be combined with {flags[0]}; give one of them", kind="conflict")
    if flag == "--help":
        print(_help(project, usage, known))
    elif flag == "--print":
        check_variables()
        read_ranks()
        print(_resolved(project, command, rest), end="")
    elif flag == "--check":
        check_variables()
        read_ranks()
        with _faster_imports():
            from boltcutter.planning.check import check_command  # imports torch
        check_command(project, local_runs(project, rest))
    elif flag == "--describe":
        from boltcutter.assembly.overrides import read_overrides
        from boltcutter.config.describe import print_keys

        at_key = at < len(rest) and "=" not in rest[at] and not rest[at].startswith("~")
        prefix = rest.pop(at) if at_key else ""
        print_keys(project, _resolvable(_with_folder(read_overrides(project, local_runs(project, rest)))), prefix)
    else:
        from boltcutter.cli.completion import completion

        print(completion(Path(os.devnull) if project.is_shared else project.root.resolve() / "scripts"))


def _resolved(project: Project, command: Command, arguments: list[str]) -> str:
    """The configuration as YAML, with references resolved."""
    from boltcutter.assembly.overrides import load_evaluation_config, read_overrides

    local = local_runs(project, arguments)
    special, rest = split_overrides(local, "run", "ckpt", "split", "input", "output")
    if command.config:
        cfg = _import(command.config)(project, local)
    else:
        cfg = load_evaluation_config(project, special, rest)[0] if "run" in special else read_overrides(project, local)
    return run_store().show(as_yaml(_resolvable(_with_folder(cfg)).redacted))


def _resolvable(cfg: Settings) -> Settings:
    """The configuration with what only the class of the data has, which is imported where a reference needs it."""
    try:
        cfg.resolved  # noqa: B018  # which raises what a reference lacks
    except ConfigError:
        from boltcutter.assembly.assemble import complete_data  # imports torch

        return complete_data(cfg)
    return cfg


def _with_folder(cfg: Settings) -> Settings:
    """A configuration with the folder that its run would have, whose id is created when the run starts."""
    return cfg if cfg.folder else cfg.changed({"folder": "${runs}/${name}/<id>"})


def _help(project: Project, usage: str, flags: Mapping[str, str]) -> str:
    lines = [usage.strip(), "", "Flags:", *(f"  {flag:14}{text}" for flag, text in flags.items()), ""]
    for group in project.groups():
        lines += project.help_lines(group)
    return "\n".join(lines)
