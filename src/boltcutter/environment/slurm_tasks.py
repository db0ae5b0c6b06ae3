"""SLURM: detect whether srun started this process, and whether its tasks match the trainer.

``srun`` starts the tasks of a job step and sets the rank of each. A batch script, and an interactive shell in an
allocation, have most of the same variables although they are a single process: there Lightning starts the processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from boltcutter.config.errors import ConfigError
from boltcutter.topology import Topology

INTERACTIVE_JOB_NAMES = ("bash", "interactive")  # as Lightning detects an interactive shell
SPECIAL_STEP_IDS = 0xFFFFFFF0  # the first ID reserved for the batch script, the shell of salloc and the like
STEP_VARIABLES = ("SLURM_NTASKS", "SLURM_STEP_ID")  # by which Lightning and Boltcutter detect a task of srun

Env = Mapping[str, str]


def prepare(env: MutableMapping[str, str] = os.environ) -> None:
    """Change the variables so that Lightning detects a task of srun if, and only if, this process is one.

    Lightning relies on the job's name and on ``SLURM_NTASKS``: in a job named ``bash`` it trains an independent copy of
    the run in each task, and in a batch script that calls ``python`` without ``srun`` it waits forever for other tasks.

    Args:
        env: Environment variables of this process, changed in place.
    """
    if "SLURM_JOB_ID" not in env or "RANK" in env or "LOCAL_RANK" in env:
        return  # started by torchrun, mpirun or Lightning
    if not is_task(env):
        for name in STEP_VARIABLES:
            env.pop(name, None)
        return
    # The value inherited from sbatch may belong to another step, and without one Lightning refuses several tasks.
    env["SLURM_NTASKS_PER_NODE"] = str(max(tasks_per_node(env)))
    if env.get("SLURM_JOB_NAME") in INTERACTIVE_JOB_NAMES:
        env["SLURM_JOB_NAME"] = "srun"


def is_task(env: Env) -> bool:
    """Whether this process is a task of srun, rather than started from an interactive shell."""
    if int(env.get("SLURM_STEP_ID", SPECIAL_STEP_IDS)) >= SPECIAL_STEP_IDS or _in_terminal(env):
        return False
    return env.get("SLURM_JOB_NAME") not in INTERACTIVE_JOB_NAMES or sum(tasks_per_node(env)) > 1


def tasks_per_node(env: Env) -> list[int]:
    """Number of tasks of the step on each of its nodes, parsed from a value such as ``2(x3),1``."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS", "1")
    found = re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]


def check_tasks(topology: Topology) -> None:
    """Check that the tasks of SLURM match the trainer.

    Raises:
        ConfigError: They do not.
    """
    if fault := mismatch(topology):
        raise ConfigError(fault)


def mismatch(topology: Topology, env: Env = os.environ) -> str | None:
    """An error message, with the remedy, if the tasks of SLURM do not match the trainer; else None.

    Args:
        topology: Of the trainer.
        env: Environment variables of this process, after ``prepare``.
    """
    if "SLURM_JOB_ID" not in env or "RANK" in env or "LOCAL_RANK" in env:
        return None
    nodes, processes = topology.num_nodes, topology.num_processes
    options = f"--nodes={nodes} --ntasks-per-node={processes}"
    if "SLURM_STEP_ID" not in env:
        if nodes > 1 or (processes > 1 and _tasks_of_job(env)):
            return f"{topology}: python was started without srun; request {options}, and put srun before python"
        return None
    counts = tasks_per_node(env)
    if counts == [processes] * nodes:
        return None
    is_even = len(set(counts)) == 1 and topology.num_devices == processes
    overrides = f"trainer.devices={counts[0]} trainer.num_nodes={len(counts)}, or " if is_even else ""
    started = f"{_count(sum(counts), 'task')} on {_count(len(counts), 'node')}"
    return f"{topology}: srun started {started}; try {overrides}srun {options}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _tasks_of_job(env: Env) -> int:
    """Number of tasks that a batch script or a named allocation requested; 0 if unspecified."""
    if "SLURM_JOB_ID" not in env or env.get("SLURM_JOB_NAME") in INTERACTIVE_JOB_NAMES or _in_terminal(env):
        return 0
    return int(env.get("SLURM_NPROCS", 0))


def _in_terminal(env: Env) -> bool:
    """Whether this process was started from an interactive shell, such as ``srun --pty bash``."""
    if "SLURM_PTY_PORT" not in env or env.get("SLURM_TASK_PID") == str(os.getpid()):
        return False
    return any(os.isatty(number) for number in (0, 1, 2))
