"""SLURM: an sbatch file that goes on after time limits, preemption and dead nodes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from boltcutter.config import SECRET
from boltcutter.launch import queue
from boltcutter.launch.job import Job, Status, assignments, read_log

EARLY = 60  # seconds that SLURM may send a signal before it is due
TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d\d))?(?::(\d\d))?|(\d+):(\d\d)(?::(\d\d))?)")
SET = {"array", "chdir", "cpus-per-task", "dependency", "gres", "job-name", "nodes", "no-requeue", "ntasks"}
SET |= {"ntasks-per-node", "open-mode", "output", "requeue", "signal", "time"}
SHORT = {"a": "array", "c": "cpus-per-task", "D": "chdir", "d": "dependency", "J": "job-name", "N": "nodes"}
LEAST = {"grace": 30, "cpus_per_task": 1, "max_parallel": 1, "max_restarts": 0, "chain": 1}
SHORT |= {"n": "ntasks", "o": "output", "t": "time"}
TEXT = r"""
say() { echo "$(date '+%F %T') launch: $*"; }
log=$folder/logs/slurm.log mark=$folder/logs/requeue starts=$folder/logs/starts
"""
CHAIN = r"""
# A link of the chain goes on only where the one before it was cut short.
if [ "${1:-}" = next ] && [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] && [ ! -e "$mark" ]; then
    say "the run has ended: nothing is left for job $job"
    exit 0
fi
"""
STARTS = r"""
# Starts in a row that ended by no signal of SLURM and left no checkpoint: the fourth would end like the others.
if [ -e "$mark" ] || [ -n "$(find "$folder/%(progress)s" -newer "$starts" -print -quit 2>/dev/null)" ]; then
    : >"$starts"
fi
echo >>"$starts"
if [ "$(wc -l <"$starts")" -gt 3 ]; then
    say "given up: three starts in a row ended before a checkpoint; the reason stands above"
    exit 1
fi
rm -f "$mark"
"""
RUN = r"""
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR BOLTCUTTER_REQUEUE="$mark" PYTHONUNBUFFERED=1

say "job $job starts on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}"
from=$(wc -c <"$log")
# Who signals this script, and not the run alone, ends the job or queues it again himself.
outside=
trap 'outside=yes' TERM
%(srun)s
status=$?
if [ -n "$outside" ]; then
    say "job $job is ended from outside"
    exit "$status"
fi
# The first process that ended badly is the cause; srun has ended the others for it.
cause=$(tail -c "+$((from + 1))" "$log" | grep -m 1 -oE '^srun: error: .*: tasks? [0-9,-]+: .*')
if [ -e "$mark" ]; then
    cause="saved on $(cat "$mark")"
elif [ -z "$cause" ] || [[ "$cause" == *"Exited with"* || "$cause" == *"Out Of Memory"* ]]; then
    say "job $job ends with status $status"
    exit "$status"
fi
cause=${cause#srun: error: }
"""
NEXT = r"""
touch "$mark"
say "$cause; the next job of the chain goes on"
exit 0
"""
REQUEUE = r"""
if [ "${SLURM_RESTART_COUNT:-0}" -ge %(restarts)d ]; then
    say "$cause; restarted %(restarts)d times, and no more"
    exit 1
fi
say "$cause; requeue"
trap - TERM
scontrol requeue "$job" && sleep 600 # SLURM ends this script
say "SLURM did not requeue the job"
exit 1
"""


class Slurm:
    """Submit to SLURM; nodes, devices and whether they are GPUs are those of the trainer.

    Args:
        partition: Where to run; null: the cluster's default.
        account: Who pays.
        qos: Quality of service.
        time: Limit of one start, H:MM:SS or D-HH:MM:SS.
        grace: Seconds before the limit at which the run saves and is queued again.
        memory: Of each node, as 64G; null: the cluster's default.
        cpus_per_task: Processors of each process; null: one, and one for each of its data workers.
        gpu_type: As the cluster calls it, as a100.
        constraint: Features that nodes must have.
        exclusive: Whether nodes are shared with nobody.
        modules: For ``module load``.
        setup: Lines of shell before the run; one that fails ends the job.
        conda: Environment to activate.
        venv: Virtual environment to activate.
        python: Interpreter; null: that of ``conda``, ``venv`` or ``container``, else the one that launches.
        container: Image in which the run's processes run.
        container_engine: What starts it.
        container_mounts: Folders that the container sees, besides those of project and run.
        interface: Network interface between nodes, where names of nodes lead to the wrong one.
        environment: Variables for the run.
        sbatch: More options, as ["--mail-type=END"].
        array: Runs that differ in some words, as "seed=1,2;optimizer.lr=0.1,0.01": every combination.
        max_parallel: Runs of an array at one time.
        max_restarts: How often a run is queued again; 0: never.
        chain: Jobs that follow one another, where a job may not be queued again.
        torchrun: Whether torchrun starts the processes of a node; otherwise srun does.
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
        constraint: str | None = None,
        exclusive: bool = False,
        modules: list[str] | None = None,
        setup: list[str] | None = None,
        conda: str | None = None,
        venv: str | None = None,
        python: str | None = None,
        container: str | None = None,
        container_engine: Literal["apptainer", "pyxis"] = "apptainer",
        container_mounts: list[str] | None = None,
        interface: str | None = None,
        environment: dict[str, str] | None = None,
        sbatch: list[str] | None = None,
        array: str | list[str] | None = None,
        max_parallel: int | None = None,
        max_restarts: int = 50,
        chain: int = 1,
        torchrun: bool = False,
    ) -> None:
        self.partition, self.account, self.qos, self.constraint = partition, account, qos, constraint
        self.time, self.grace, self.memory, self.exclusive = time, grace, memory, exclusive
        self.cpus_per_task, self.gpu_type, self.interface = cpus_per_task, gpu_type, interface
        self.modules, self.setup, self.conda, self.venv = modules or [], setup or [], conda, venv
        self.container, self.container_engine = container, container_engine
        self.container_mounts, self.environment, self.sbatch = container_mounts or [], environment or {}, sbatch or []
        self.array, self.max_parallel, self.max_restarts = array, max_parallel, max_restarts
        self.chain, self.torchrun = chain, torchrun
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
        for name in self.environment:
            if SECRET.search(name):
                raise ValueError(
                    f"launch.environment.{name}: a secret must not stand in the job's file; "
                    f"export {name} before launching, SLURM hands it on"
                )
        for option in self.sbatch:
            found = re.match(r"--([\w-]+)|-(\w)", option)
            if not found:
                raise ValueError(f"launch.sbatch={option}: no option of sbatch; write it as --name=value")
            if (found[1] or SHORT.get(found[2])) in SET:
                raise ValueError(f"launch.sbatch={option}: launch and trainer set it; leave it out")

    def check(self, job: Job) -> None:
        """Refuse what Lightning or the cluster cannot do."""
        if job.name in ("bash", "interactive"):
            raise ValueError(f"name={job.name}: Lightning takes such a job for a shell of yours; choose another name")
        partitions = queue.partitions(self.partition)
        if not partitions:
            return
        fitting = [p for p in partitions if (p.gpus if job.gpus else p.cpus // self._cpus(job)) >= job.devices]
        if not fitting:
            most = max(p.gpus if job.gpus else p.cpus // self._cpus(job) for p in partitions)
            kind = "GPUs" if job.gpus else f"times {self._cpus(job)} processors (launch.cpus_per_task)"
            remedy = f"trainer.devices={most}" if most else "trainer.accelerator=cpu" if job.gpus else "fewer"
            raise ValueError(f"trainer.devices={job.devices}: a node has {most} {kind} at most; try {remedy}")
        if job.nodes > (most := sum(p.nodes for p in fitting)):
            raise ValueError(f"trainer.num_nodes={job.nodes}: {most} such nodes are there; try {most} or less")
        if (limit := max(p.seconds for p in fitting)) < seconds(self.time):
            raise ValueError(f"launch.time={self.time} is more than the partition's {limit / 3600:g} h; take less")

    def render(self, job: Job) -> str:
        """The sbatch file."""
        task = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.tasks else "$SLURM_JOB_ID"
        folder = shlex.quote(job.run("")) + "$SLURM_ARRAY_TASK_ID" if job.tasks else shlex.quote(str(job.folder))
        parts = ["#!/bin/bash", *self._directives(job), "", f"folder={folder} job={task}", TEXT.strip()]
        if self.chain > 1:
            parts.append(CHAIN.rstrip())
        parts += [(STARTS % {"progress": job.progress}).rstrip(), *self._setup(job)]
        parts.append((RUN % {"srun": " \\\n    ".join(self._srun(job))}).rstrip())
        parts.append((NEXT if self.chain > 1 else REQUEUE % {"restarts": self.max_restarts}).strip())
        return "\n".join(parts) + "\n"

    def _cpus(self, job: Job) -> int:
        return self.cpus_per_task or 1 + job.workers

    def _directives(self, job: Job) -> Iterator[str]:
        tasks, cpus = (1, job.devices * self._cpus(job)) if self.torchrun else (job.devices, self._cpus(job))
        options: dict[str, str | int | bool | None] = {
            "job-name": re.sub(r"\s", "-", job.name),
            "nodes": job.nodes,
            "ntasks-per-node": tasks,
            "cpus-per-task": cpus,
            "gres": f"gpu:{f'{self.gpu_type}:' if self.gpu_type else ''}{job.devices}" if job.gpus else None,
            "time": self.time,
            "signal": f"USR2@{self.grace}",
            "requeue" if self.max_restarts else "no-requeue": True,
            "output": (job.run("").replace("%", "%%") + "%a" if job.tasks else str(job.folder).replace("%", "%%"))
            + "/logs/slurm.log",
            "open-mode": "append",
            "array": f"0-{job.tasks - 1}" + (f"%{self.max_parallel}" if self.max_parallel else "")
            if job.tasks
            else None,
            **{key: getattr(self, key) for key in ("partition", "account", "qos", "constraint", "exclusive")},
            "mem": self.memory,
        }
        for key, value in options.items():
            if value not in (None, False):
                text = str(value)
                yield f"#SBATCH --{key}" + (
                    "" if value is True else f'="{text}"' if re.search(r"\s", text) else f"={text}"
                )
        yield from (f"#SBATCH {option}" for option in self.sbatch)

    def _setup(self, job: Job) -> list[str]:
        lines = [f"module load {shlex.join(self.modules)}"] if self.modules else []
        if self.conda:
            lines += ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(self.conda)}"]
        if self.venv:
            lines.append(f"source {shlex.quote(f'{self.venv}/bin/activate')}")
        lines += self.setup
        if lines:
            lines = ["", "set -e", *lines, "set +e"]
        cpus = self._cpus(job)
        variables = {"OMP_NUM_THREADS": str(cpus)}
        # From 22.05 on srun does not take the number from sbatch.
        variables["SRUN_CPUS_PER_TASK"] = str(cpus * job.devices if self.torchrun else cpus)
        if self.interface:
            variables |= {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        return [*lines, "", *assignments({**variables, **job.environment, **self.environment})]

    def _srun(self, job: Job) -> list[str]:
        """Words of a command, some to a line: the step, the container, the interpreter, the script."""
        # Whoever waits for a process that has left waits in vain, but never until the time is over.
        lines = [f"srun --kill-on-bad-exit=1 --wait={self.grace // 2}"]
        mounts = list(dict.fromkeys([str(job.script.parents[1]), str(job.folder), *self.container_mounts]))
        if self.container and self.container_engine == "pyxis":
            pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
            lines.append(
                f"--container-image={shlex.quote(self.container)} --container-mounts={shlex.quote(pairs)} "
                f"--container-workdir={shlex.quote(str(job.script.parents[1]))}"
            )
        if self.torchrun:
            # SLURM signals torchrun, too, which would end its processes before they have saved.
            lines.append("""bash -c 'trap "" USR1 USR2; exec "$@"' bash""")
        if self.container and self.container_engine == "apptainer":
            binds = shlex.join(word for mount in mounts for word in ("--bind", mount))
            lines.append(f"apptainer exec{' --nv' if job.gpus else ''} {binds} {shlex.quote(self.container)}")
        lines.append(shlex.quote(self.python))
        if self.torchrun:
            lines[-1] += f" -m torch.distributed.run --nnodes={job.nodes} --nproc-per-node={job.devices}"
            lines.append('--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID"')
            lines.append('--rdzv-endpoint="$MASTER_ADDR:$((20000 + SLURM_JOB_ID % 10000))"')
        lines.append(f'{shlex.quote(str(job.script))} "resume=$folder"')
        return lines

    def submit(self, job: Job, file: Path) -> list[str]:
        """Call sbatch, once for each link of a chain; ids as squeue and scancel take them."""
        for run in job.runs:
            for left in ("starts", "requeue"):
                (run / "logs" / left).unlink(missing_ok=True)
        links: list[str] = []
        for _ in range(self.chain):
            links.append(
                queue.submit(file, f"--dependency=afterany:{links[-1]}", "next") if links else queue.submit(file)
            )
        return [f"{links[0]}_{task}" for task in range(job.tasks)] or [",".join(links)]

    def status(self, job_id: str) -> Status:
        """Of the first job of a chain that has not ended."""
        found = [queue.status(link) for link in job_id.split(",")]
        return next((status for status in found if status.state in ("running", "waiting")), found[-1])

    def cancel(self, job_id: str) -> None:
        """SIGTERM to all processes, on which the run saves; SLURM kills what is left after its KillWait."""
        queue.cancel(*reversed(job_id.split(",")))

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """What its processes, and SLURM, have printed."""
        over = ("ended", "unknown")
        return read_log(folder / "logs" / "slurm.log", lambda: not follow or self.status(job_id).state in over)


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
