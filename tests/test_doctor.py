import re
import subprocess
from collections.abc import Callable
from email.message import Message

import pytest
from foreign.gallery import overrides

from boltcutter import doctor
from boltcutter.doctor import backends, extras, machine, works
from boltcutter.project import Project

PROJECT = Project.find(__file__)
Script = Callable[..., subprocess.CompletedProcess[str]]


def test_what_works_here_and_what_the_rest_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    told = dict(works(PROJECT))
    assert {f"trainer={option}" for option in PROJECT.groups()["trainer"]} < told.keys()
    assert told["trainer=default"] == told["trainer=ddp"] == told["trainer.precision=bf16-mixed"] == "yes"
    assert told["trainer=mpi"] == "no: mpirun is not here; apt-get install openmpi-bin"
    assert told["launch=slurm"].startswith("no: sbatch is not here")
    assert told["launch=local"] == "yes"
    assert told["trainer.precision=16-true"].startswith("no: trainer.precision=16-true: optimizer.eps")
    assert all("\n" not in text for text in told.values())


def test_extras_that_are_missing_say_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Message()
    for extra in ("here", "away"):
        told["Provides-Extra"] = extra
    needs = ["torch>=2", "torch>=2 ; extra == 'here'", "no-such-package ; extra == 'away'"]
    monkeypatch.setattr(doctor.metadata, "metadata", lambda project: told)
    monkeypatch.setattr(doctor.metadata, "requires", lambda project: needs)
    monkeypatch.setattr(doctor, "_fault", lambda configs, words: None)
    assert extras() == {"here": [], "away": ["no-such-package"]}
    shown = dict(works(PROJECT))
    assert shown["extra away"] == "no: needs no-such-package; pip install -c constraints.txt -e '.[away]'"
    assert shown["extra here"] == "yes"


def test_the_machine() -> None:
    told = dict(machine())
    assert re.search(r"\d+ cores, [\d.]+ GiB, [\d.]+ .iB of it free", told["processor"])
    assert "gloo yes" in told["backends"]
    assert backends()["nccl"] is False
    assert re.search(r"torch computes with \d+", told["threads"])


def test_the_script(script: Script) -> None:
    done = script("check", "doctor", "model=mlp", "devices=8", "memory=80GiB")
    assert done.returncode == 0, done.stderr
    assert "\nwhat works here\n" in done.stdout
    assert re.search(r"memory of model=mlp, data=digits, 32-true: 64 samples a step, 8 × 80.0 GiB", done.stdout)
    assert re.search(r"\n  take +trainer=ddp trainer.devices=8\n", done.stdout)
    assert not done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_a_mistake_is_one_line(words: list[str], message: str, script: Script) -> None:
    done = script("check", "doctor", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


def test_data_without_a_known_batch_is_not_estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for section in ("machine", "works"):
        monkeypatch.setattr(doctor, section, lambda *given: iter([("nothing", "to see")]))
    doctor.main(PROJECT, overrides("own_loaders"))
    assert "not estimated  data=none has no batch_size" in capsys.readouterr().out
