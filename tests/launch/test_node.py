import json
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import environment

from boltcutter import run_files
from boltcutter.launch import node
from boltcutter.launch.bundle import pack
from boltcutter.launch.command import create_job, read_training_config
from boltcutter.launch.local import LocalLauncher
from boltcutter.project import Project
from boltcutter.run import lineage
from boltcutter.run.folder import record_code, save_config
from boltcutter.run.snapshot import copy_code

from .test_library import create_project, read_record


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed code and record of a run of a small project, made with the options of the launch command."""
    root = create_project(tmp_path_factory.mktemp("node") / "project")
    overrides = ["trainer.devices=1", "trainer.max_epochs=1", "report=false", f"runs={root}/runs"]
    cfg = read_training_config(Project.find(root), overrides)
    job, (cfg,) = create_job([cfg], root, LocalLauncher())
    save_config(cfg)
    assert job.code
    states = lineage.git_state(root), lineage.library_state(root)
    copy_code(root, job.code, *states)
    record_code(job.folder, *states)
    return pack(job.folder)


def start(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "boltcutter.launch.node", *map(str, arguments)]
    return subprocess.run(command, cwd="/", env=environment(**env), capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_node_trains_with_the_code_of_the_bundle(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "here"
    done = start(folder, "--bundle", bundle, "trust=true", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(folder)
    assert record["attempts"][-1]["reason"] == "completed"  # type: ignore[index]
    assert record["git"] == read_record(bundle.parent)["git"]
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    (unpacked,) = tmp_path.glob("boltcutter-job-*")
    assert (unpacked / "code" / "src" / "boltcutter").is_dir()  # an editable library is sent along
    # A job that the platform starts again continues the run.
    done = start(folder, "--bundle", bundle, "trust=true", "trainer.max_epochs=2", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_record(folder)["attempts"]) == 2  # type: ignore[arg-type]


def test_the_code_is_unpacked_into_the_working_directory(bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "boltcutter.launch.node", f"file://{bundle.parent}", "--unpack"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "src" / "boltcutter").is_dir()
    assert not (tmp_path / "record.json").exists()


def test_a_user_that_cannot_write_the_code_is_told_to_be_root(bundle: Path, tmp_path: Path) -> None:
    # As on Azure ML, whose JupyterLab needs an image with root as its user:
    # https://learn.microsoft.com/azure/machine-learning/how-to-interactive-jobs
    command = [sys.executable, "-m", "boltcutter.launch.node", f"file://{bundle.parent}", "--unpack"]
    env = environment(TMPDIR=str(tmp_path))
    done = subprocess.run(command, cwd="/proc", env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: /proc: user {os.getuid()} cannot write the code there (")
    assert done.stderr.endswith("); use an image whose user is root\n")
    assert done.stderr.count("\n") == 1


def test_faults_of_a_bundle(bundle: Path, tmp_path: Path) -> None:
    done = start(f"file://{tmp_path}/run", TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: file://{tmp_path}/run/{run_files.BUNDLE}: cannot be read (")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_files.BUNDLE).write_bytes(bundle.read_bytes()[:1000])
    done = start(f"file://{tmp_path}/run", TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert "cannot be unpacked" in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_version_of_the_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "record.json").write_text(json.dumps({"library": {"version": "0.0.1"}}))
    done = start(tmp_path / "run", "--bundle", pack(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == 2  # no restart corrects this
    assert "but the run was launched with 0.0.1; build the image again" in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_job_is_not_started_without_limit(tmp_path: Path) -> None:
    """Kubernetes counts neither evictions nor preemptions, so that a pod without disk would be started for ever."""
    record, before = {"library": {}, "attempts": [{}] * 150}, {"attempts": [{}] * 51}
    (tmp_path / "code").mkdir()
    (tmp_path / "record.json").write_text(json.dumps(before))
    bundle = pack(tmp_path)
    (tmp_path / "run").mkdir()
    for attempts, status in ((150, "see"), (151, "this job was started 100 times; see why its attempts ended")):
        record["attempts"] = [{}] * attempts
        (tmp_path / "run" / "record.json").write_text(json.dumps(record))
        done = start(tmp_path / "run", "--bundle", bundle, TMPDIR=str(tmp_path))
        assert (status in done.stderr) == (attempts == 151), done.stderr
    assert done.returncode == 2


def test_a_run_of_an_array_is_found_by_the_index_of_the_platform(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    runs = [tmp_path / f"{tmp_path.name}-{index}" for index in range(2)]
    for index, run in enumerate(runs):
        run.mkdir()
        (run / "record.json").write_text(json.dumps({"library": {"version": f"0.0.{index}"}}))
    bundle = pack(tmp_path, runs)
    prefix, options = f"{tmp_path}/runs/{tmp_path.name}-", ("--index=JOB_COMPLETION_INDEX", "--bundle", bundle)
    done = start(prefix, *options, TMPDIR=str(tmp_path), JOB_COMPLETION_INDEX="1")
    assert "but the run was launched with 0.0.1" in done.stderr
    assert read_record(Path(f"{prefix}1"))["library"] == {"version": "0.0.1"}
    assert not Path(f"{prefix}0").exists()
    done = start(prefix, *options, TMPDIR=str(tmp_path))
    assert done.stderr == "error: JOB_COMPLETION_INDEX= is not the index of a run; start this as a job of an array\n"


def test_a_user_without_a_home_directory_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Matplotlib, which torchmetrics imports where it is installed, ends with a traceback."""
    started = list[dict[str, str]]()
    monkeypatch.setattr(os, "execve", lambda path, arguments, environment: started.append(environment))
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    for home in (str(tmp_path), None):
        monkeypatch.setenv("HOME", home) if home else monkeypatch.delenv("HOME")
        node.start(tmp_path, ["train"])
    assert [environment["HOME"] for environment in started] == [str(tmp_path), tempfile.gettempdir()]
