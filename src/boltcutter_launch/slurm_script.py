"""Render the sbatch script; a pure function of the settings and the job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from boltcutter_launch.job import Job, assignments, code_path, quote, render_template

if TYPE_CHECKING:
    from boltcutter_launch.slurm import SlurmLauncher


def render(slurm: SlurmLauncher, job: Job) -> str:
    """Render the sbatch script of a job."""
    folder = (
        shlex.quote(job.run_folder("")) + "$SLURM_ARRAY_TASK_ID" if job.array_size else shlex.quote(str(job.folder))
    )
    return render_template(
        Path(__file__).with_name("slurm.sh.j2"),
        directives=_directives(slurm, job),
        folder=folder,
        task="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.array_size else "$SLURM_JOB_ID",
        is_chain=slurm.chain > 1,
        progress=job.progress,
        setup="\n".join(_setup(slurm)),
        variables="\n".join(_variables(slurm, job)),
        srun=" \\\n    ".join(_srun(slurm, job)),
        max_restarts=slurm.max_restarts,
    )


def _directives(slurm: SlurmLauncher, job: Job) -> Iterator[str]:
    cpus = slurm.cpus(job)
    is_single = slurm.torchrun or job.search
    tasks, cpus = (1, job.devices * cpus) if is_single else (job.devices, cpus)
    gpus = f"{slurm.gpu_type}:{job.devices}" if slurm.gpu_type else job.devices
    gpu_option = slurm.gpu_option if job.gpus and slurm.gpu_option != "none" else None
    log_folder = str(job.folder).replace("%", "%%")
    if job.array_size:
        log_folder = job.run_folder("").replace("%", "%%") + "%a"
    limit = f"%{slurm.max_parallel}" if slurm.max_parallel else ""
    options: dict[str, str | int | bool | None] = {
        "job-name": re.sub(r"\s", "-", job.name),
        "nodes": job.nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": cpus,
        **({gpu_option: f"gpu:{gpus}" if gpu_option == "gres" else gpus} if gpu_option else {}),
        "time": slurm.time,
        "signal": f"USR2@{slurm.grace}",
        "requeue" if slurm.max_restarts else "no-requeue": True,
        "output": f"{log_folder}/logs/slurm.log",
        "open-mode": "append",
        "array": f"0-{job.array_size - 1}{limit}" if job.array_size else None,
        **{key: getattr(slurm, key) for key in ("partition", "account", "qos", "constraint", "exclusive")},
        "mem": slurm.memory,
    }
    for key, value in options.items():
        if value not in (None, False):
            yield f"--{key}" + ("" if value is True else f"={directive(str(value))}")
    yield from slurm.sbatch


def directive(text: str) -> str:
    """Quote a value as sbatch reads it from a script: only quotes and backslashes are escaped."""
    if re.fullmatch(r"[\w@%+=:,./&|*\[\]-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _setup(slurm: SlurmLauncher) -> list[str]:
    lines = ["module purge"] if slurm.purge_modules else []
    lines += [f"module load {shlex.join(slurm.modules)}"] if slurm.modules else []
    if slurm.conda:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {quote(slurm.conda)}"]
    if slurm.venv:
        lines.append(f"source {quote(f'{slurm.venv}/bin/activate')}")
    return lines + slurm.setup


def _variables(slurm: SlurmLauncher, job: Job) -> list[str]:
    cpus = slurm.cpus(job)
    variables = {"OMP_NUM_THREADS": str(cpus)}
    # Since SLURM 22.05, srun does not inherit --cpus-per-task from sbatch.
    variables["SRUN_CPUS_PER_TASK"] = str(cpus * job.devices if slurm.torchrun or job.search else cpus)
    return [*assignments({**variables, **job.environment, **slurm.environment}), *code_path(job)]


def _srun(slurm: SlurmLauncher, job: Job) -> list[str]:
    """Return the srun command, one line for each of srun, container, interpreter and script."""
    # --wait: once one task has ended, the others must not wait for it until the time limit.
    # --export: with SBATCH_EXPORT=NONE srun would not export the variables of this script.
    lines = [f"srun --kill-on-bad-exit=1 --wait={slurm.grace // 2} --export=ALL"]
    lines += [" ".join(map(quote, slurm.srun))] if slurm.srun else []
    mounts = list(dict.fromkeys([*job.mounts, *slurm.container_mounts]))
    image = quote(slurm.container or "")
    if slurm.container and slurm.container_engine == "pyxis":
        pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        lines.append(
            f"--container-image={image} --container-mounts={quote(pairs)} --container-workdir={quote(mounts[0])}"
        )
    if slurm.container and slurm.container_engine == "edf":
        lines.append(f"--environment={image}")
    if slurm.torchrun and not job.search:
        # SLURM also signals torchrun, which would kill its workers before they have saved.
        lines.append("""bash -c 'trap "" USR1 USR2; exec "$@"' bash""")
    if slurm.container and slurm.container_engine == "apptainer":
        binds = " ".join(f"--bind {quote(mount)}" for mount in mounts)
        lines.append(f"apptainer exec{' --nv' if job.gpus else ''} {binds} {image}")
    lines.append(quote(str(slurm.python)))
    if slurm.torchrun and not job.search:
        lines[-1] += f" -m torch.distributed.run --nnodes={job.nodes} --nproc-per-node={job.devices}"
        lines.append('--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID"')
        lines.append('--rdzv-endpoint="$MASTER_ADDR:$((20000 + SLURM_JOB_ID % 10000))"')
    run = [f"resume={quote(str(job.folder))}", 'worker="$SLURM_ARRAY_TASK_ID"'] if job.search else ['"resume=$folder"']
    lines.append(" ".join([shlex.join(job.program), *run, *job.trust]))
    return lines
