"""What SLURM is asked and told, by its own commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from boltcutter.launch.job import State, Status, UnclearSubmissionError, UnreachableError

STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"), "waiting"),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SUSPENDED", "SIGNALING", "STOPPED"), "running"
    ),
}
UNLIMITED = 10**9  # seconds
SECONDS = 120  # that SLURM may take to answer
PAUSES = (1, 3)  # seconds before a question is asked again
FORGOTTEN = "Invalid job id"
SILENT = re.compile(r"no answer|unable to contact|timed out|connect failure|connection refused|zero bytes", re.I)
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


@dataclass(frozen=True)
class QueuedJob:
    """A job of the user.

    Args:
        number: As scancel takes it.
        state: As SLURM calls it.
        name: Of the job.
        file: That was submitted, where it is one.
    """

    number: str
    state: str
    name: str
    file: Path | None


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


def submit(file: Path, *options: str, known: Sequence[str] = ()) -> str:
    """Call sbatch; the job's number.

    Args:
        file: Of the job.
        options: For sbatch, then words for the job's script.
        known: Jobs that were submitted with the same file before.

    Raises:
        ValueError: There is no SLURM here, or it refuses.
        UnclearSubmissionError: SLURM does not answer.
    """
    if not shutil.which("sbatch"):
        raise ValueError("launch=slurm: there is no sbatch here; go to a login node, or see the file with --dry-run")
    flags = [option for option in options if option.startswith("-")]
    words = [option for option in options if not option.startswith("-")]
    told = _call("sbatch", "--parsable", *flags, str(file), *words, env=environment(file.read_text()))
    if told.returncode == 0:
        return told.stdout.strip().partition(";")[0]
    text = re.sub(r"sbatch: (error: )?", "", " ".join(told.stderr.split()))
    if not SILENT.search(text):
        raise ValueError(f"launch=slurm: sbatch refuses: {text}")
    try:  # SLURM may have taken the job, and only its answer was lost
        numbers = [job.number for job in jobs() if job.file == file and job.number not in known]
    except UnreachableError:
        numbers = []
    if numbers:
        return numbers[-1]
    raise UnclearSubmissionError(
        f"launch=slurm: SLURM does not answer ({text}), and the job may be queued or not: if `squeue --me` shows it, "
        f"cancel it there; then remove {file.parent} and launch again"
    )


def jobs() -> list[QueuedJob]:
    """The user's jobs that wait or run, in the order of their numbers; nothing where there is no cluster.

    Raises:
        UnreachableError: SLURM does not answer.
    """
    if not shutil.which("squeue"):
        return []
    told = _ask("squeue", "-h", "-u", str(os.getuid()), "-o", "%F|%T|%j|%o")
    if told.returncode and SILENT.search(told.stderr):
        raise UnreachableError(f"SLURM does not answer ({' '.join(told.stderr.split())}); ask again later")
    found = {}
    for line in told.stdout.splitlines():
        number, state, rest = line.split("|", 2)
        name, _, command = rest.rpartition("|")  # a name may have a bar, too
        file = Path(command.removesuffix(" next"))
        found[number] = QueuedJob(number, state, name, file if file.is_absolute() else None)
    return [found[number] for number in sorted(found, key=int)]


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
    """How a job stands; some minutes after its end only SLURM's accounting knows it, where there is one.

    Raises:
        UnreachableError: SLURM does not answer.
    """
    if not shutil.which("scontrol"):
        return Status("unknown", f"job {job_id}; there is no SLURM here")
    told = _ask("scontrol", "-o", "show", "job", job_id)
    # Of an array, tasks that still wait share one line.
    facts = dict(re.findall(r"(\w+)=(\S*)", told.stdout.partition("\n")[0]))
    name = facts.get("JobState", "")
    if told.returncode or not name:
        if found := _accounted(job_id):
            return found
        if told.returncode and FORGOTTEN not in told.stderr:
            text = re.sub(r"\w+ error: ", "", " ".join(told.stderr.split()))
            raise UnreachableError(f"job {job_id}: SLURM does not answer ({text}); ask again later")
        return Status("unknown", f"job {job_id}, which SLURM does not know any more")
    parts = [f"job {job_id}", name]
    if STATES.get(name) == "waiting" and facts.get("Reason") not in ("None", None):
        parts.append(f"for {facts['Reason']}")
    elif facts.get("NodeList") not in (None, "(null)", ""):
        parts.append(f"on {facts['NodeList']}")
    if facts.get("Restarts", "0") != "0":
        parts.append(f"restarts {facts['Restarts']}")
    return Status(STATES.get(name, "ended"), ", ".join(parts))


def _accounted(job_id: str) -> Status | None:
    """What SLURM's accounting knows of a job; nothing on a cluster without it."""
    if not shutil.which("sacct"):
        return None
    told = _call("sacct", "-n", "-P", "-X", "-o", "State,NodeList", "-j", job_id)
    if told.returncode or not told.stdout.strip():
        return None
    name, _, nodes = told.stdout.splitlines()[-1].partition("|")
    name = name.split()[0]  # CANCELLED by 1000
    text = f"job {job_id}, {name}" + (f", on {nodes}" if nodes and "None" not in nodes else "")
    return Status(STATES.get(name, "ended"), text)


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


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    """As ``_call``, and again where SLURM does not answer."""
    told = _call(*command)
    for pause in PAUSES:
        if told.returncode == 0 or not SILENT.search(told.stderr):
            break
        time.sleep(pause)
        told = _call(*command)
    return told


def _call(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        told = f"no answer in {SECONDS} seconds; see `scontrol ping`"
        return subprocess.CompletedProcess(command, 1, "", told)
