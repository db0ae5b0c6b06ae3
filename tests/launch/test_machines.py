"""The tables of machine types agree with what the platforms list, and devices are checked by them."""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from botocore.session import Session

from boltcutter.launch.job import Job
from boltcutter.launch.machines import EC2, SAGEMAKER, Machine, check_devices

# The answer of DescribeInstanceTypes in us-east-1, of which moto has a copy.
FILE = Path(str(find_spec("moto").origin)).parent / "ec2" / "resources" / "instance_types.json.gz"  # type: ignore[union-attr]


def test_ec2_has_these_machines() -> None:
    listed = json.loads(gzip.decompress(FILE.read_bytes()))
    for name, machine in EC2.items():
        gpus = [gpu for info in [listed[name].get("GpuInfo") or {}] for gpu in info.get("Gpus", ())]
        expected = Machine(
            sum(gpu["Count"] for gpu in gpus),
            gpus[0]["Name"] if gpus else "",
            listed[name]["VCpuInfo"]["DefaultVCpus"],
        )
        assert machine == expected, name


def test_sagemaker_has_these_machines() -> None:
    allowed = Session().get_service_model("sagemaker").shape_for("TrainingInstanceType").enum
    assert SAGEMAKER.keys() <= set(allowed)


def job(devices: int, *, gpus: bool = True) -> Job:
    return Job("name", Path("runs/name/1"), None, devices=devices, gpus=gpus)


def test_a_job_with_more_devices_than_the_machine_is_refused() -> None:
    check_devices("launch.instance_type", "g5.12xlarge", EC2, job(4))
    with pytest.raises(ValueError, match=r"^trainer.devices=5: .* has 4 A10G; try ") as error:
        check_devices("launch.instance_type", "g5.12xlarge", EC2, job(5))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^launch.instance_type=m5.xlarge .* trainer.accelerator=cpu"):
        check_devices("launch.instance_type", "m5.xlarge", EC2, job(1))


def test_processes_on_the_cpu_fit_on_each_machine(capsys: pytest.CaptureFixture[str]) -> None:
    check_devices("launch.instance_type", "m5.xlarge", EC2, job(8, gpus=False))
    assert not capsys.readouterr().err


def test_an_unknown_machine_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    check_devices("launch.instance_type", "g99.xlarge", EC2, job(64))
    assert "note: launch.instance_type=g99.xlarge" in capsys.readouterr().err
