"""Starting in the folder of an existing run."""

import json
from pathlib import Path

import pytest
from conftest import QUICK, Script

from boltcutter.run.restart import changed_settings

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "try", "SLURM_NNODES": "1", "SLURM_NTASKS": "1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TASK = JOB | STEP | {"SLURM_STEP_TASKS_PER_NODE": "1"}
OVERRIDES = [
    *QUICK,
    "model=linear",
    "data.num_workers=0",
    "trainer.max_epochs=1",
    "trainer.accelerator=cpu",
    "test=false",
]


@pytest.fixture(scope="module")
def begun(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in a SLURM job."""
    folder = tmp_path_factory.mktemp("restart") / "run"
    done = script("train", *OVERRIDES, f"folder={folder}", env=TASK)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_requeued_job_continues_the_run_in_its_folder(script: Script, begun: Path) -> None:
    again = script("train", *OVERRIDES, f"folder={begun}", env=TASK | {"SLURM_RESTART_COUNT": "1"})
    assert again.returncode == 0, again.stderr
    attempts = json.loads((begun / "record.json").read_text())["attempts"]
    assert attempts[-1]["resumed_from"] == f"{begun}/checkpoints/last.ckpt"
    assert attempts[-1]["job"] == "slurm-7"


@pytest.mark.parametrize(
    ("overrides", "env", "message"),
    [
        ([], TASK, "holds a run; use resume="),
        ([], TASK | {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "8"}, "holds a run; use resume="),
        (["seed=3"], TASK | {"SLURM_RESTART_COUNT": "1"}, "another configuration (seed=3, was 0); use resume="),
    ],
    ids=["the same job by hand", "another job", "another configuration"],
)
def test_other_commands_do_not_continue_it(
    script: Script, begun: Path, overrides: list[str], env: dict[str, str], message: str
) -> None:
    done = script("train", *OVERRIDES, f"folder={begun}", *overrides, env=env)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_folder_named_by_the_job_accepts_one_configuration(script: Script, begun: Path) -> None:
    overrides = [f"runs={begun.parents[1]}", f"name={begun.parent.name}"]
    done = script("train", *OVERRIDES, *overrides, "seed=3", env={"BOLTCUTTER_RUN_ID": "run"})
    assert done.returncode == 2
    assert "seed=3, was 0" in done.stderr


def test_a_folder_with_metrics_is_not_reused(script: Script, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "callback=null", f"folder={tmp_path}/run"]
    assert script("train", *overrides).returncode == 0
    again = script("train", *overrides)
    assert again.returncode == 2
    assert f"folder={tmp_path}/run holds a run; use resume=" in again.stderr


def test_changed_settings_exclude_those_of_the_launch() -> None:
    before = {"seed": 0, "folder": "a", "data": {"size": 2, "path": None}, "callback": None}
    now = {"seed": 0, "folder": "b", "data": {"size": 3}, "callback": {"best": {"mode": "max"}}}
    assert changed_settings(before, now) == [
        "data.size=3, was 2",
        "data.path=not set, was null",
        "callback=not set, was null",
        'callback.best.mode="max", was not set',
    ]
