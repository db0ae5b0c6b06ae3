"""The tables of machine types agree with what the platforms list, and devices are checked by them."""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from botocore.session import Session

from boltcutter_cloud.machines import Machine, check_devices, find_machine, read_machines
from boltcutter_launch.job import Job

# The answer of DescribeInstanceTypes in us-east-1, of which moto has a copy.
FILE = Path(str(find_spec("moto").origin)).parent / "ec2" / "resources" / "instance_types.json.gz"  # type: ignore[union-attr]


def test_ec2_has_these_machines() -> None:
    listed = json.loads(gzip.decompress(FILE.read_bytes()))
    for gpu_type, machines in read_machines("ec2")["gpus"].items():
        for name, count in machines.items():
            gpus = listed[name]["GpuInfo"]["Gpus"]
            assert (gpu_type, count) == (gpus[0]["Name"], sum(gpu["Count"] for gpu in gpus)), name
    without = [facts for name, facts in listed.items() if find_machine("ec2", name) == Machine(0, "")]
    assert len(without) > 50
    assert not any(facts.get("GpuInfo") for facts in without)


def test_sagemaker_has_these_machines() -> None:
    allowed = Session().get_service_model("sagemaker").shape_for("TrainingInstanceType").enum
    names = [f"ml.{name}" for machines in read_machines("ec2")["gpus"].values() for name in machines]
    assert set(names) <= set(allowed)


def test_names_of_machines_have_no_case() -> None:
    assert find_machine("azure", "STANDARD_NC24ADS_A100_V4") == Machine(1, "A100")
    assert find_machine("azure", "Standard_D8s_v5") == Machine(0, "")


def job(devices: int, *, gpus: bool = True) -> Job:
    return Job("name", Path("runs/name/1"), None, devices=devices, gpus=gpus)


def check(machine: str, given: Job) -> None:
    check_devices("launch.instance_type", machine, find_machine("ec2", machine), given)


def test_a_job_with_more_devices_than_the_machine_is_refused() -> None:
    check("g5.12xlarge", job(4))
    with pytest.raises(ValueError, match=r"^trainer.devices=5: .* has 4 A10G; try ") as error:
        check("g5.12xlarge", job(5))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^launch.instance_type=m5.xlarge .* trainer.accelerator=cpu"):
        check("m5.xlarge", job(1))


def test_processes_on_the_cpu_fit_on_each_machine(capsys: pytest.CaptureFixture[str]) -> None:
    check("m5.xlarge", job(8, gpus=False))
    assert not capsys.readouterr().err


def test_an_unknown_machine_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    check("g99.xlarge", job(64))
    assert "note: launch.instance_type=g99.xlarge" in capsys.readouterr().err
