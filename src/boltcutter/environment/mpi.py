"""Processes that mpirun started, told to the rest in the words that it knows."""

from __future__ import annotations

import os
import zlib
from collections.abc import MutableMapping

PORTS = range(20_000, 32_000)  # below those that systems give out by themselves


class Scattered(ValueError):
    """Nobody has told where the first process is."""


def adopt(env: MutableMapping[str, str] = os.environ) -> None:
    """Where Open MPI started this process, set what torchrun would: ranks, sizes, and where ranks meet.

    What is set already stays. On one machine they meet at a port that follows from the job's name.

    Raises:
        Scattered: There are several machines, and ``MASTER_ADDR`` does not say which is the first.
    """
    if "OMPI_COMM_WORLD_RANK" not in env or "RANK" in env:
        return
    size, local = int(env["OMPI_COMM_WORLD_SIZE"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if size == 1:
        return
    if size > local and "MASTER_ADDR" not in env:
        raise Scattered(
            f"mpirun started {size} processes, {local} of them on this machine, but MASTER_ADDR is not set; "
            "say mpirun -x MASTER_ADDR=<the first machine>"
        )
    job = env.get("PMIX_NAMESPACE", "") + env.get("OMPI_MCA_orte_hnp_uri", "")
    rank = int(env["OMPI_COMM_WORLD_RANK"])
    told = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": env["OMPI_COMM_WORLD_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": str(local),
        "NODE_RANK": str(rank // local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORTS[zlib.crc32(job.encode()) % len(PORTS)]),
    }
    for name, value in told.items():
        env.setdefault(name, value)
