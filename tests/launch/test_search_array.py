"""A search on SLURM: an array of workers that share its trials."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICK, ROOT, environment, run_command
from slurm_cluster import Cluster, wait_until

from boltcutter import run_files
from boltcutter.launch.bundle import pack
from boltcutter.launch.kubernetes import KubernetesLauncher
from boltcutter.launch.search_array import create_job, plan_search, prepare
from boltcutter.project import Project
from boltcutter.run import lineage
from boltcutter.run.snapshot import copy_code

SEARCH = [
    *QUICK,
    "model=linear",
    "search=optuna",
    "search.num_trials=6",
    "search.max_parallel=2",
    "search.scheduler=null",
]
ON_CPU = ["trainer.accelerator=cpu", "trainer.devices=1"]


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def attempts(folder: Path) -> list[Any]:
    return [attempt["reason"] for attempt in json.loads((folder / "record.json").read_text())["attempts"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["launch=local", *ON_CPU], "launch: a search is launched by launch=slurm and launch=kubernetes only"),
        (["launch=slurm", *ON_CPU, "launch.array=seed=1,2"], "launch.array: "),
        (["launch=slurm", *ON_CPU, "launch.chain=2"], "launch.chain=2: "),
        (
            ["launch=slurm", "trainer.accelerator=cpu", "trainer.devices=auto"],
            "trainer.devices=auto: a job needs an explicit number",
        ),
        (["launch=slurm", *ON_CPU, "trainer.num_nodes=2"], "trainer.num_nodes=2: each trial runs on one node"),
    ],
)
def test_searches_that_cannot_be_launched_are_refused(
    script: Any, tmp_path: Path, overrides: list[str], message: str
) -> None:
    done = script("launch", *SEARCH, *overrides, f"folder={tmp_path / 'search'}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "search").exists()


def test_the_job_has_a_process_for_each_worker(script: Any, tmp_path: Path) -> None:
    overrides = ["trainer.accelerator=cpu", "trainer.devices=2", "--dry-run"]
    done = script("launch", "launch=slurm", *SEARCH, *overrides, f"folder={tmp_path / 'search'}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"#SBATCH --array=0-1", "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=2"} <= set(lines)
    assert f'search.py resume={tmp_path / "search"} worker="$SLURM_ARRAY_TASK_ID"' in done.stdout
    assert not (tmp_path / "search").exists()


@pytest.mark.slow
def test_workers_share_a_search_and_continue_their_trials_after_a_requeue(cluster: Cluster) -> None:
    folder, job_id = cluster.submit("search", *SEARCH, "trainer.devices=1", "trainer.max_epochs=25", torch=True)
    trials = folder / "trials"
    one = folder / "search-0"

    def trained() -> bool:
        return len(list(trials.glob("*/metrics.csv"))) >= 2

    wait_until(trained, one)
    signalled = cluster.call("scancel", "--signal=USR2", f"{job_id.partition('_')[0]}_0")
    assert signalled.returncode == 0, signalled.stderr
    logs = cluster.launch("logs", f"run={folder}", "--wait", timeout=480)
    assert logs.returncode == 0, logs.stderr
    assert len(attempts(one)) >= 2
    assert attempts(one)[0].startswith("preempted by SIGUSR2")
    found = rows(folder)
    assert [row["trial"] for row in found] == [str(number) for number in range(6)]
    assert {row["state"] for row in found} == {"complete"}
    assert len({row["optimizer.lr"] for row in found}) == 6
    for trial in sorted(trials.iterdir()):
        with open(trial / "metrics.csv", newline="") as file:
            steps = [int(row["step"]) for row in csv.DictReader(file) if row["val/loss"]]
        assert steps == sorted(set(steps))
        assert len(steps) == 25
    assert (folder / "best.yaml").is_file()
    assert (folder / "report.html").is_file()
    assert not run_command(["pgrep", "-f", f"folder={trials}"], timeout=10).stdout


def test_a_search_on_object_storage_is_refused(script: Any, tmp_path: Path) -> None:
    overrides = ["launch=kubernetes", "launch.image=a:1", "launch.storage=s3://bucket/runs", *ON_CPU, "--dry-run"]
    done = script("launch", *SEARCH, *overrides, f"folder={tmp_path / 'search'}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "launch.storage=s3://bucket/runs: the workers of a search need a folder that they share" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pods_of_an_indexed_job_share_a_search_on_a_volume(tmp_path: Path) -> None:
    """Each index is a worker; the bundle has the search, its study and the record of each worker."""
    volume, project = tmp_path / "volume", Project.find(ROOT)
    launcher = KubernetesLauncher(
        image="a:1", storage=str(volume), volumes={"runs": str(volume)}, python=sys.executable
    )
    plan = plan_search(project, launcher, [*SEARCH, *ON_CPU, f"folder={tmp_path}/digits/one"])
    job = create_job(plan, ROOT, launcher)
    prepare(plan)
    assert job.code
    copy_code(ROOT, job.code, lineage.git_state(ROOT), lineage.library_state(ROOT))
    launcher.check(job)
    pack(job.folder, job.run_folders)
    command = [*launcher.command(job), f"--bundle={job.folder / run_files.BUNDLE}"]
    pods = [
        subprocess.Popen(command, env=environment(JOB_COMPLETION_INDEX=str(index), TMPDIR=str(tmp_path)), cwd="/")
        for index in range(2)
    ]
    assert [pod.wait(280) for pod in pods] == [0, 0]
    folder = volume / "digits" / "one"
    assert [row["state"] for row in rows(folder)] == ["complete"] * 6
    assert [attempts(folder / f"one-{index}") for index in range(2)] == [["completed"]] * 2
