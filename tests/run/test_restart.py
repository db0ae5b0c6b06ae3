"""Starting in the folder of an existing run."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import QUICK, Script

from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.run import restart
from boltcutter.run.metrics import has_rows
from boltcutter.run.restart import LAUNCH_KEYS, check_start

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


ON_A_GPU = """
from lightning.pytorch.callbacks import Callback
from boltcutter.run import lineage
lineage.is_deterministic = lambda device: False
"""


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
    assert (attempts[-1]["device"], attempts[-1]["deterministic"]) == ("cpu", True)


def test_a_resumed_run_says_if_it_is_equal_up_to_rounding_only(script: Script, begun: Path, tmp_path: Path) -> None:
    (tmp_path / "gpu.py").write_text(ON_A_GPU)
    shutil.copytree(begun, tmp_path / "run")
    overrides = [f"resume={tmp_path}/run", "trainer.max_epochs=2", "+callback.gpu._target_=gpu.Callback"]
    done = script("train", *overrides, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "without trainer.deterministic=true: equal to an uninterrupted run up to rounding only" in done.stdout
    assert json.loads((tmp_path / "run" / "record.json").read_text())["attempts"][-1]["deterministic"] is False


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


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A folder of a run in a SLURM job, with a checkpoint."""
    config = {"seed": 0, "lr": 1, "folder": "a", "resume": None, "checkpoints": "${folder}/checkpoints"}
    record = {"saved": True, "config": config, "attempts": [{"job": "slurm-6"}, {"job": "slurm-7"}]}
    saved.parent.rename(tmp_path / "checkpoints")
    (tmp_path / "record.json").write_text(json.dumps(record))
    return tmp_path


def configured(folder: Path, **changes: object) -> Settings:
    values = {"seed": 0, "lr": 1, "folder": str(folder), "resume": None, "checkpoints": "${folder}/checkpoints"}
    return Settings(values | changes)


@pytest.mark.parametrize(
    ("job", "restarts", "changes", "given", "message"),
    [
        ("7", "1", {}, True, None),
        ("7", "1", {}, False, None),
        (None, "0", {}, False, None),  # named by a run ID that the launcher keeps
        ("7", "0", {}, True, "holds a run; use resume={folder} to continue it, or another folder"),
        ("6", "1", {}, True, "holds a run; use resume={folder} to continue it"),
        (None, "1", {}, True, "holds a run; use resume={folder} to continue it"),
        ("7", "1", {"seed": 3}, True, "of another configuration (seed=3, was 0); use resume={folder}"),
        (None, "0", {"seed": 3}, False, "of another configuration (seed=3, was 0); use resume={folder}"),
        ("7", "1", {"seed": 3, "resume": "x"}, True, None),
        ("7", "1", {"a": 1, "b": 2, "seed": 3, "lr": 4}, True, "(seed=3, was 0, lr=4, was 1, a=1, was not set, …)"),
        ("7", "1", {"a": 1, "seed": 3, "lr": 4}, True, "(seed=3, was 0, lr=4, was 1, a=1, was not set)"),
    ],
)
def test_only_a_restarted_job_continues_a_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: str | None,
    restarts: str,
    changes: dict[str, object],
    given: bool,
    message: str | None,
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    if message is None:
        check_start(configured(folder, **changes), given=given)
        return
    with pytest.raises(ConfigError, match=re.escape(message.format(folder=folder))) as error:
        check_start(configured(folder, **changes), given=given)
    assert str(error.value).startswith(f"folder={folder}")


def test_checkpoints_elsewhere_are_not_continued_either(folder: Path, tmp_path: Path) -> None:
    cfg = configured(tmp_path / "new", checkpoints=str(folder / "checkpoints"))
    text = (
        f"checkpoints={folder}/checkpoints holds a run; use resume=<its folder> to continue it, or another checkpoints"
    )
    for given in (True, False):
        with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
            check_start(cfg, given=given)


@pytest.mark.parametrize("resume", [None, "x"])
def test_a_run_whose_checkpoints_are_lost_is_not_started_over(folder: Path, resume: str | None) -> None:
    (folder / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(ConfigError, match="the run has saved checkpoints") as error:
        check_start(configured(folder, resume=resume), given=True)
    assert str(error.value).startswith(f"{'resume' if resume else 'folder'}={folder}: ")
    assert f"use reproduce={folder}" in str(error.value)
    (folder / "record.json").write_text(json.dumps({"config": {}, "attempts": []}))
    check_start(configured(folder, resume=resume), given=True)


def test_a_new_run_may_start_anywhere_without_metrics(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path):
        check_start(configured(folder), given=True)
    (tmp_path / "metrics.csv").write_text("step,loss\n")
    assert not has_rows(tmp_path)
    check_start(configured(tmp_path), given=True)
    for rows in (1, 2):
        (tmp_path / "metrics.csv").write_text("step,loss\n" + "1,2\n" * rows)
        assert has_rows(tmp_path)
        with pytest.raises(ConfigError, match="holds a run"):
            check_start(configured(tmp_path), given=True)
        check_start(configured(tmp_path), given=False)
    (tmp_path / "metrics.csv").unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to(path), os.mkdir):
        make(tmp_path / "metrics.csv")
        with pytest.raises(ConfigError, match="holds a run"):
            check_start(configured(tmp_path), given=True)
        (tmp_path / "metrics.csv").unlink() if make is not os.mkdir else None


def test_changed_settings_exclude_those_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "resumed_checkpoint", lambda *_, **__: "last.ckpt")
    monkeypatch.setattr(restart, "_is_restart", lambda record: True)
    cfg = configured(tmp_path)
    cfg = cfg.changed({"data": {"size": 3}, "callback": {"best": {"mode": "max"}}})
    before = cfg.written | {"data": {"size": 2, "path": None}, "callback": None} | dict.fromkeys(LAUNCH_KEYS, 0)
    (tmp_path / "record.json").write_text(json.dumps({"config": before}))
    changed = "data.size=3, was 2, data.path=not set, was null, callback=not set, was null, …"
    with pytest.raises(ConfigError, match=re.escape(f"holds a run of another configuration ({changed}); use resume=")):
        check_start(cfg, given=True)
    before = cfg.written | {"place": "a/b"} | dict.fromkeys(LAUNCH_KEYS, 0)
    (tmp_path / "record.json").write_text(json.dumps({"config": before}))
    cfg = cfg.changed({"place": Path("a/b")})  # which a record has as text
    check_start(cfg, given=True)
    assert set(LAUNCH_KEYS) == {"folder", "resume", "ckpt", "resume_exact", "reproduce", "launch", "choices"}
