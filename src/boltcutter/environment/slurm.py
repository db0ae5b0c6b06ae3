"""SLURM: which processes srun started, and whether they are those that the trainer expects.

``srun`` starts the tasks of a job step and tells each its rank. A batch script, and a shell inside an allocation, see
most of the same variables, although they are a single process: there Lightning starts the processes itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

SHELLS = ("bash", "interactive")  # job names that Lightning takes for a shell
SPECIAL_STEPS = 0xFFFFFFF0  # ids from here on: the batch script, the shell of salloc
OF_A_STEP = ("SLURM_NTASKS", "SLURM_STEP_ID")  # by which Lightning and Boltcutter recognize a task of srun

Env = Mapping[str, str]


def prepare(env: MutableMapping[str, str] = os.environ) -> None:
    """Let Lightning see a task of srun where this process is one, and a lone process everywhere else in a job.

    Lightning goes by the job's name and by ``SLURM_NTASKS``: it trains one copy of the run in each task of a job named
    ``bash``, and waits without end for the other tasks in a batch script that calls ``python`` without ``srun``.

    Args:
        env: Changed.
    """
    if "SLURM_JOB_ID" not in env or "RANK" in env or "LOCAL_RANK" in env:
        return  # of torchrun, mpirun, or started by Lightning
    if not is_task(env):
        for name in OF_A_STEP:
            env.pop(name, None)
        return
    # sbatch's own value may be that of another step, and without any Lightning refuses more than one task.
    env["SLURM_NTASKS_PER_NODE"] = str(max(tasks_per_node(env)))
    if env.get("SLURM_JOB_NAME") in SHELLS:
        env["SLURM_JOB_NAME"] = "srun"


def is_task(env: Env) -> bool:
    """Whether srun started this process to train, and not a shell from which a person started it."""
    if int(env.get("SLURM_STEP_ID", SPECIAL_STEPS)) >= SPECIAL_STEPS or _in_terminal(env):
        return False
    return env.get("SLURM_JOB_NAME") not in SHELLS or sum(tasks_per_node(env)) > 1


def tasks_per_node(env: Env) -> list[int]:
    """Tasks of the step on each of its nodes, from SLURM's ``2(x3),1``."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS", "1")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]


def mismatch(devices: int, processes: int, nodes: int, env: Env = os.environ) -> str | None:
    """What is wrong where the tasks of SLURM are not the processes that the trainer expects; one line with the remedy.

    Args:
        devices: Of each node, as the trainer has them.
        processes: Of each node that the strategy expects; one for all devices with some strategies.
        nodes: As the trainer has them.
        env: Of this process, prepared.
    """
    if "SLURM_JOB_ID" not in env or "RANK" in env or "LOCAL_RANK" in env:
        return None
    asked = f"trainer.devices={devices}, trainer.num_nodes={nodes}"
    wanted = f"--nodes={nodes} --ntasks-per-node={processes}"
    if "SLURM_STEP_ID" not in env:
        tasks = _tasks_of_job(env)
        if nodes > 1:
            return f"{asked}: python was started without srun, on one node; start it by srun {wanted} python …"
        if processes > 1 and tasks == processes:
            return f"{asked}: the job has {tasks} tasks, but python was started without srun; put srun before python"
        if processes > 1 and tasks:
            return f"{asked}: the job has {_count(tasks, 'task')}; ask for {wanted}, and put srun before python"
        return None
    each = tasks_per_node(env)
    on, total = _count(len(each), "node"), _count(sum(each), "task")
    if len(set(each)) > 1:
        return f"{asked}: srun started {total} on {on}, not as many on each ({each}); start them by srun {wanted}"
    if (each[0], len(each)) == (processes, nodes):
        return None
    fitting = f"trainer.devices={each[0]} trainer.num_nodes={len(each)}, or " if devices == processes else ""
    return f"{asked}: srun started {total} on {on}; try {fitting}srun {wanted}"


def idle_tasks(processes: int, env: Env = os.environ) -> str | None:
    """A note where one process trains, rightly, in a job of more tasks."""
    tasks = _tasks_of_job(env) if "SLURM_STEP_ID" not in env and "LOCAL_RANK" not in env else 0
    if processes > 1 or tasks < 2:
        return None
    return f"trainer.devices=1: the job has {tasks} tasks, of which this run uses one, as srun did not start it"


def _tasks_of_job(env: Env) -> int:
    """Tasks that a batch script, or an allocation with a name, asked for; 0 where it named no number."""
    if "SLURM_JOB_ID" not in env or env.get("SLURM_JOB_NAME") in SHELLS or _in_terminal(env):
        return 0
    return int(env.get("SLURM_NPROCS", 0))


def _in_terminal(env: Env) -> bool:
    """Whether a person's shell, as of ``srun --pty bash``, started this process."""
    if "SLURM_PTY_PORT" not in env or env.get("SLURM_TASK_PID") == str(os.getpid()):
        return False
    return any(os.isatty(number) for number in (0, 1, 2))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
