"""Render the sbatch script; a pure function of the settings and the job."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from boltcutter_launch.job import Job, assignments, code_path, quote, render_template

if TYPE_CHECKING:
    from boltcutter_launch.slurm import SlurmLauncher


def render(slurm: SlurmLauncher, job: Job) -> str:
    """Render the sbatch script of a job."""
    is_single = slurm.torchrun or job.search  # a task of srun starts the other processes of its node
    threads, mounts = slurm.cpus(job), list(dict.fromkeys([*job.mounts, *slurm.container_mounts]))
    folder, log = shlex.quote(str(job.folder)), str(job.folder).replace("%", "%%")
    if job.array_size:
        folder = shlex.quote(job.run_folder("")) + "$SLURM_ARRAY_TASK_ID"
        log = job.run_folder("").replace("%", "%%") + "%a"
    run = [f"resume={quote(str(job.folder))}", 'worker="$SLURM_ARRAY_TASK_ID"'] if job.search else ['"resume=$folder"']
    return render_template(
        Path(__file__).with_name("slurm.sh.j2"),
        slurm=slurm,
        job=job,
        directive=directive,
        quote=quote,
        join=shlex.join,
        gpus=":".join(filter(None, ["gpu" * (slurm.gpu_option == "gres"), slurm.gpu_type, str(job.devices)])),
        name=re.sub(r"\s", "-", job.name),
        tasks=1 if is_single else job.devices,
        cpus=threads * (job.devices if is_single else 1),
        threads=threads,
        folder=folder,
        log=f"{log}/logs/slurm.log",
        variables=[*assignments({**job.environment, **slurm.environment}), *code_path(job)],
        engine=slurm.container and slurm.container_engine,
        mounts=mounts,
        pairs=",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts),
        torchrun=slurm.torchrun and not job.search,  # which would kill its workers before they have saved
        arguments=" ".join([*run, *job.trust]),
    )


def directive(text: str) -> str:
    """Quote a value as sbatch reads it from a script: only quotes and backslashes are escaped."""
    if re.fullmatch(r"[\w@%+=:,./&|*\[\]-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
