"""Give hostile run folders to commands, with an audit hook: ``python hostile_commands.py <scratch> <cases> <folders>``.

Prints, as JSON, one entry for each command and each folder: the exit status, the standard error and what was forbidden.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from audit import Audit

from boltcutter.cli import commands
from boltcutter.environment import user_key

PACKAGES = {*packages_distributions(), "boltcutter", "scripts"}


def make(folder: Path, hostile: Callable[[Path, dict[str, Any]], None]) -> Path:
    """A folder of a run, of a launched job and of a search, which nobody has signed."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "checkpoints").mkdir(parents=True)
    config = {"name": "a", "runs": "runs", "checkpoints": "${folder}/checkpoints", "folder": str(folder)}
    record: dict[str, Any] = {"id": "a", "name": "a", "attempts": [], "config": config}
    record["launch"] = {"id": "1 on host since 1", "settings": {"_target_": "boltcutter.launch.local.Local"}}
    hostile(folder, record)
    if not os.path.lexists(folder / "record.json"):
        (folder / "record.json").write_text(json.dumps(record))
    search = {"overrides": ["+callback.x._target_=os.mkdir"], "settings": record["config"], "metrics": [], "fixed": []}
    shutil.rmtree(place := folder.with_name("search"), ignore_errors=True)
    place.mkdir()
    if hostile in (fifo, deep, endless, nothing):
        os.link(folder / "record.json", place / "search.json", follow_symlinks=False)
    else:
        (place / "search.json").write_text(json.dumps(search))
    return folder


def add(record: dict[str, Any], **values: Any) -> None:
    """Add values to the configuration and to the launch settings."""
    record["config"] |= values
    record["launch"]["settings"] |= values


def target(folder: Path, record: dict[str, Any]) -> None:
    """A class of another package."""
    add(record, data={"_target_": "os.mkdir", "path": str(folder.parents[2] / "executed")})
    record["launch"]["settings"] = record["config"]["data"]


def unchecked(folder: Path, record: dict[str, Any]) -> None:
    """An allowed class with arguments that are not checked."""
    add(record, data={"_target_": "torch.nn.Linear", "_check_": False, "in_features": "x"})


def resolver(folder: Path, record: dict[str, Any]) -> None:
    """A reference that creates a call."""
    add(record, name="${oc.create:{_target_: os.system, command: touch executed}}")


def secret(folder: Path, record: dict[str, Any]) -> None:
    """A secret variable, sent to somebody's bucket."""
    add(record, checkpoints="s3://bucket/${oc.env:AWS_SECRET_ACCESS_KEY}")


def address(folder: Path, record: dict[str, Any]) -> None:
    """An address that would be contacted."""
    add(record, checkpoints="http://127.0.0.1:9/a")


def composed(folder: Path, record: dict[str, Any]) -> None:
    """An address in pieces."""
    add(record, checkpoints="${name}//127.0.0.1:9/a", name="http:")


def chained(folder: Path, record: dict[str, Any]) -> None:
    """A chain of protocols."""
    add(record, checkpoints="simplecache::file:///etc")


def linked(folder: Path, record: dict[str, Any]) -> None:
    """A log that is a link to another file."""
    (folder / "logs").mkdir()
    (folder / "logs" / "rank0.log").symlink_to(folder.parents[2] / "executed")
    record["launch"]["settings"] = {"_target_": "os.mkdir", "path": str(folder.parents[2] / "executed")}


def fifo(folder: Path, record: dict[str, Any]) -> None:
    """A record that would block."""
    os.mkfifo(folder / "record.json")


def deep(folder: Path, record: dict[str, Any]) -> None:
    """A record that is nested too deeply."""
    (folder / "record.json").write_text("[" * 200_000)


def endless(folder: Path, record: dict[str, Any]) -> None:
    """A record without an end."""
    (folder / "record.json").symlink_to("/dev/zero")


def damaged(folder: Path, record: dict[str, Any]) -> None:
    """Entries of other types."""
    for key in ("config", "launch", "attempts"):
        record[key] = 1


def damaged_inside(folder: Path, record: dict[str, Any]) -> None:
    """Entries of other types, further inside."""
    record["launch"], record["attempts"] = {"settings": 1}, [1]
    record["config"] |= {
        "callback": 1,
        "trainer": [],
        "data": "${",
        "task": {"_target_": 3},
        "choices": 1,
        "logger": "x",
    }


def odd(folder: Path, record: dict[str, Any]) -> None:
    """Entries of other types that have no reference."""
    damaged_inside(folder, record)
    record["config"] |= {"data": 10**400, "name": "a\nb\x1b]0;title\x07", "checkpoints": None}
    record["launch"]["settings"] = {"_target_": ["os.system"], "array": {}}


def nothing(folder: Path, record: dict[str, Any]) -> None:
    """No record: modules are imported before events are recorded."""
    (folder / "record.json").symlink_to("nothing")


FOLDERS = (target, unchecked, resolver, secret, address, composed, chained, linked, fifo, deep, endless, damaged)
FOLDERS += (damaged_inside, odd)


def main(scratch: Path, cases: dict[str, list[list[str]]], names: Collection[str]) -> None:
    """Run every command with every folder that is named."""
    os.environ["AWS_SECRET_ACCESS_KEY"] = "a secret value"
    user_key.KEY_FILE = scratch / "key"
    project = commands.Project.find(__file__)
    os.chdir(scratch)  # not the checkout, to whose `runs` other tests may write meanwhile
    trial = [sys.executable, "*/scripts/train.py", "--print"]  # by which find-batch-size checks a configuration
    audit, found = Audit(scratch, PACKAGES, ["squeue"], ["git"], trial), []
    for hostile in (nothing, *(folder for folder in FOLDERS if folder.__name__ in names)):
        for name, lines in cases.items():
            for line in lines:
                folder = make(scratch / "runs" / "a" / "b", hostile)
                given = [w.format(run=folder, search=folder.with_name("search"), runs=scratch / "runs") for w in line]
                out, err, status = io.StringIO(), io.StringIO(), 0
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    audit.found, audit.is_active = [], hostile is not nothing
                    try:
                        commands.run(name, given, str(project.root))
                    except SystemExit as error:
                        status = error.code  # type: ignore[assignment]
                    except BaseException as error:
                        print(f"{type(error).__name__}: {error}", file=err)
                        status = 99
                    audit.is_active = False
                what = f"{hostile.__name__}: {name} {' '.join(line)}"
                found.append([what, status, err.getvalue(), audit.found, (scratch / "executed").exists()])
    sys.__stdout__.write(json.dumps(found))  # type: ignore[union-attr]


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3].split())
