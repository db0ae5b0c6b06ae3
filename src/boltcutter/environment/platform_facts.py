"""What the platform that started this process has said, in variables that readers of ranks set beside torchrun's."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence

PLATFORM = "BOLTCUTTER_PLATFORM"  # name of the platform; set once its variables have been read, and inherited
NODES = "BOLTCUTTER_NODES"  # number of nodes; the default of trainer.num_nodes
DEVICES = "BOLTCUTTER_DEVICES"  # number of processes that the platform expects on each node, if it specifies one
GPUS = "BOLTCUTTER_GPUS"  # number of GPUs on each node for which the job has asked; set by launchers
JOB = "BOLTCUTTER_JOB"  # ID of the job, unchanged by a restart

Env = Mapping[str, str]


class PlatformError(ValueError):
    """The environment variables do not determine the rank of this process."""


def launched_layout(env: Env = os.environ) -> tuple[str, int, int | None] | None:
    """The platform, its number of nodes and of processes on each, after ``rank_readers``; None without a platform."""
    if NODES not in env:
        return None
    return env[PLATFORM], int(env[NODES]), int(env[DEVICES]) if DEVICES in env else None


def job_run_id(overrides: Sequence[str], env: Env = os.environ) -> str | None:
    """The run ID of these overrides in the platform's job, unchanged by a restart; None without a job ID."""
    return f"{env[JOB]}-{digest(overrides)}" if JOB in env else None


def digest(overrides: Sequence[str]) -> str:
    """Checksum of the overrides, as eight hexadecimal digits."""
    return f"{zlib.crc32(' '.join(overrides).encode()):08x}"


def job_port(job: str) -> int:
    """A port that depends only on the job, below the ephemeral range of common systems."""
    return 20_000 + zlib.crc32(job.encode()) % 12_000


def disable_mpi_detection() -> None:
    """Prevent Lightning from importing mpi4py whenever a ``Trainer`` is constructed.

    The import initializes MPI in each process, and if mpi4py is installed without an MPI library it raises a
    ``RuntimeError`` that Lightning does not expect. Ranks of mpirun are read by the part that supports it.
    """
    from lightning.fabric.plugins.environments.mpi import MPIEnvironment  # imported late: launching needs no Lightning

    MPIEnvironment.detect = staticmethod(lambda: False)  # type: ignore[method-assign]
