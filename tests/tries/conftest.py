"""A process in place of a training that ends in milliseconds, whose metric depends on seed and learning rate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boltcutter.environment import stop_signals
from boltcutter.extend import NegativeResult
from boltcutter.project import Project
from boltcutter.search import trial
from boltcutter.tries import command

# Tags of a run are instructions: fail:<seed>, nan:<seed>, kill:<seed>; those of the change begin with "change-".
PROGRAM = """
import json, os, random, signal, sys, time
from pathlib import Path

given = dict(argument.lstrip("+").split("=", 1) for argument in sys.argv[4:])
if "resume" in given:
    folder = Path(given["resume"])
    given = json.loads((folder / "given.json").read_text())
folder = Path(given["folder"])
record = {"attempts": []}
if (folder / "record.json").exists():
    record = json.loads((folder / "record.json").read_text())
(folder / "given.json").write_text(json.dumps(given))
seed, lr = int(given["seed"]), float(given.get("optimizer.lr", "0"))
if lr < 0:
    print("error: optimizer.lr=-1: not positive; try 0.1", file=sys.stderr)
    sys.exit(2)
with open(folder.parent / "started.txt", "a") as file:
    file.write(folder.name + "\\n")
record.update(config={"seed": seed, "optimizer": {"lr": lr}}, data=f"data of seed {seed}")
record["attempts"].append({"reason": "running", "seconds": 1.0})

def write():
    (folder / "record.new").write_text(json.dumps(record))
    (folder / "record.new").replace(folder / "record.json")

def end(reason, status):
    record["attempts"][-1]["reason"] = reason
    write()
    os._exit(status)

write()
signal.signal(signal.SIGTERM, lambda *_: end("preempted by SIGTERM", 143))
tags = given.get("tags", "[]").strip("[]").split(",")
if f"kill:{seed}" in tags and len(record["attempts"]) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if f"hang:{seed}" in tags and len(record["attempts"]) == 1:
    time.sleep(600)
if f"fail:{seed}" in tags:
    end("ValueError: too large", 1)
value = 0.8 + random.Random(seed).gauss(0, 0.02) + lr + random.Random(f"{seed} {lr}").gauss(0, 0.002)
record["metrics"] = {"val/accuracy": None if f"nan:{seed}" in tags else value, "val/loss": 1 - value}
end("completed", 0)
"""
Try = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project of default options, whose trainings are the program."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable} -S\n{PROGRAM}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(trial, "PROCESS_POLL", 0.05)
    (root := tmp_path / "project").mkdir()
    (root / "pyproject.toml").write_text('[tool.boltcutter]\npackage = "mine"\n')
    (root / "configs").mkdir()
    return Project.find(root)


@pytest.fixture
def ask(project: Project, tmp_path: Path) -> Try:
    """Ask, and return the exit status and the result."""

    def ask(*arguments: str) -> tuple[int, dict[str, Any]]:
        defaults = {"metric": "val/accuracy", "effect": "0.01", "runs": str(tmp_path / "runs")}
        given = {argument.partition("=")[0] for argument in arguments}
        more = [f"{key}={value}" for key, value in defaults.items() if key not in given]
        try:
            return 0, command.try_command(project, [*arguments, *more])
        except NegativeResult as end:
            return int(end.code or 0), end.result
        finally:
            stop_signals.restore_handlers()

    return ask
