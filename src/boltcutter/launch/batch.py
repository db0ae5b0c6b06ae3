"""The text of a batch script, from settings and a job alone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from boltcutter.launch.job import Job, assignments, code_path, quote

if TYPE_CHECKING:
    from boltcutter.launch.slurm import SlurmLauncher

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
kinds=(-name '*.ckpt' -o -name metrics.csv) # and no probe, draft, or folder that one of them has touched
saved=$(find "$folder/%(progress)s" -type f -newer "$starts" \( "${kinds[@]}" \) -print -quit 2>/dev/null)
if [ -e "$mark" ] || [ -n "$saved" ]; then
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
    cause="stopped by $(cat "$mark")"
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
# Where SLURM gave this node up, it has started the job again elsewhere: that start is not to be cut short.
now=$(scontrol -o show job "$job" 2>/dev/null | grep -m 1 -oE 'Restarts=[0-9]+')
if [ -n "$now" ] && [ "$now" != "Restarts=${SLURM_RESTART_COUNT:-0}" ]; then
    say "$cause; job $job has been started again elsewhere"
    exit 1
fi
say "$cause; requeue"
trap - TERM
scontrol requeue "$job" && sleep 600 # SLURM ends this script
say "SLURM did not requeue the job"
exit 1
"""


def render(slurm: SlurmLauncher, job: Job) -> str:
    """The sbatch file."""
    task = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.tasks else "$SLURM_JOB_ID"
    folder = shlex.quote(job.run("")) + "$SLURM_ARRAY_TASK_ID" if job.tasks else shlex.quote(str(job.folder))
    parts = ["#!/bin/bash", *_directives(slurm, job), "", f"folder={folder} job={task}", TEXT.strip()]
    if slurm.chain > 1:
        parts.append(CHAIN.rstrip())
    parts += [(STARTS % {"progress": job.progress}).rstrip(), *_setup(slurm, job)]
    parts.append((RUN % {"srun": " \\\n    ".join(_srun(slurm, job))}).rstrip())
    parts.append((NEXT if slurm.chain > 1 else REQUEUE % {"restarts": slurm.max_restarts}).strip())
    return "\n".join(parts) + "\n"


def _directives(slurm: SlurmLauncher, job: Job) -> Iterator[str]:
    cpus = slurm.cpus(job)
    tasks, cpus = (1, job.devices * cpus) if slurm.torchrun else (job.devices, cpus)
    gpus = f"{slurm.gpu_type}:{job.devices}" if slurm.gpu_type else job.devices
    gpus_by = slurm.gpu_option if job.gpus and slurm.gpu_option != "none" else None
    options: dict[str, str | int | bool | None] = {
        "job-name": re.sub(r"\s", "-", job.name),
        "nodes": job.nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": cpus,
        **({gpus_by: f"gpu:{gpus}" if gpus_by == "gres" else gpus} if gpus_by else {}),
        "time": slurm.time,
        "signal": f"USR2@{slurm.grace}",
        "requeue" if slurm.max_restarts else "no-requeue": True,
        "output": (job.run("").replace("%", "%%") + "%a" if job.tasks else str(job.folder).replace("%", "%%"))
        + "/logs/slurm.log",
        "open-mode": "append",
        "array": f"0-{job.tasks - 1}" + (f"%{slurm.max_parallel}" if slurm.max_parallel else "") if job.tasks else None,
        **{key: getattr(slurm, key) for key in ("partition", "account", "qos", "constraint", "exclusive")},
        "mem": slurm.memory,
    }
    for key, value in options.items():
        if value not in (None, False):
            yield f"#SBATCH --{key}" + ("" if value is True else f"={directive(str(value))}")
    yield from (f"#SBATCH {option}" for option in slurm.sbatch)


def directive(text: str) -> str:
    """A value as sbatch reads it from a file: quotes and backslashes escaped, all else as it is between quotes."""
    if re.fullmatch(r"[\w@%+=:,./&|*\[\]-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _setup(slurm: SlurmLauncher, job: Job) -> list[str]:
    lines = ["module purge"] if slurm.purge_modules else []
    lines += [f"module load {shlex.join(slurm.modules)}"] if slurm.modules else []
    if slurm.conda:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {quote(slurm.conda)}"]
    if slurm.venv:
        lines.append(f"source {quote(f'{slurm.venv}/bin/activate')}")
    lines += slurm.setup
    if lines:
        failed = """trap 'say "the setup of the job failed with status $? at: $BASH_COMMAND"' ERR"""
        lines = ["", failed, "set -e", *lines, "set +e", "trap - ERR"]
    cpus = slurm.cpus(job)
    variables = {"OMP_NUM_THREADS": str(cpus)}
    # From 22.05 on srun does not take the number from sbatch.
    variables["SRUN_CPUS_PER_TASK"] = str(cpus * job.devices if slurm.torchrun else cpus)
    if slurm.interface:
        variables |= {"GLOO_SOCKET_IFNAME": slurm.interface, "NCCL_SOCKET_IFNAME": slurm.interface}
    return [*lines, "", *assignments({**variables, **job.environment, **slurm.environment}), *code_path(job)]


def _srun(slurm: SlurmLauncher, job: Job) -> list[str]:
    """Arguments of a command, some to a line: the step, the container, the interpreter, the script."""
    # --wait: a process that waits for one that has ended does so in vain, but never until the time is over.
    # --export: with SBATCH_EXPORT=NONE srun would not pass on what this script sets.
    lines = [f"srun --kill-on-bad-exit=1 --wait={slurm.grace // 2} --export=ALL"]
    lines += [" ".join(map(quote, slurm.srun))] if slurm.srun else []
    mounts = list(dict.fromkeys([*job.places, *slurm.container_mounts]))
    image = quote(slurm.container or "")
    if slurm.container and slurm.container_engine == "pyxis":
        pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        lines.append(
            f"--container-image={image} --container-mounts={quote(pairs)} --container-workdir={quote(mounts[0])}"
        )
    if slurm.container and slurm.container_engine == "edf":
        lines.append(f"--environment={image}")
    if slurm.torchrun:
        # SLURM signals torchrun, too, which would end its processes before they have saved.
        lines.append("""bash -c 'trap "" USR1 USR2; exec "$@"' bash""")
    if slurm.container and slurm.container_engine == "apptainer":
        binds = " ".join(f"--bind {quote(mount)}" for mount in mounts)
        lines.append(f"apptainer exec{' --nv' if job.gpus else ''} {binds} {image}")
    lines.append(quote(slurm.python))
    if slurm.torchrun:
        lines[-1] += f" -m torch.distributed.run --nnodes={job.nodes} --nproc-per-node={job.devices}"
        lines.append('--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID"')
        lines.append('--rdzv-endpoint="$MASTER_ADDR:$((20000 + SLURM_JOB_ID % 10000))"')
    lines.append(" ".join([shlex.quote(str(job.script)), '"resume=$folder"', *job.trust]))
    return lines
