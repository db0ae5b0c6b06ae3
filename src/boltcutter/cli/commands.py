"""The commands of ``boltcutter <command>`` and of the scripts in a project's ``scripts/``."""

from __future__ import annotations

import locale
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from boltcutter import extend
from boltcutter.cli import main as cli
from boltcutter.cli.table import commands
from boltcutter.cli.translate import MULTIRUN, translate
from boltcutter.config import foreign
from boltcutter.config.compose import refuse_duplicates
from boltcutter.config.errors import ConfigError, hint, printable
from boltcutter.config.redaction import hide_variables
from boltcutter.environment.output import Terminal, ignore_lost_readers
from boltcutter.extend import load_object
from boltcutter.project import Project, ProjectError, restart

BEGIN_TRAINING = ("train", "search", "launch", "find-batch-size", "try")
EARLIER = ("resume=", "reproduce=", "--")  # of a run, which says what is trained; flags only show something


def script(name: str, file: str) -> None:
    """Run a command from a script, whose ``file`` is in the folder of a project."""
    run(name, sys.argv[1:], file, program=f"python {shlex.quote(sys.argv[0])}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``boltcutter <command>`` in the project of the working directory."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    with cli.one_line_errors():
        known = commands()
    if name in ("--help", "-h"):
        print("Usage: boltcutter <command> [--help] ...\n")
        print("\n".join(f"  {name:18}{command.summary}" for name, command in known.items()))
        return
    if name == "--version":
        print(describe_version())
        return
    if name == "--complete":  # called by the shell completion, see cli
        found = {name: command for name, command in known.items() if name.startswith("".join(rest[:1]))}
        print("".join(f"{name}\t{command.summary}\n" for name, command in found.items()), end="")
        return
    run(name, rest)


def describe_version() -> str:
    """The version, and of a repository that is used in place its commit, which may be a later one."""
    import boltcutter
    from boltcutter.run.lineage import library_state  # which imports more than all that `--help` needs

    state = library_state(Path(os.devnull))  # of no project
    commit = state.get("commit") if "path" in state else None
    changed = " with uncommitted changes" if state.get("dirty") else ""
    return f"boltcutter {boltcutter.__version__}" + (f" ({state['path']}: commit {commit}{changed})" if commit else "")


def run(name: str, arguments: Sequence[str], start: str | None = None, *, program: str | None = None) -> None:
    """Run a command.

    Args:
        name: Name of the command.
        arguments: Those after the name.
        start: A file or folder of the project; by default the working directory.
        program: How the command was called, for ``--help``; by default ``boltcutter <name>``.
    """
    if os.environ.get("PYTHONUTF8") != "1" and locale.getpreferredencoding(False).upper() != "UTF-8":
        restart(PYTHONUTF8="1")  # as files of projects and runs are in UTF-8, whatever the locale
    Terminal.hide = hide_variables  # also before a run has a log, as where data are read
    ignore_lost_readers()
    try:
        if "--json" in arguments and "--complete" not in arguments:
            from boltcutter.cli.answer import answer  # used only here

            with suppress(ProjectError):  # which is reported below
                Project.find(start).use_vendored_library()  # restarts the process, so before its output is redirected
            answer(name, arguments, lambda others: _run(name, others, start, program), start)
        else:
            _run(name, list(arguments), start, program)
    except KeyboardInterrupt:  # of a command that saves nothing
        sys.exit(128 + signal.SIGINT)


def _check_project(project: Project, name: str, arguments: Sequence[str]) -> None:
    """Check that a training begins in a project: elsewhere it would be one of the built-in options, whatever is meant.

    Raises:
        ConfigError: The working directory is in none.
    """
    begins = name in BEGIN_TRAINING and all("=" in argument for argument in arguments)
    if begins and not project.is_declared and not any(argument.startswith(EARLIER) for argument in arguments):
        raise ConfigError(
            f"{project.root}: in no project, which has configs/ or [tool.boltcutter] in pyproject.toml; change to one, "
            "or create one: boltcutter new <name>"
        )


def _run(name: str, arguments: list[str], start: str | None, program: str | None) -> Any:
    """Run a command, and return its result."""
    with cli.one_line_errors():
        known = commands()
        if name not in known:
            ours = foreign.COMMANDS.get(name)
            if "=" in name or name in MULTIRUN:  # arguments of a training
                ours = printable(shlex.join(["boltcutter", "train", name, *arguments]))
            near = f"; use {ours}" if ours else hint(name, known)
            raise ConfigError(f"{name}: no such command{near} (there are: {', '.join(known)})", kind="unknown_command")
        command, project = known[name], Project.find(start)
    project.use_vendored_library()
    flags = {argument.partition("=")[0] for argument in arguments}
    flag = next((flag for flag in command.by_flag if flag in flags and "--complete" not in flags), "")
    if (flag or command.is_plain) and {"--help", "-h"} & flags:
        print(command.usage)
        return None
    with cli.one_line_errors():
        if flag:
            project.activate()
            return extend.load_object(command.by_flag[flag])(project, arguments)
        if command.is_plain:
            return load_object(command.target)(project, arguments)
        started = name
        name, arguments = translate(project, name, arguments)
        own = {*cli.FLAGS, "-h", *(load_object(flags_of) if (flags_of := known[name].flags) else ())}
        is_known = all(argument in own for argument in arguments if argument.startswith("-"))
        if name != "sync" and is_known:  # which takes several runs; other flags are refused first
            refuse_duplicates(arguments)
    if name != started:  # a multirun: as if the search had been started
        command, program = commands()[name], None
        sys.argv[1:] = [*([] if sys.argv[0].endswith(f"{started}.py") else [name]), *arguments]
    usage = command.usage.replace(f"boltcutter {name}", program) if program else command.usage
    with cli.one_line_errors():
        _check_project(project, name, arguments)
    return cli.dispatch_command(project, command, usage, arguments)
