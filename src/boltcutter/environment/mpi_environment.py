"""Processes that mpirun or horovodrun started: their variables translated to those of torchrun."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from boltcutter.environment.platform_facts import PlatformError, job_port

NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
# The command that sets MASTER_ADDR, and the variables of rank, world size, local rank and local world size.
LAUNCHERS = {
    "mpirun -x MASTER_ADDR=<the first machine>": tuple(f"OMPI_COMM_WORLD_{name}" for name in NAMES),  # Open MPI
    "mpirun -genv MASTER_ADDR <the first machine>": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "MASTER_ADDR=<the first machine> horovodrun": tuple(f"HOROVOD_{name}" for name in NAMES),
}
JOB_VARIABLES = ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "HOROVOD_GLOO_RENDEZVOUS_PORT")  # unique to each launch
SRUN_VARIABLES = ("SLURM_NTASKS", "SLURM_STEP_ID")


class ProcessLayoutError(PlatformError):
    """``MASTER_ADDR`` is missing, or the nodes run different numbers of processes."""


def export_torchrun_env(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torchrun sets, if mpirun or horovodrun started this process.

    Variables that are already set are not changed. On a single node, ``MASTER_PORT`` is derived from the job's name.

    Raises:
        ProcessLayoutError: There are several nodes and ``MASTER_ADDR`` is not set, or the nodes run different numbers
            of processes.
    """
    found = [(command, names) for command, names in LAUNCHERS.items() if env.keys() >= set(names)]
    if not found or "RANK" in env:
        return
    command, names = found[0]
    rank, world_size, local_rank, local_world_size = (int(env[name]) for name in names)
    if world_size == 1:
        return
    launcher = "horovodrun" if "horovodrun" in command else "mpirun"
    started = f"{launcher} started {world_size} processes, {local_world_size} of them on this machine"
    if world_size % local_world_size:
        raise ProcessLayoutError(f"{started}; start the same number on each machine")
    if world_size > local_world_size and "MASTER_ADDR" not in env:
        raise ProcessLayoutError(f"{started}, but MASTER_ADDR is not set; use {command}")
    job = "".join(env.get(name, "") for name in JOB_VARIABLES) or str(os.getppid())
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    numbers |= {"NODE_RANK": rank // local_world_size, "GROUP_WORLD_SIZE": world_size // local_world_size}
    for name, value in (numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job_port(job)}).items():
        env.setdefault(name, str(value))
    for name in SRUN_VARIABLES:  # in a SLURM job they describe mpirun itself, not this process
        env.pop(name, None)
