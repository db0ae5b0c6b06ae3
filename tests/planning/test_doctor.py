import re
import sys

import pytest
from conftest import run_command
from third_party.gallery import overrides

from boltcutter.cli.commands import commands
from boltcutter.cli.main import dispatch_command
from boltcutter.planning import doctor
from boltcutter.planning.doctor import backends, machine, works
from boltcutter.project import Project

PROJECT = Project.find(__file__)


@pytest.mark.slow
def test_missing_requirements_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    found = dict(works(PROJECT))
    assert {f"trainer={option}" for option in PROJECT.groups()["trainer"]} < found.keys()
    assert found["trainer=default"] == found["trainer=ddp"] == found["trainer.precision=bf16-mixed"] == "yes"
    assert found["trainer=mpi"] == "no: mpirun is not installed; apt-get install openmpi-bin"
    assert found["launch=slurm"].startswith("no: sbatch is not installed")
    assert found["launch=local"] == "yes"
    assert found["trainer.precision=16-true"].startswith("no: trainer.precision=16-true: optimizer.eps")
    assert all("\n" not in text for text in found.values())


def test_hardware_and_backends_are_reported() -> None:
    found = dict(machine())
    assert re.search(r"\d+ cores, [\d.]+ GiB, [\d.]+ .iB free", found["CPU"])
    assert "gloo yes" in found["backends"]
    assert backends()["nccl"] is False
    assert re.search(r"torch \d+", found["threads"])


@pytest.mark.slow
def test_the_command_recommends_a_strategy() -> None:
    command = [sys.executable, "-m", "boltcutter", "doctor", "model=mlp", "devices=8", "memory=80GiB"]
    done = run_command(command)
    assert done.returncode == 0, done.stderr
    assert "\nwhat works on this machine\n" in done.stdout
    assert re.search(r"memory of model=mlp, data=digits, 32-true: 64 samples per step, 8 × 80.0 GiB", done.stdout)
    assert re.search(r"\n  recommended +trainer=ddp trainer.devices=8\n", done.stdout)
    assert not done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["devices=0"], "devices=0 is not a number of devices; try devices=8"),
        (["memory=80"], "memory=80 is not an amount of memory; try memory=80GiB"),
        (
            ["task=regression"],
            "task=regression expects regression data, but data=digits is classification data; try task=classification",
        ),
        (["model=mpl"], "model=mpl: no such option; did you mean mlp?"),
        (["run=/nowhere"], "run=/nowhere: no run there"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        dispatch_command(PROJECT, commands()["doctor"], None, arguments)
    out, error = capsys.readouterr()
    assert (exited.value.code, out) == (2, "")
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_data_without_a_known_batch_is_not_estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for section in ("machine", "works"):
        monkeypatch.setattr(doctor, section, lambda *given: iter([("name", "value")]))
    doctor.doctor_command(PROJECT, overrides("own_loaders"))
    assert "not estimated  data=none has no known batch_size" in capsys.readouterr().out
