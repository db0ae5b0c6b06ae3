"""Processes that mpirun or horovodrun started, told to the rest in the words that it knows."""

from __future__ import annotations

import os
import zlib
from collections.abc import MutableMapping

PORTS = range(20_000, 32_000)  # below those that systems give out by themselves
# How MASTER_ADDR is said, and the variables of rank, size, and both on this machine.
LAUNCHERS = {
    "mpirun -x MASTER_ADDR=<the first machine>": (  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpirun -genv MASTER_ADDR <the first machine>": (  # MPICH
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
    "MASTER_ADDR=<the first machine> horovodrun": (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    ),
}
JOB = ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "HOROVOD_GLOO_RENDEZVOUS_PORT")  # of its own for each start
OF_SRUN = ("SLURM_NTASKS", "SLURM_STEP_ID")


def disable_mpi_detection() -> None:
    """Keep Lightning from importing mpi4py whenever a Trainer is made.

    The import starts MPI in each process, and where mpi4py is installed without an MPI library it raises a
    ``RuntimeError`` that Lightning does not expect. Processes of mpirun are known without it, see ``export_torchrun_env``.
    """
    from lightning.fabric.plugins.environments.mpi import MPIEnvironment  # the launcher does without Lightning

    MPIEnvironment.detect = staticmethod(lambda: False)  # type: ignore[method-assign]


class ProcessLayoutError(ValueError):
    """Nobody has told where the first process is, or the machines have not as many processes each."""


def export_torchrun_env(env: MutableMapping[str, str] = os.environ) -> None:
    """Where mpirun or horovodrun started this process, set what torchrun would: ranks, sizes, and where ranks meet.

    What is set already stays. On one machine they meet at a port that follows from the job's name.

    Raises:
        ProcessLayoutError: There are several machines, and ``MASTER_ADDR`` does not say which is the first, or one has fewer
            processes.
    """
    found = [(say, names) for say, names in LAUNCHERS.items() if env.keys() >= set(names)]
    if not found or "RANK" in env:
        return
    say, names = found[0]
    rank, size, local_rank, local = (int(env[name]) for name in names)
    if size == 1:
        return
    launcher = "horovodrun" if "horovodrun" in say else "mpirun"
    if size % local:
        raise ProcessLayoutError(
            f"{launcher} started {size} processes, {local} of them on this machine: give each machine as many"
        )
    if size > local and "MASTER_ADDR" not in env:
        raise ProcessLayoutError(
            f"{launcher} started {size} processes, {local} of them on this machine, but MASTER_ADDR is not set; "
            f"say {say}"
        )
    job = "".join(env.get(name, "") for name in JOB) or str(os.getppid())
    told = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local),
        "NODE_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(size // local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORTS[zlib.crc32(job.encode()) % len(PORTS)]),
    }
    for name, value in told.items():
        env.setdefault(name, value)
    for name in OF_SRUN:  # in a job of SLURM they tell of the process that started this one
        env.pop(name, None)
