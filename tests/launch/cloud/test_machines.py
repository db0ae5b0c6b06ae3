"""Devices are checked by the table of machine types."""

from pathlib import Path

import pytest

from boltcutter.launch.cloud.machines import Machine, check_devices, find_machine
from boltcutter.launch.job import Job


def test_names_of_machines_have_no_case() -> None:
    assert find_machine("azure", "STANDARD_NC24ADS_A100_V4") == Machine(1, "A100")
    assert find_machine("azure", "Standard_D8s_v5") == Machine(0, "")


def job(devices: int, *, gpus: bool = True) -> Job:
    return Job("name", Path("runs/name/1"), None, devices=devices, gpus=gpus)


def check(machine: str, given: Job) -> None:
    check_devices("launch.instance_type", machine, find_machine("azure", machine), given)


def test_a_job_with_more_devices_than_the_machine_is_refused() -> None:
    check("Standard_NC64as_T4_v3", job(4))
    with pytest.raises(ValueError, match=r"^trainer.devices=5: .* has 4 T4; try ") as error:
        check("Standard_NC64as_T4_v3", job(5))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^launch.instance_type=Standard_D8s_v5 .* trainer.accelerator=cpu"):
        check("Standard_D8s_v5", job(1))


def test_processes_on_the_cpu_fit_on_each_machine(capsys: pytest.CaptureFixture[str]) -> None:
    check("Standard_D8s_v5", job(8, gpus=False))
    assert not capsys.readouterr().err


def test_an_unknown_machine_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    check("Standard_X99", job(64))
    assert "note: launch.instance_type=Standard_X99" in capsys.readouterr().err
