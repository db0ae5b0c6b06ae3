"""SLURM: an sbatch file that goes on after time limits, preemption and dead nodes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from boltcutter.launch import batch, queue
from boltcutter.launch.job import JOB_VARIABLE, Job, Status, check_environment, check_text, read_log

EARLY = 60  # seconds that SLURM may send a signal before it is due
TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d\d))?(?::(\d\d))?|(\d+):(\d\d)(?::(\d\d))?)")
# Options that the launcher sets, or that its script does not survive. --error: it reads srun's messages in the log.
SET = {"array", "chdir", "cpus-per-task", "dependency", "error", "job-name", "nodes", "no-requeue", "ntasks"}
SET |= {"ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "requeue", "signal", "test-only", "time", "wait"}
SET |= {"wrap"}
SET_SRUN = SET | {"export", "kill-on-bad-exit", "label", "multi-prog", "pty"}
SHORT = {"a": "array", "c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "J": "job-name"}
SHORT |= {"K": "kill-on-bad-exit", "l": "label", "N": "nodes", "n": "ntasks", "o": "output", "t": "time", "W": "wait"}
MEMORY = re.compile(r"\d+[KMGT]", re.I)
LEAST = {"grace": 30, "cpus_per_task": 1, "max_parallel": 1, "max_restarts": 0, "chain": 1}


class SlurmLauncher:
    """Submit to SLURM; nodes, devices and whether they are GPUs are those of the trainer.

    Args:
        partition: Where to run; null: the cluster's default.
        account: Who pays.
        qos: Quality of service.
        time: Limit of one start, H:MM:SS or D-HH:MM:SS.
        grace: Seconds before the limit at which the run saves and is queued again.
        memory: Of each node, with its unit, as 64G; 0: all of it; null: the cluster's default.
        cpus_per_task: Processors of each process; null: one, and one for each of its data workers.
        gpu_type: As the cluster calls it, as a100.
        gpu_option: Option of sbatch that asks for GPUs; none: the partition, or an option in ``sbatch``, gives them.
        constraint: Features that nodes must have.
        exclusive: Whether nodes are shared with nobody.
        purge_modules: Whether ``module purge`` comes first.
        modules: For ``module load``.
        setup: Lines of shell before the run; one that fails is shown and ends the job.
        conda: Environment to activate.
        venv: Virtual environment to activate.
        python: Interpreter; null: that of ``conda``, ``venv`` or ``container``, else the one that launches.
        container: Image in which the run's processes run; for edf the environment's name or file.
        container_engine: What starts it; edf: srun's --environment, whose file has the mounts.
        container_mounts: Folders that the container sees, besides those of project and run.
        interface: Network interface between nodes, where names of nodes lead to the wrong one.
        environment: Variables for the run.
        sbatch: More options of sbatch, as ["--mail-type=END"].
        srun: More options of srun, as ["--cpu-bind=cores", "--mpi=pmix"].
        array: Runs that differ in some words, as "seed=1,2;optimizer.lr=0.1,0.01": every combination.
        max_parallel: Runs of an array at one time.
        max_restarts: How often a run is queued again; 0: never.
        chain: Jobs that follow one another, where a job may not be queued again.
        torchrun: Whether torchrun starts the processes of a node; otherwise srun does.
        snapshot: Whether the job runs a copy of the code as it is at submission; otherwise as it is when it starts.
    """

    def __init__(
        self,
        *,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        time: str = "4:00:00",
        grace: int = 120,
        memory: str | None = None,
        cpus_per_task: int | None = None,
        gpu_type: str | None = None,
        gpu_option: Literal["gres", "gpus-per-node", "none"] = "gres",
        constraint: str | None = None,
        exclusive: bool = False,
        purge_modules: bool = False,
        modules: list[str] | None = None,
        setup: list[str] | None = None,
        conda: str | None = None,
        venv: str | None = None,
        python: str | None = None,
        container: str | None = None,
        container_engine: Literal["apptainer", "pyxis", "edf"] = "apptainer",
        container_mounts: list[str] | None = None,
        interface: str | None = None,
        environment: dict[str, str] | None = None,
        sbatch: list[str] | None = None,
        srun: list[str] | None = None,
        array: str | list[str] | None = None,
        max_parallel: int | None = None,
        max_restarts: int = 50,
        chain: int = 1,
        torchrun: bool = False,
        snapshot: bool = True,
    ) -> None:
        self.partition, self.account, self.qos, self.constraint = partition, account, qos, constraint
        self.time, self.grace, self.memory, self.exclusive = time, grace, memory, exclusive
        self.cpus_per_task, self.gpu_type, self.gpu_option, self.interface = (
            cpus_per_task,
            gpu_type,
            gpu_option,
            interface,
        )
        self.purge_modules, self.modules, self.setup, self.conda = purge_modules, modules or [], setup or [], conda
        self.container, self.container_engine = container, container_engine
        self.container_mounts, self.environment = container_mounts or [], environment or {}
        self.sbatch, self.srun, self.array = sbatch or [], srun or [], array
        self.max_parallel, self.max_restarts, self.chain = max_parallel, max_restarts, chain
        self.torchrun, self.snapshot = torchrun, snapshot
        # The job may start in another folder than the one where it is submitted.
        self.venv = venv if venv is None or JOB_VARIABLE.search(venv) else str(Path(venv).expanduser().absolute())
        self.python = python or ("python" if conda or venv or container else sys.executable)
        self._refuse()

    def _refuse(self) -> None:
        if seconds(self.time) < self.grace + 2 * EARLY:
            raise ValueError(
                f"launch.time={self.time} leaves no minute of training before the run has to save; try "
                f"launch.time={self.grace // 3600}:{self.grace % 3600 // 60 + 5:02}:00 or a smaller launch.grace"
            )
        for name, least in (
            ("grace", 30),
            ("cpus_per_task", 1),
            ("max_parallel", 1),
            ("max_restarts", 0),
            ("chain", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"launch.{name}={value} is less than {least}; try launch.{name}={least}")
        if self.chain > 1 and self.array:
            raise ValueError(f"launch.chain={self.chain}: arrays are not chained; leave one of them out")
        if self.memory and self.memory != "0" and not MEMORY.fullmatch(self.memory):
            raise ValueError(f"launch.memory={self.memory} has no unit of SLURM; try launch.memory={self.memory}G")
        if self.container_engine == "edf" and self.container_mounts:
            raise ValueError("launch.container_mounts: edf has the mounts in its file; add them there")
        check_environment(self.environment)
        for name, value in vars(self).items():
            check_text(f"launch.{name}", [line.replace("\n", "") for line in value] if name == "setup" else value)
        for name, taken in (("sbatch", SET), ("srun", SET_SRUN)):
            for option in getattr(self, name):
                found = re.match(r"--([\w-]+)|-(\w)", option)
                if not found:
                    raise ValueError(f"launch.{name}={option}: no option of {name}; write it as --name=value")
                if (found[1] or SHORT.get(found[2])) in taken:
                    raise ValueError(f"launch.{name}={option}: launch and trainer set it; leave it out")

    def check(self, job: Job) -> None:
        """Refuse what Lightning or the cluster cannot do."""
        check_text("name", job.name)
        check_text("folder", str(job.folder))
        if "\\" in str(job.folder):
            raise ValueError(f"folder={job.folder}: SLURM removes \\ from the path of the log; choose another")
        if self.venv and not JOB_VARIABLE.search(self.venv) and not Path(self.venv, "bin", "activate").is_file():
            raise ValueError(f"launch.venv={self.venv}: no virtual environment there; create it, or correct the path")
        if job.name in ("bash", "interactive"):
            raise ValueError(f"name={job.name}: Lightning takes such a job for a shell of yours; choose another name")
        partitions = queue.partitions(self.partition)
        if not partitions:
            return
        fitting = [p for p in partitions if (p.gpus if job.gpus else p.cpus // self.cpus(job)) >= job.devices]
        if not fitting:
            most = max(p.gpus if job.gpus else p.cpus // self.cpus(job) for p in partitions)
            kind = "GPUs" if job.gpus else f"times {self.cpus(job)} processors (launch.cpus_per_task)"
            remedy = f"trainer.devices={most}" if most else "trainer.accelerator=cpu" if job.gpus else "fewer"
            raise ValueError(f"trainer.devices={job.devices}: a node has {most} {kind} at most; try {remedy}")
        if job.nodes > (most := sum(p.nodes for p in fitting)):
            raise ValueError(f"trainer.num_nodes={job.nodes}: {most} such nodes are there; try {most} or less")
        if (limit := max(p.seconds for p in fitting)) < seconds(self.time):
            raise ValueError(f"launch.time={self.time} is more than the partition's {limit / 3600:g} h; take less")

    def render(self, job: Job) -> str:
        """The sbatch file."""
        return batch.render(self, job)

    def cpus(self, job: Job) -> int:
        """Processors of each process."""
        return self.cpus_per_task or 1 + job.workers

    def submit(self, job: Job, file: Path) -> list[str]:
        """Call sbatch, once for each link of a chain; ids as squeue and scancel take them."""
        for run in job.runs:
            for left in ("starts", "requeue"):
                (run / "logs" / left).unlink(missing_ok=True)
        links: list[str] = []
        try:
            for _ in range(self.chain):
                after = (f"--dependency=afterany:{links[-1]}", "next") if links else ()
                links.append(queue.submit(file, *after, known=links))
        except ValueError:
            if links:
                queue.cancel(*links)  # a chain is submitted as a whole or not at all
            raise
        return [f"{links[0]}_{task}" for task in range(job.tasks)] or [",".join(links)]

    def status(self, job_id: str) -> Status:
        """Of the first job of a chain that has not ended."""
        found = [queue.status(link) for link in jobs_of(job_id)]
        return next((status for status in found if status.state in ("running", "waiting")), found[-1])

    def cancel(self, job_id: str) -> None:
        """SIGTERM to all processes, on which the run saves; SLURM kills what is left after its KillWait."""
        queue.cancel(*reversed(jobs_of(job_id)))

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """What its processes, and SLURM, have printed."""
        over = ("ended", "unknown")
        return read_log(folder / "logs" / "slurm.log", lambda: not follow or self.status(job_id).state in over)


def jobs_of(job_id: str) -> list[str]:
    """The jobs of a chain, or one job.

    Raises:
        ValueError: The record of a run has something else there, which scancel could take for an option.
    """
    found = job_id.split(",")
    if not all(re.fullmatch(r"\d+(_\d+)?", link) for link in found):
        raise ValueError(f"record.json has the job id {job_id}: expected a number, as 123 or 123_4; correct it")
    return found


def seconds(time: str) -> int:
    """A time of SLURM in seconds.

    Raises:
        ValueError: It is none. A number alone is refused, too: YAML reads an unquoted 2:00:00 as one.
    """
    found = TIME.fullmatch(time)
    if not found:
        raise ValueError(f"launch.time={time} is no time; write H:MM:SS or D-HH:MM:SS, in YAML with quotes")
    days, hours, minutes, rest, first, second, third = (int(part or 0) for part in found.groups())
    if found[1]:
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    return (first * 60 + second) * 60 + third if found[7] else first * 60 + second
