"""A process in place of a training that starts in milliseconds, for tests of faults and of their timing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from slurm_cluster import cluster as cluster

from boltcutter.project import Project
from boltcutter.search import trial as module
from boltcutter.search.trial import Sampled, Trial

MakeTrial = Callable[[Sampled, Mapping[str, str]], Trial]
PROGRAM = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path

given = dict(argument.split("=", 1) for argument in sys.argv[4:])
folder = Path(given.get("folder") or given["resume"])
file = folder / "record.json"
record = json.loads(file.read_text()) if file.exists() else {"do": given["do"].split(), "step": 0, "attempts": []}
record["attempts"].append({"reason": "running", "seconds": 1.0})

def write():
    file.with_suffix(".new").write_text(json.dumps(record))
    file.with_suffix(".new").replace(file)

def end(reason, status):
    record["attempts"][-1]["reason"] = reason
    write()
    os._exit(status)

def interrupted(number, frame):
    end("preempted by SIGTERM", 143)

signal.signal(signal.SIGTERM, interrupted)
metrics = folder / "metrics.csv"
rows = metrics.read_text().splitlines() if metrics.exists() else ["step,loss"]
metrics.write_text("\\n".join(rows[: record["step"] + 1]) + "\\n")  # without those after the last step
descriptor = int(os.environ["BOLTCUTTER_TRIAL_FD"])
connection = socket.socket(fileno=descriptor)
lines = connection.makefile("r")
while record["do"]:
    action, *rest = record["do"]
    if not action[0].isdigit():
        record["do"] = rest
        write()
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "killed-while-it-writes":
        connection.sendall(b'{"step": ')
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "killed-but-for-a-child":
        child = subprocess.Popen(["sleep", "30"], pass_fds=[descriptor])
        (folder / "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if action == "wait":
        time.sleep(600)
    if action == "fail":
        print("error: optimizer.lr=9: too large", file=sys.stderr, flush=True)
        end("failed", 1)
    step = record["step"] + 1
    with metrics.open("a") as table:
        table.write(f"{step - 1},{action}\\n")
    report = {"step": step, "metrics": {"loss": float(action)}}
    connection.sendall(f"{json.dumps(report)}\\n".encode())
    answer = lines.readline().strip()
    if not answer:
        end("preempted by SIGTERM", 143)
    record.update(do=rest, step=step)
    write()
    if answer == "stop":
        break
end("completed", 0)
"""


@pytest.fixture
def make_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTrial:
    """Makes trials whose value ``do`` lists losses to report, and faults."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable} -S\n{PROGRAM}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(module, "PROCESS_POLL", 0.05)
    monkeypatch.setattr(module, "SAVE_TIMEOUT", 5.0)
    project = Project.find(Path(__file__))

    def make(sampled: Sampled, environment: Mapping[str, str]) -> Trial:
        folder = tmp_path / "search" / "trials" / f"{sampled.number:04d}"
        return Trial(sampled.number, folder, [f"do={sampled.values['do']}"], "loss", project, environment)

    return make
