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


def _ec2(family: str, gpu_type: str, sizes: Mapping[str, int]) -> dict[str, Machine]:
    """Return the machines of a family from the GPUs of each size, which determines the CPUs: 4 for xlarge."""
    cpus = {size: 2 if size == "large" else 4 * int(size.removesuffix("xlarge") or 1) for size in sizes}
    return {f"{family}.{size}": Machine(gpus, gpu_type, cpus[size]) for size, gpus in sizes.items()}


_GRAPHICS = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1, "12xlarge": 4}
_LARGE = {"24xlarge": 4, "48xlarge": 8}
_RTX = {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, **_LARGE}
_FIFTH = dict.fromkeys(("large", "xlarge", "2xlarge", "4xlarge", "12xlarge", "24xlarge"), 0)
_SIXTH = _FIFTH | dict.fromkeys(("8xlarge", "16xlarge", "32xlarge"), 0)
_SEVENTH = _FIFTH | dict.fromkeys(("8xlarge", "16xlarge", "48xlarge"), 0)
_GENERAL = {"m5": _FIFTH, "r5": _FIFTH, "c6i": _SIXTH, "m6i": _SIXTH, "r6i": _SIXTH}
_GENERAL |= {"c7i": _SEVENTH, "m7i": _SEVENTH, "r7i": _SEVENTH}

# https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html and, without GPUs, …/gp.html, …/co.html and …/mo.html
EC2: dict[str, Machine] = {
    **_ec2("g4dn", "T4", _GRAPHICS),
    **_ec2("g5", "A10G", _GRAPHICS | _LARGE),
    **_ec2("g6", "L4", _GRAPHICS | _LARGE),
    **_ec2("g6e", "L40S", _GRAPHICS | _LARGE),
    **_ec2("g7", "RTX PRO 4500", _RTX),
    **_ec2("g7e", "RTX PRO Server 6000", _RTX),
    **_ec2("p3dn", "V100", {"24xlarge": 8}),
    **_ec2("p4d", "A100", {"24xlarge": 8}),
    **_ec2("p4de", "A100", {"24xlarge": 8}),
    **_ec2("p5", "H100", {"4xlarge": 1, "48xlarge": 8}),
    **_ec2("p5e", "H200", {"48xlarge": 8}),
    **_ec2("p5en", "H200", {"48xlarge": 8}),
    **_ec2("p6-b200", "B200", {"48xlarge": 8}),
    **_ec2("p6-b300", "B300", {"48xlarge": 8}),
    **{name: machine for family, sizes in _GENERAL.items() for name, machine in _ec2(family, "", sizes).items()},
}
# The same, with a prefix: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ResourceConfig.html
SAGEMAKER = {f"ml.{name}": machine for name, machine in EC2.items() if name != "c6i.large"}


def _google(family: str, sizes: str, gpu_type: str = "", gpus: str = "", suffix: str = "") -> dict[str, Machine]:
    """Return the sizes of a family, such as n2-standard-8, whose number is that of CPUs.

    Args:
        family: Name before the number of CPUs.
        sizes: Numbers of CPUs.
        gpu_type: GPU type.
        gpus: Number of GPUs of each size.
        suffix: Letter after a number of GPUs, which then names the size.
    """
    cpus, counts = [int(size) for size in sizes.split()], [int(count) for count in gpus.split()]
    names = [f"{family}-{count}{suffix}" for count in counts] if suffix else [f"{family}-{size}" for size in cpus]
    rows = zip(names, counts or [0] * len(cpus), cpus, strict=True)
    return {name: Machine(count, gpu_type, size) for name, count, size in rows}


_A100, _L4, _RTX_PRO = "NVIDIA_TESLA_A100", "NVIDIA_L4", "NVIDIA_RTX_PRO_6000"
# Machines with GPUs: https://cloud.google.com/compute/docs/gpus; others, and the names of GPUs:
# https://cloud.google.com/vertex-ai/docs/training/configure-compute, …/docs/reference/rest/v1/MachineSpec
VERTEX: dict[str, Machine] = {
    **_google("a2-highgpu", "12 24 48 96", _A100, "1 2 4 8", "g"),
    **_google("a2-megagpu", "96", _A100, "16", "g"),
    **_google("a2-ultragpu", "12 24 48 96", "NVIDIA_A100_80GB", "1 2 4 8", "g"),
    **_google("a3-highgpu", "26 52 104 208", "NVIDIA_H100_80GB", "1 2 4 8", "g"),
    **_google("a3-megagpu", "208", "NVIDIA_H100_MEGA_80GB", "8", "g"),
    **_google("a3-ultragpu", "224", "NVIDIA_H200_141GB", "8", "g"),
    **_google("a4-highgpu", "224", "NVIDIA_B200", "8", "g"),
    **_google("a4x-highgpu", "140", "NVIDIA_GB200", "4", "g"),
    **_google("g2-standard", "4 8 12 16 24 32 48 96", _L4, "1 1 1 1 2 1 4 8"),
    **_google("g4-standard", "48 96 192 384", _RTX_PRO, "1 2 4 8"),
    **_google("n1-standard", "4 8 16 32 64 96"),
    **_google("n1-highmem", "2 4 8 16 32 64 96"),
    **_google("n1-highcpu", "16 32 64 96"),
    **_google("n2-standard", "4 8 16 32 48 64 80"),
    **_google("n2-highmem", "2 4 8 16 32 48 64 80"),
    **_google("n2-highcpu", "16 32 48 64 80"),
    **_google("e2-standard", "4 8 16 32"),
    **_google("e2-highmem", "2 4 8 16"),
    **_google("e2-highcpu", "16 32"),
    **_google("c2-standard", "4 8 16 30 60"),
}
# GPUs that are attached to n1 machines: the largest number of CPUs for each possible number of GPUs, same page
VERTEX_ATTACHABLE = {
    "NVIDIA_TESLA_T4": {1: 48, 2: 48, 4: 96},
    "NVIDIA_TESLA_P4": {1: 24, 2: 48, 4: 96},
    "NVIDIA_TESLA_P100": {1: 16, 2: 32, 4: 96},
    "NVIDIA_TESLA_V100": {1: 12, 2: 24, 4: 48, 8: 96},
}


def _azure(gpu_type: str, **gpus: int) -> dict[str, Machine]:
    """Return sizes, whose names contain their number of CPUs: ``Standard_NC24ads_A100_v4`` has 24."""
    cpus = {size: int("".join(filter(str.isdigit, size.partition("_")[0]))) for size in gpus}
    return {f"Standard_{size}": Machine(count, gpu_type, cpus[size]) for size, count in gpus.items()}


# https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/nc-family and, by series, …/nd-family,
# …/nv-family and, without GPUs, https://learn.microsoft.com/azure/virtual-machines/sizes/general-purpose/dsv5-series.
# NV6ads_A10_v5 to NV18ads_A10_v5 have a part of one GPU.
AZURE: dict[str, Machine] = {
    **_azure("T4", NC4as_T4_v3=1, NC8as_T4_v3=1, NC16as_T4_v3=1, NC64as_T4_v3=4),
    **_azure("A100", NC24ads_A100_v4=1, NC48ads_A100_v4=2, NC96ads_A100_v4=4),
    **_azure("H100", NC40ads_H100_v5=1, NC80adis_H100_v5=2),
    **_azure("V100", ND40rs_v2=8),
    **_azure("A100", ND96asr_v4=8, ND96amsr_A100_v4=8),
    **_azure("H100", ND96isr_H100_v5=8),
    **_azure("H200", ND96isr_H200_v5=8),
    **_azure("MI300X", ND96isr_MI300X_v5=8),
    **_azure("A10", NV6ads_A10_v5=1, NV12ads_A10_v5=1, NV18ads_A10_v5=1, NV36ads_A10_v5=1, NV36adms_A10_v5=1),
    **_azure("A10", NV72ads_A10_v5=2),
    **_azure("", **{f"D{cpus}s_v5": 0 for cpus in (2, 4, 8, 16, 32, 48, 64, 96)}),
}
