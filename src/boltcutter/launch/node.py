"""Start a launched run on a machine that does not share the disk of the one that launched it.

``python -m boltcutter.launch.node <folder or URL of the run>`` runs on each node. It unpacks the run's code and becomes
the training process, which reads the variables of the platform, resumes the run and receives the signals.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from boltcutter import run_files
from boltcutter.checkpoint.storage import error_text, is_url, resolve_filesystem
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.launch import secret_reference
from boltcutter.launch.bundle import CODE, RECORD, unpack
from boltcutter.project import LIBRARY, VARIABLE
from boltcutter.run import lineage, trust

MAX_STARTS = 100  # of one job; platforms do not count evictions and preemptions


def start_training(arguments: Sequence[str] | None = None) -> NoReturn:
    """Unpack the code and replace this process by the training."""
    parser = argparse.ArgumentParser("python -m boltcutter.launch.node", description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="folder or URL of the run")
    parser.add_argument(
        "--bundle", help=f"file or URL of the packed code; by default {run_files.BUNDLE} in the folder of the run"
    )
    parser.add_argument(
        "--secret", action="append", default=[], metavar="VARIABLE=REFERENCE", help="set a variable to a secret"
    )
    parser.add_argument("--index", metavar="VARIABLE", help="variable with the index of this run, which ends the URL")
    parser.add_argument("--search", action="store_true", help="be the worker of this index in a search")
    parser.add_argument("--unpack", action="store_true", help="only unpack the code into the working directory")
    given, overrides = parser.parse_known_args(arguments)
    try:
        root = fetch_code(given.bundle or f"{given.run.rstrip('/')}/{run_files.BUNDLE}")
        if given.unpack:
            copy_code(root / CODE)
            sys.exit()
        if given.index and given.search:
            overrides.append(f"worker={read_index(given.index)}")
        elif given.index:
            given.run += read_index(given.index)
        array_record = root / Path(given.run).name
        record = array_record if array_record.is_dir() else root
        if not is_url(given.run):
            create_run(record, Path(given.run))
        check_library(record)
        check_starts(record, given.run)
        secret_reference.export(given.secret)
        project, arguments = root / CODE, [f"resume={given.run}", *overrides]
        command = program(project, "search" if given.search else "train")
        start(project, [*command, *arguments])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)  # nothing that another start could change
    except ValueError as error:
        sys.exit(f"error: {one_line(error)}")


def read_index(variable: str) -> str:
    """Return the index of this run in its array from the variable in which the platform gives it."""
    if not (index := os.environ.get(variable, "")).isdecimal():
        raise ConfigError(f"{variable}={index} is not the index of a run; start this as a job of an array")
    return index


def fetch_code(bundle: str) -> Path:
    """Download a bundle, and unpack it into a new temporary folder."""
    root = Path(tempfile.mkdtemp(prefix="boltcutter-job-"))
    file = root / run_files.BUNDLE
    try:
        store, place = resolve_filesystem(bundle)
        store.get_file(place, str(file))
    except Exception as error:  # each storage raises its own exceptions
        raise ValueError(
            f"{bundle}: cannot be read ({error_text(error)}); check that this node may read the storage"
        ) from error
    unpack(file, root)
    file.unlink()
    return root


def copy_code(code: Path) -> None:
    """Copy the code to the working directory."""
    try:
        shutil.copytree(code, Path.cwd(), symlinks=True, dirs_exist_ok=True)
    except OSError as error:  # of shutil, with the error of each file
        raise ConfigError(
            f"{Path.cwd()}: user {os.getuid()} cannot write the code there ({one_line(error, 200)}); "
            "use an image whose user is root"
        ) from error


def create_run(root: Path, folder: Path) -> None:
    """Copy the record of a new run from an unpacked bundle to its folder; several nodes may do so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    workers = (file.parent.name for file in sorted(root.glob(f"*/{RECORD[0]}")))  # of a search
    runs = [Path(name) for name in workers if name != CODE]
    for name in [str(place / name) for place in (*runs, Path()) for name in (*RECORD[1:], RECORD[0])]:
        if (root / name).is_file() and not (folder / name).exists():  # the record last: with it, the run exists
            (target := folder / name).parent.joinpath("logs").mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
            shutil.copyfile(root / name, draft)
            try:
                os.link(draft, target)  # unlike a rename, does not replace the record of a run that has begun
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                draft.replace(target)
            draft.unlink(missing_ok=True)


def check_library(root: Path) -> None:
    """Raise ConfigError if the library here has another version than the one with which the run was launched."""
    record = root / RECORD[0]
    was = trust.read_json(record).get("library", {}).get("version") if record.is_file() else None
    here = lineage.library_state(root).get("version")
    if was and was != here and not (root / CODE / "src" / LIBRARY).is_dir():
        raise ConfigError(
            f"{LIBRARY} {here} is installed on this node, but the run was launched with {was}; build the image again, "
            f"or pip install {LIBRARY}=={was}"
        )


def check_starts(root: Path, place: str) -> None:
    """Raise ConfigError if the platform has started the job again and again, as after an eviction for lack of disk."""
    try:
        store, path = resolve_filesystem(f"{place.rstrip('/')}/{RECORD[0]}")
        attempts = [
            each["attempts"] for each in (trust.parse_json(store.cat_file(path)), trust.read_json(root / RECORD[0]))
        ]
    except (OSError, KeyError, ValueError):
        return  # the first start, or one that the training explains
    if (starts := len(attempts[0]) - len(attempts[1])) >= MAX_STARTS:
        raise ConfigError(
            f"resume={place}: this job was started {starts} times; see why its attempts ended, then launch it again"
        )


def program(project: Path, name: str) -> list[str]:
    """Return the arguments of the Python interpreter that start a command, train or search, in a project."""
    script = Path("scripts", f"{name}.py")
    return [str(script)] if (project / script).is_file() else ["-m", LIBRARY, name]


def start(project: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a Python interpreter with these arguments, in a project."""
    os.chdir(project)
    path = os.pathsep.join(filter(None, [str(project / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, VARIABLE: str(project)}
    if os.path.expanduser("~") == "~":  # a user that the image does not know, for whom Matplotlib cannot be imported
        environment["HOME"] = tempfile.gettempdir()
    os.execve(sys.executable, [sys.executable, *arguments], environment)  # noqa: S606 - without a shell


if __name__ == "__main__":
    start_training()
