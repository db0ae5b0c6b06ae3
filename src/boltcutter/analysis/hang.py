"""``boltcutter why run=<folder> --hang``: where the ranks of a run are at this moment."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from boltcutter.analysis.references import resolve
from boltcutter.config.errors import ConfigError, printable
from boltcutter.config.redaction import hide_variables
from boltcutter.config.values import split_overrides
from boltcutter.environment import hang
from boltcutter.environment.lease import read_holder
from boltcutter.project import Project

FLAG = "--hang"


def print_hang(project: Project, overrides: list[str]) -> list[dict[str, Any]]:
    """Print where each rank of a run on this machine is, which waits for others, and which these wait for.

    The run goes on as before. The stacks of all its threads are appended to its ``logs``.

    Returns:
        For each rank its step, the place in the user's code, the operation in which it waits, and its stack.

    Raises:
        ConfigError: No run is given, or none of its processes is on this machine.
    """
    named = resolve(project, [override for override in overrides if override != FLAG])
    given, others = split_overrides(named, "run")
    if others:
        raise ConfigError(f"{others[0]}: not an argument of why {FLAG}; remove it")
    if not given.get("run"):
        raise ConfigError(f"run: missing; give run=<folder>, such as run=latest, with {FLAG}")
    folder = Path(given["run"])
    if not folder.is_dir():
        raise ConfigError(f"run={folder}: no such folder; give the folder of a run")
    processes = hang.find(os.path.realpath(folder))
    if not processes:
        raise ConfigError(f"run={folder}: {_absence(folder)}")
    hang.ask(processes)
    found = hang.describe(processes)
    hang.log(processes, f"asked by boltcutter why {FLAG}")
    print(*(hide_variables(printable(line)) for line in hang.lines(found)), sep="\n")
    for process in processes:
        process.close()
    return found


def _absence(folder: Path) -> str:
    """Where the run is instead."""
    holder, here = read_holder(folder), socket.gethostname()
    if holder is None:
        return "no process trains in it; give the folder of a run that has not ended"
    if holder.host != here:
        return f"none of its processes is on {here}; ask on {holder.host}, where process {holder.pid} trains in it"
    if holder.is_alive() is False:
        return f"{holder} has ended; continue the run with resume={folder}"
    return f"{holder} cannot be asked, as it runs in another container or on another system than Linux"
