"""What SLURM is asked and told, by its own commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from boltcutter.launch.job import State, Status

STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"), "waiting"),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SUSPENDED", "SIGNALING", "STOPPED"), "running"
    ),
}
UNLIMITED = 10**9  # seconds
SECONDS = 120  # that SLURM may take to answer
# By these names sbatch reads options from the environment, where they beat those of the file.
NAMED_OTHERWISE = {"time": "TIMELIMIT", "array": "ARRAY_INX", "mem": "MEM_PER_NODE"}


@dataclass(frozen=True)
class Partition:
    """Nodes of one kind.

    Args:
        nodes: How many.
        cpus: Of each.
        gpus: Of each.
        seconds: A job may take.
    """

    nodes: int
    cpus: int
    gpus: int
    seconds: int


def partitions(names: str | None) -> list[Partition]:
    """The nodes of the partitions, or of the default one; nothing where SLURM cannot be asked."""
    if not shutil.which("sinfo"):
        return []
    told = _call("sinfo", "-h", "-o", "%P|%D|%c|%G|%l", *(["-p", names] if names else []))
    found = []
    for line in told.stdout.splitlines() if told.returncode == 0 else ():
        name, nodes, cpus, gres, limit = line.split("|")
        if names or name.endswith("*"):
            gpus = sum(int(count) for count in re.findall(r"\bgpu:(?:[^:,()]+:)?(\d+)", gres))
            found.append(Partition(int(nodes), int(cpus.rstrip("+")), gpus, _seconds(limit)))
    return found


def _seconds(limit: str) -> int:
    if not limit[0].isdigit():
        return UNLIMITED
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(reversed(parts), (1, 60, 3600), strict=False))


def submit(file: Path, *options: str) -> str:
    """Call sbatch; the job's number.

    Args:
        file: Of the job.
        options: For sbatch, then words for the job's script.

    Raises:
        ValueError: There is no SLURM here, or it refuses.
    """
    if not shutil.which("sbatch"):
        raise ValueError("launch=slurm: there is no sbatch here; go to a login node, or see the file with --dry-run")
    flags = [option for option in options if option.startswith("-")]
    words = [option for option in options if not option.startswith("-")]
    told = _call("sbatch", "--parsable", *flags, str(file), *words, env=environment(file.read_text()))
    if told.returncode:
        text = re.sub(r"sbatch: (error: )?", "", " ".join(told.stderr.split()))
        raise ValueError(f"launch=slurm: sbatch refuses: {text}")
    return told.stdout.strip().partition(";")[0]


def environment(text: str) -> dict[str, str]:
    """The user's own, without what another job has left in it, or what would beat an option of the job's file."""
    given = re.findall(r"^#SBATCH --([\w-]+)", text, re.M)
    beaten = {f"SBATCH_{NAMED_OTHERWISE.get(option, option.replace('-', '_').upper())}" for option in given}
    return {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or (name not in beaten and not name.startswith(("SLURM_", "SRUN_")))
    }


def status(job_id: str) -> Status:
    """How a job stands; SLURM forgets one some minutes after its end."""
    if not shutil.which("scontrol"):
        return Status("unknown", f"job {job_id}; there is no SLURM here")
    told = _call("scontrol", "-o", "show", "job", job_id)
    # Of an array, tasks that still wait share one line.
    facts = dict(re.findall(r"(\w+)=(\S*)", told.stdout.partition("\n")[0]))
    name = facts.get("JobState", "")
    if told.returncode or not name:
        return Status("unknown", f"job {job_id}, which SLURM does not know any more")
    state = STATES.get(name, "ended")
    parts = [f"job {job_id}", name]
    if state == "waiting" and facts.get("Reason") not in ("None", None):
        parts.append(f"for {facts['Reason']}")
    elif facts.get("NodeList") not in (None, "(null)", ""):
        parts.append(f"on {facts['NodeList']}")
    if facts.get("Restarts", "0") != "0":
        parts.append(f"restarts {facts['Restarts']}")
    return Status(state, ", ".join(parts))


def cancel(*job_ids: str) -> None:
    """Call scancel.

    Raises:
        ValueError: It refuses.
    """
    if not shutil.which("scancel"):
        raise ValueError("cancel: there is no scancel here; go to a login node")
    told = _call("scancel", *job_ids)
    if told.returncode:
        raise ValueError(f"cancel: scancel refuses: {' '.join(told.stderr.split())}")


def _call(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        told = f"no answer in {SECONDS} seconds; see `scontrol ping`"
        return subprocess.CompletedProcess(command, 1, "", told)
