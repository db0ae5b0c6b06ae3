"""Machine types of clouds, so that a job that does not fit on one is refused before it is submitted.

One table for each platform, by the platform's own names. A type that is not in the table is not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

from boltcutter.launch.job import Job


class Machine(NamedTuple):
    """What a machine type has.

    Args:
        gpus: Number of GPUs.
        gpu_type: GPU type as the platform names it; empty without GPUs.
        cpus: Number of virtual CPUs.
    """

    gpus: int
    gpu_type: str
    cpus: int


def check_devices(setting: str, machine: str, machines: Mapping[str, Machine], job: Job) -> None:
    """Check that a machine has the devices of a job; prints a note if the type is not in the table.

    Args:
        setting: Name of the setting that selects the machine, such as launch.instance_type.
        machine: Machine type.
        machines: Table of the platform.
        job: The job.

    Raises:
        ValueError: It has not.
    """
    if not job.gpus:
        return
    if (known := machines.get(machine)) is None:
        print(f"note: {setting}={machine} is not a known type, so its GPUs were not checked", file=sys.stderr)
    elif not known.gpus:
        raise ValueError(f"{setting}={machine} has no GPUs; choose one with GPUs, or set trainer.accelerator=cpu")
    elif job.devices > known.gpus:
        raise ValueError(
            f"trainer.devices={job.devices}: {setting}={machine} has {known.gpus} {known.gpu_type}; "
            f"try trainer.devices={known.gpus}, a larger machine or more nodes"
        )


def _ec2(family: str, gpu_type: str = "", **gpus: int) -> dict[str, Machine]:
    """Return the sizes of a family, such as ``_8xlarge``, whose number of CPUs the size determines: 4 for xlarge."""
    sizes = {size.strip("_"): count for size, count in gpus.items()}
    cpus = {size: 2 if size == "large" else 4 * int(size.removesuffix("xlarge") or 1) for size in sizes}
    return {f"{family}.{size}": Machine(count, gpu_type, cpus[size]) for size, count in sizes.items()}


_GRAPHICS = {"xlarge": 1, "_2xlarge": 1, "_4xlarge": 1, "_8xlarge": 1, "_16xlarge": 1, "_12xlarge": 4}
_LARGE = {"_24xlarge": 4, "_48xlarge": 8}
_RTX = {"_2xlarge": 1, "_4xlarge": 1, "_8xlarge": 1, "_12xlarge": 2, **_LARGE}
_FIFTH = dict.fromkeys(("large", "xlarge", "_2xlarge", "_4xlarge", "_12xlarge", "_24xlarge"), 0)
_SIXTH = _FIFTH | dict.fromkeys(("_8xlarge", "_16xlarge", "_32xlarge"), 0)
_SEVENTH = _FIFTH | dict.fromkeys(("_8xlarge", "_16xlarge", "_48xlarge"), 0)

# https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html and, without GPUs, …/gp.html, …/co.html and …/mo.html
EC2: dict[str, Machine] = {
    **_ec2("g4dn", "T4", **_GRAPHICS),
    **_ec2("g5", "A10G", **_GRAPHICS, **_LARGE),
    **_ec2("g6", "L4", **_GRAPHICS, **_LARGE),
    **_ec2("g6e", "L40S", **_GRAPHICS, **_LARGE),
    **_ec2("g7", "RTX PRO 4500", **_RTX),
    **_ec2("g7e", "RTX PRO Server 6000", **_RTX),
    **_ec2("p3dn", "V100", _24xlarge=8),
    **_ec2("p4d", "A100", _24xlarge=8),
    **_ec2("p4de", "A100", _24xlarge=8),
    **_ec2("p5", "H100", _4xlarge=1, _48xlarge=8),
    **_ec2("p5e", "H200", _48xlarge=8),
    **_ec2("p5en", "H200", _48xlarge=8),
    **_ec2("p6-b200", "B200", _48xlarge=8),
    **_ec2("p6-b300", "B300", _48xlarge=8),
    **{name: machine for family in ("m5", "r5") for name, machine in _ec2(family, **_FIFTH).items()},
    **{name: machine for family in ("c6i", "m6i", "r6i") for name, machine in _ec2(family, **_SIXTH).items()},
    **{name: machine for family in ("c7i", "m7i", "r7i") for name, machine in _ec2(family, **_SEVENTH).items()},
}
# The same, with a prefix: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ResourceConfig.html
SAGEMAKER = {f"ml.{name}": machine for name, machine in EC2.items() if name != "c6i.large"}
