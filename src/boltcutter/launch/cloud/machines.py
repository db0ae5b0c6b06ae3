"""Machine types of clouds, so that a job that does not fit on one is refused before it is submitted."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from boltcutter.launch.job import Job


class Machine(NamedTuple):
    """The number of GPUs of a machine type, and their type as the platform names it, which is empty without GPUs."""

    gpus: int
    gpu_type: str


@cache
def read_machines(platform: str) -> dict[str, Any]:
    """Return the machine types of vertex or azure from ``machines.yaml``."""
    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())[platform])


def find_machine(platform: str, name: str) -> Machine | None:
    """Return what a machine type has; None if it is not in the table. Upper and lower case are the same."""
    known, name = read_machines(platform), name.lower()
    for gpu_type, machines in known["gpus"].items():
        for machine, gpus in machines.items():
            if machine.lower() == name:
                return Machine(gpus, gpu_type)
    return Machine(0, "") if name.startswith(tuple(known["without_gpus"])) else None


def check_devices(setting: str, name: str, machine: Machine | None, job: Job) -> None:
    """Raise ValueError if a machine, the value of ``setting``, has too few GPUs for a job; unknown ones are a note."""
    if not job.gpus:
        return
    if machine is None:
        print(f"note: {setting}={name} is not a known type, so its GPUs were not checked", file=sys.stderr)
    elif not machine.gpus:
        raise ValueError(f"{setting}={name} has no GPUs; choose one with GPUs, or set trainer.accelerator=cpu")
    elif job.devices > machine.gpus:
        raise ValueError(
            f"trainer.devices={job.devices}: {setting}={name} has {machine.gpus} {machine.gpu_type}; "
            f"try trainer.devices={machine.gpus}, a larger machine or more nodes"
        )
