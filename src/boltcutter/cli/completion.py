"""Completion of arguments in bash and zsh."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from boltcutter.cli.own_arguments import own_arguments
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError, one_line, printable
from boltcutter.extend import RUNS
from boltcutter.project import Project

# Candidates are inserted as they are: in the name of a run or option of somebody else, a shell would execute the rest.
PLAIN = re.compile(r"[\w.,:/@%+=~\[\]-]*")
COMPLETION = Path(__file__).with_name("completion.sh")


def print_candidates(project: Project, usage: str, arguments: Sequence[str], flags: Mapping[str, str]) -> None:
    """Print the candidates of ``complete`` with their descriptions, for the shell code."""
    current, *given = arguments or [""]
    found = complete(project, usage, current, *given, flags=flags)
    shown = ((argument, one_line(printable(text))) for argument, text in found.items() if PLAIN.fullmatch(argument))
    print("".join(f"{argument}\t{text}\n" for argument, text in shown), end="")


def completion(scripts: Path) -> str:
    """Shell code that completes arguments of ``boltcutter`` and of the scripts in this folder."""
    files = [file for file in sorted(scripts.glob("*.py")) if "from boltcutter." in file.read_text()]
    entries = " ".join(shlex.quote(f"{sys.executable}\t{file}") for file in files)
    given = f"_boltcutter_python={shlex.quote(sys.executable)}\n_boltcutter_scripts+=({entries})\n"
    return given + COMPLETION.read_text().rstrip()


def complete(
    project: Project, usage: str, current: str = "", *given: str, flags: Mapping[str, str] = {}
) -> dict[str, str]:
    """Complete ``current``: flags, groups, options, and keys of the configuration that ``given`` composes.

    Keys are completed one level at a time. Values but those of runs are left to the shell, as they may be file names.

    Returns:
        Candidates, with descriptions of flags and options.
    """
    if current.startswith("-"):
        return {flag: text for flag, text in flags.items() if flag.startswith(current)}
    key, equals, start = current.lstrip("+~").partition("=")
    sign = current[: len(current) - len(current.lstrip("+~"))]
    known = project.groups()
    if equals:
        opening, last = re.fullmatch(r"(\[(?:[^,\]]*,)*)?(.*)", start, re.S).groups(default="")  # type: ignore[union-attr]
        taken = opening.strip("[").split(",")
        options = project.describe_options(key) | {"null": ""} if key in known else {}
        if key in RUNS:
            from boltcutter.analysis.references import candidates  # takes time

            options = candidates(project)
        options = {name: text for name, text in options.items() if name not in taken and name.startswith(last)}
        ends = ("]", ",") if opening else ("",)  # two candidates, so that shells add no space
        return {f"{sign}{key}={opening}{name}{end}": text for name, text in options.items() for end in ends}
    everything = [f"{name}=" for name in (*known, *sorted(own_arguments(usage)), *_keys(project, given))]
    found = [f"{sign}{argument}" for argument in everything if f"{sign}{argument}".startswith(current)]
    depth = current.count(".")
    return dict.fromkeys((w if w.count(".") <= depth else ".".join(w.split(".")[: depth + 1]) + "." for w in found), "")


def _keys(project: Project, given: Sequence[str]) -> list[str]:
    """Every key that can be set, if the arguments so far can be composed."""
    for arguments in (given, ()):
        with suppress(ConfigError):
            cfg = compose(project, [argument for argument in arguments if not argument.startswith("-")])
            found = [
                path for path in cfg.keys_below() if "_target_" not in path and path.partition(".")[0] != "choices"
            ]
            return [path for path in found if not any(other.startswith(f"{path}.") for other in found)]
    return []
