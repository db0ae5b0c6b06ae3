"""Query and control SLURM through its command-line tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from boltcutter.launch.job import State, Status, UnclearSubmissionError, UnreachableError, run, seconds

STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"), "pending"),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SUSPENDED", "SIGNALING", "STOPPED"), "running"
    ),
}
UNLIMITED = 10**9  # seconds
TIMEOUT = 120  # seconds for a command of SLURM
RETRY_DELAYS = (1, 3)  # seconds before a query is repeated
UNKNOWN_JOB = "Invalid job id"
NO_RESPONSE = re.compile(r"no response|unable to contact|timed out|connect failure|connection refused|zero bytes", re.I)
# Options whose SBATCH_ variables have other names; these variables take precedence over the script.
VARIABLE_NAMES = {"time": "TIMELIMIT", "array": "ARRAY_INX", "mem": "MEM_PER_NODE"}


class Partition(NamedTuple):
    """Nodes of one kind in a partition: their number, CPUs and GPUs of each, and the time limit."""

    nodes: int
    cpus: int
    gpus: int
    seconds: int


class QueuedJob(NamedTuple):
    """A job of the user."""

    number: str
    state: str  # such as PENDING
    name: str
    file: Path | None  # None for an interactive job


def partitions(names: str | None) -> list[Partition]:
    """Return the nodes of the named partitions, or of the default one; empty if SLURM cannot be queried."""
    if not shutil.which("sinfo"):
        return []
    result = _run("sinfo", "-h", "-o", "%P|%D|%c|%G|%l", *(["-p", names] if names else []))
    found = []
    for line in result.stdout.splitlines() if result.returncode == 0 else ():
        name, nodes, cpus, gres, limit = line.split("|")
        if names or name.endswith("*"):
            gpus = sum(int(count) for count in re.findall(r"\bgpu:(?:[^:,()]+:)?([0-9]+)", gres))
            found.append(
                Partition(
                    int(nodes), int(cpus.rstrip("+")), gpus, seconds(limit) if limit[0] in "0123456789" else UNLIMITED
                )
            )
    return found


def submit(file: Path, known: Sequence[str] = ()) -> str:
    """Submit a script with sbatch and return the job id.

    Args:
        file: Job script.
        known: Jobs of a chain that were submitted before with the same script, of which this one continues the last.

    Raises:
        ValueError: sbatch is not installed, or rejects the job.
        UnclearSubmissionError: SLURM does not respond.
    """
    if not shutil.which("sbatch"):
        raise ValueError("launch=slurm: sbatch is not installed on this host; use a login node, or try --dry-run")
    command = [f"--dependency=afterany:{known[-1]}", str(file), "next"] if known else [str(file)]
    result = _run("sbatch", "--parsable", *command, env=environment(file.read_text()))
    if result.returncode == 0:
        return result.stdout.strip().partition(";")[0]
    text = re.sub(r"sbatch: (error: )?", "", " ".join(result.stderr.split()))
    if not NO_RESPONSE.search(text):
        raise ValueError(f"launch=slurm: sbatch rejects the job: {text}")
    try:  # SLURM may have accepted the job although its response was lost
        numbers = [job.number for job in jobs() if job.file == file and job.number not in known]
    except UnreachableError:
        numbers = []
    if numbers:
        return numbers[-1]
    raise UnclearSubmissionError(
        f"launch=slurm: SLURM does not respond ({text}), so the job may or may not be queued: if "
        f"`squeue --me` lists it, cancel it; then remove {file.parent} and launch again"
    )


def jobs() -> list[QueuedJob]:
    """Return the pending and running jobs of the user in order of their ids; empty without SLURM.

    Raises:
        UnreachableError: SLURM does not respond.
    """
    if not shutil.which("squeue"):
        return []
    result = _query("squeue", "-h", "-u", str(os.getuid()), "-o", "%F|%T|%j|%o")
    if result.returncode and NO_RESPONSE.search(result.stderr):
        raise UnreachableError(f"SLURM does not respond ({' '.join(result.stderr.split())}); try again later")
    found = {}
    for line in result.stdout.splitlines():
        number, state, rest = line.split("|", 2)
        name, _, command = rest.rpartition("|")  # a name may contain a bar
        file = Path(command.removesuffix(" next"))
        found[number] = QueuedJob(number, state, name, file if file.is_absolute() else None)
    return [found[number] for number in sorted(found, key=int)]


def environment(text: str) -> dict[str, str]:
    """Return the environment for sbatch, without variables of another job or that override options of the script."""
    given = re.findall(r"^#SBATCH --([\w-]+)", text, re.M)
    overriding = {f"SBATCH_{VARIABLE_NAMES.get(option, option.replace('-', '_').upper())}" for option in given}
    return {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or (name not in overriding and not name.startswith(("SLURM_", "SRUN_")))
    }


def status(job_id: str) -> Status:
    """Return the status of a job; minutes after its end it is known only to the accounting, if enabled.

    Raises:
        UnreachableError: SLURM does not respond.
    """
    if not shutil.which("scontrol"):
        return Status("unknown", f"job {job_id}; SLURM is not installed on this host")
    result = _query("scontrol", "-o", "show", "job", job_id)
    # Pending tasks of an array share one line.
    facts = dict(re.findall(r"(\w+)=(\S*)", result.stdout.partition("\n")[0]))
    name = facts.get("JobState", "")
    if result.returncode or not name:
        if found := _accounting_status(job_id):
            return found
        if result.returncode and UNKNOWN_JOB not in result.stderr:
            text = re.sub(r"\w+ error: ", "", " ".join(result.stderr.split()))
            raise UnreachableError(f"job {job_id}: SLURM does not respond ({text}); try again later")
        return Status("unknown", f"job {job_id}, no longer known to SLURM")
    parts = [f"job {job_id}", name]
    if STATES.get(name) == "pending" and facts.get("Reason") not in ("None", None):
        parts.append(f"for {facts['Reason']}")
    elif facts.get("NodeList") not in (None, "(null)", ""):
        parts.append(f"on {facts['NodeList']}")
    if facts.get("Restarts", "0") != "0":
        parts.append(f"restarts {facts['Restarts']}")
    return Status(STATES.get(name, "ended"), ", ".join(parts))


def _accounting_status(job_id: str) -> Status | None:
    """Return the status of a job from sacct; None without accounting."""
    if not shutil.which("sacct"):
        return None
    result = _run("sacct", "-n", "-P", "-X", "-o", "State,NodeList", "-j", job_id)
    if result.returncode or not result.stdout.strip():
        return None
    name, _, nodes = result.stdout.splitlines()[-1].partition("|")
    name = name.split()[0]  # CANCELLED by 1000
    text = f"job {job_id}, {name}" + (f", on {nodes}" if nodes and "None" not in nodes else "")
    return Status(STATES.get(name, "ended"), text)


def cancel(*job_ids: str) -> None:
    """Cancel jobs with scancel.

    Raises:
        ValueError: scancel is not installed or fails.
    """
    if not shutil.which("scancel"):
        raise ValueError("cancel: scancel is not installed on this host; use a login node")
    result = _run("scancel", *job_ids)
    if result.returncode:
        raise ValueError(f"cancel: scancel fails: {' '.join(result.stderr.split())}")


def _query(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command, and retry while SLURM does not respond."""
    result = _run(*command)
    for pause in RETRY_DELAYS:
        if result.returncode == 0 or not NO_RESPONSE.search(result.stderr):
            break
        time.sleep(pause)
        result = _run(*command)
    return result


def _run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run(*command, env=env, timeout=TIMEOUT)
