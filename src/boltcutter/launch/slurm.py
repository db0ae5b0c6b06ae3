"""Launch runs on SLURM as sbatch jobs that resume after time limits, preemption and node failures."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from boltcutter.launch import slurm_queue
from boltcutter.launch.job import (
    FINAL,
    JOB_VARIABLE,
    Job,
    Launcher,
    Status,
    assignments,
    check_settings,
    code_path,
    follow_log,
    match_job_id,
    quote,
    render_template,
    seconds,
)

SIGNAL_MARGIN = 60  # seconds that SLURM may send a signal early
# Options that the launcher sets, or that break its script. --error: it reads the messages of srun in the log.
RESERVED = {"array", "chdir", "cpus-per-task", "dependency", "error", "job-name", "nodes", "no-requeue", "ntasks"}
RESERVED |= {"ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "requeue", "signal", "test-only", "time"}
RESERVED |= {"wait", "wrap"}
RESERVED_SRUN = RESERVED | {"export", "kill-on-bad-exit", "label", "multi-prog", "pty"}
SHORT_OPTIONS = {"a": "array", "c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "J": "job-name"}
SHORT_OPTIONS |= {"K": "kill-on-bad-exit", "l": "label", "N": "nodes", "n": "ntasks", "o": "output", "t": "time"}
SHORT_OPTIONS |= {"W": "wait"}
MEMORY = re.compile(r"[0-9]+[KMGT]", re.I)


@dataclass(kw_only=True, eq=False)
class SlurmLauncher(Launcher):
    """Submit runs to SLURM; the numbers of nodes, devices and GPUs are those of the trainer.

    Args:
        partition: Partition; null: the default of the cluster.
        account: Account to charge.
        qos: Quality of service.
        time: Time limit of each start, H:MM:SS or D-HH:MM:SS.
        grace: Seconds before the time limit at which the run saves and is requeued.
        memory: Memory of each node with its unit, such as 64G; 0: all of it; null: the default of the cluster.
        cpus_per_task: CPUs of each process; null: one plus one for each dataloader worker.
        gpu_type: GPU type as the cluster names it, such as a100.
        gpu_option: Option of sbatch that requests GPUs; none: the partition or an option in ``sbatch`` provides them.
        constraint: Features that nodes must have.
        exclusive: Whether to allocate whole nodes.
        purge_modules: Whether to run ``module purge`` first.
        modules: Arguments of ``module load``.
        setup: Shell lines before the run; a failing line is reported and ends the job.
        conda: Conda environment to activate.
        venv: Virtual environment to activate.
        python: Python interpreter; null: that of ``conda``, ``venv`` or ``container``, else the one that submits.
        container: Container image for the processes of the run; for edf the name or file of the environment.
        container_engine: Container runtime; edf: ``srun --environment``, whose file has the mounts.
        container_mounts: Folders to mount besides those of the project and the run.
        environment: Environment variables of the run.
        sbatch: Further options of sbatch, such as ["--mail-type=END"].
        srun: Further options of srun, such as ["--cpu-bind=cores", "--mpi=pmix"].
        array: Overrides in which the runs of an array differ, such as "seed=1,2;optimizer.lr=0.1,0.01".
        max_parallel: Maximum number of runs of an array at the same time.
        max_restarts: How often a run is requeued; 0: never.
        chain: Number of dependent jobs, for clusters that do not allow requeueing.
        torchrun: Whether torchrun starts the processes of a node; otherwise srun does.
        snapshot: Whether the job runs a copy of the code made at submission; otherwise the code at its start.
    """

    index_variable = "SLURM_ARRAY_TASK_ID"

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "4:00:00"
    grace: int = 120
    memory: str | None = None
    cpus_per_task: int | None = None
    gpu_type: str | None = None
    gpu_option: Literal["gres", "gpus-per-node", "none"] = "gres"
    constraint: str | None = None
    exclusive: bool = False
    purge_modules: bool = False
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    conda: str | None = None
    venv: str | None = None
    python: str | None = None
    container: str | None = None
    container_engine: Literal["apptainer", "pyxis", "edf"] = "apptainer"
    container_mounts: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    sbatch: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)
    array: str | list[str] | None = None
    max_parallel: int | None = None
    max_restarts: int = 50
    chain: int = 1
    torchrun: bool = False
    snapshot: bool = True

    def __post_init__(self) -> None:
        # The job may start in another working directory than that of the submission.
        if self.venv and not JOB_VARIABLE.search(self.venv):
            self.venv = str(Path(self.venv).expanduser().absolute())
        in_environment = self.conda or self.venv or self.container
        self.python = self.python or ("python" if in_environment else sys.executable)
        if seconds(self.time) < self.grace + 2 * SIGNAL_MARGIN:
            raise ValueError(
                f"launch.time={self.time} is too short to train before the run has to save; try "
                f"launch.time={self.grace // 3600}:{self.grace % 3600 // 60 + 5:02}:00 or a smaller launch.grace"
            )
        least = {"grace": 30, "cpus_per_task": 1, "max_parallel": 1, "max_restarts": 0, "chain": 1}
        check_settings(vars(self), {name: (value, None) for name, value in least.items()})
        if self.chain > 1 and self.array:
            raise ValueError(f"launch.chain={self.chain}: arrays cannot be chained; remove one of them")
        if self.memory and self.memory != "0" and not MEMORY.fullmatch(self.memory):
            raise ValueError(f"launch.memory={self.memory} has no unit; try launch.memory={self.memory}G")
        if self.container_engine == "edf" and self.container_mounts:
            raise ValueError("launch.container_mounts: container_engine=edf has mounts in its file; add them there")
        for name, taken in (("sbatch", RESERVED), ("srun", RESERVED_SRUN)):
            for option in getattr(self, name):
                found = re.match(r"--([\w-]+)|-(\w)", option)
                if not found:
                    raise ValueError(f"launch.{name}={option}: not an option of {name}; write it as --name=value")
                if (found[1] or SHORT_OPTIONS.get(found[2])) in taken:
                    raise ValueError(f"launch.{name}={option}: set by launch and trainer; remove it")

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that Lightning or the cluster does not support."""
        if "\\" in str(job.folder):
            raise ValueError(f"folder={job.folder}: SLURM removes \\ from the path of the log; choose another")
        if self.venv and not JOB_VARIABLE.search(self.venv) and not Path(self.venv, "bin", "activate").is_file():
            raise ValueError(f"launch.venv={self.venv}: no virtual environment found; create it, or correct the path")
        if job.name in ("bash", "interactive"):
            raise ValueError(f"name={job.name}: Lightning treats it as an interactive shell; choose another name")
        partitions = slurm_queue.partitions(self.partition)
        if not partitions:
            return
        fitting = [p for p in partitions if (p.gpus if job.gpus else p.cpus // self.cpus(job)) >= job.devices]
        if not fitting:
            most = max(p.gpus if job.gpus else p.cpus // self.cpus(job) for p in partitions)
            kind = "GPUs" if job.gpus else f"times {self.cpus(job)} CPUs (launch.cpus_per_task)"
            remedy = f"trainer.devices={most}" if most else "trainer.accelerator=cpu" if job.gpus else "fewer"
            raise ValueError(f"trainer.devices={job.devices}: a node has at most {most} {kind}; try {remedy}")
        if job.nodes > (most := sum(p.nodes for p in fitting)):
            raise ValueError(f"trainer.num_nodes={job.nodes}: the partition has {most} such nodes; try {most} or fewer")
        if (limit := max(p.seconds for p in fitting)) < seconds(self.time):
            raise ValueError(f"launch.time={self.time} exceeds the limit of {limit / 3600:g} h; reduce it")

    def render(self, job: Job) -> str:
        """Render the sbatch script."""
        is_single = self.torchrun or job.search  # a task of srun starts the other processes of its node
        threads, mounts = self.cpus(job), list(dict.fromkeys([*job.mounts, *self.container_mounts]))
        folder, log = shlex.quote(str(job.folder)), str(job.folder).replace("%", "%%")
        if job.array_size:
            folder = shlex.quote(job.run_folder("")) + "$SLURM_ARRAY_TASK_ID"
            log = job.run_folder("").replace("%", "%%") + "%a"
        run = ['"resume=$folder"']
        if job.search:
            run = [f"resume={quote(str(job.folder))}", 'worker="$SLURM_ARRAY_TASK_ID"']
        return render_template(
            Path(__file__).with_name("slurm.sh.j2"),
            own=self,
            job=job,
            directive=directive,
            quote=quote,
            join=shlex.join,
            gpus=":".join(filter(None, ["gpu" * (self.gpu_option == "gres"), self.gpu_type, str(job.devices)])),
            name=re.sub(r"\s", "-", job.name),
            tasks=1 if is_single else job.devices,
            cpus=threads * (job.devices if is_single else 1),
            threads=threads,
            folder=folder,
            log=f"{log}/logs/slurm.log",
            variables=[*assignments({**job.environment, **self.environment}), *code_path(job)],
            engine=self.container and self.container_engine,
            mounts=mounts,
            pairs=",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts),
            torchrun=self.torchrun and not job.search,  # which would kill its workers before they have saved
            arguments=" ".join([*run, *job.trust]),
        )

    def cpus(self, job: Job) -> int:
        """Return the CPUs of each process."""
        return self.cpus_per_task or 1 + job.num_workers

    def submit(self, job: Job, file: Path) -> list[str]:
        """Call sbatch, once for each job of a chain; returns a job id for each run."""
        for folder in job.run_folders:
            for name in ("starts", "requeue"):
                (folder / "logs" / name).unlink(missing_ok=True)
        links: list[str] = []
        try:
            for _ in range(self.chain):
                links.append(slurm_queue.submit(file, links))
        except ValueError:
            if links:
                slurm_queue.cancel(*links)  # a chain is submitted as a whole or not at all
            raise
        return [f"{links[0]}_{task}" for task in range(job.array_size)] or [",".join(links)]

    def status(self, job_id: str) -> Status:
        """Return the status of the first job of a chain that has not ended."""
        found = [slurm_queue.status(link) for link in split_job_ids(job_id)]
        return next((status for status in found if status.state in ("running", "pending")), found[-1])

    def cancel(self, job_id: str) -> None:
        """Send SIGTERM to all processes, on which the run saves; SLURM kills them after its KillWait."""
        slurm_queue.cancel(*reversed(split_job_ids(job_id)))

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield the output of the processes and of SLURM."""
        return follow_log(folder / "logs" / "slurm.log", lambda: not follow or self.status(job_id).state in FINAL)


def split_job_ids(job_id: str) -> list[str]:
    """Split the id of a chain into those of its jobs.

    Raises:
        ValueError: The recorded id is malformed; scancel could take it for an option.
    """
    return [match_job_id(r"[0-9]+(_[0-9]+)?", link, "a number such as 123 or 123_4")[0] for link in job_id.split(",")]


def directive(text: str) -> str:
    """Quote a value as sbatch reads it from a script: only quotes and backslashes are escaped."""
    if re.fullmatch(r"[\w@%+=:,./&|*\[\]-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
