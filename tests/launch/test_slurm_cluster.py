"""Runs on a SLURM cluster of three nodes, by a user who is not root."""

import json
import os
import re
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT, Script
from slurm_cluster import Cluster, processes, wait_until

pytestmark = pytest.mark.timeout(600)
STALLING = """
import time
from lightning.pytorch.callbacks import Callback
class Stall(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            time.sleep(10**6)
"""
# No dropout, BatchNorm or Adam, so that the number of processes changes only rounding.
OVERRIDES = ["model=mlp", "optimizer=sgd", "optimizer.lr=0.02", "logger=null", "report=false"]


def record(folder: Path) -> Any:
    return json.loads((folder / "record.json").read_text())


def attempts(folder: Path) -> list[str]:
    return [attempt["reason"] for attempt in record(folder)["attempts"]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


def log(folder: Path) -> str:
    return (folder / "logs" / "slurm.log").read_text()


def is_training(folder: Path, start: int) -> bool:
    """Whether that start, or a later one, has trained for an epoch."""
    starts = log(folder).split(" starts on ") if (folder / "logs" / "slurm.log").exists() else []
    return len(starts) > start and re.search(r"^epoch ", starts[-1], re.M) is not None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_two_nodes_train_as_one_process(cluster: Cluster, script: Script, tmp_path: Path, ranks: int) -> None:
    overrides = [*OVERRIDES, "trainer.max_epochs=3"]
    folder = cluster.runs / f"whole-{ranks}"
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.num_nodes=2", f"trainer.devices={ranks}"]
    done = cluster.launch("launch=slurm", *overrides, *two, f"folder={folder}", "--wait", torch=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 3/3" in done.stdout  # of the job's log
    assert attempts(folder) == ["completed"]
    assert (folder / "checkpoints" / "last.ckpt").stat().st_uid == (cluster.runs.stat().st_uid)
    assert "COMPLETED, on node" in cluster.launch("status", f"run={folder}").stdout
    single = script("train", *overrides, "trainer.accelerator=cpu", f"folder={tmp_path}/run")
    assert single.returncode == 0, single.stderr
    ours, theirs = weights(folder), weights(tmp_path / "run")
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in theirs) < 1e-6
    assert record(folder)["test"] == pytest.approx(record(tmp_path / "run")["test"], abs=1e-6)


@pytest.mark.slow
def test_a_run_survives_signals_and_node_failures(cluster: Cluster, script: Script, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "trainer=ddp", "trainer.max_epochs=100"]
    folder, job = cluster.submit("events", *overrides, "trainer.num_nodes=2", "trainer.devices=1")
    wait_until(lambda: is_training(folder, 1), folder)
    cluster.call("scancel", "--signal=USR2", job)
    wait_until(lambda: is_training(folder, 2), folder)
    os.kill(next(pid for (_, rank), pid in processes(folder).items() if rank == 1), signal.SIGKILL)
    wait_until(lambda: is_training(folder, 3), folder)
    dead = next(node for (node, rank) in processes(folder) if rank == 1)
    assert cluster.manage("crash", dead).returncode == 0
    wait_until(lambda: is_training(folder, 4), folder, 200)
    assert dead not in {node for node, _ in processes(folder)}
    cluster.call("scontrol", "requeue", job)
    wait_until(lambda: cluster.job(job)["JobState"] == "COMPLETED", folder, 300)
    assert cluster.manage("boot", dead).returncode == 0
    # SLURM also terminates the step that lost its node, even if a new step already has the same id.
    expected = "preempted by SIGUSR2 (RankLostError|killed) (RankLostError|killed) (preempted by SIGTERM )*completed"
    reasons = [re.sub(r"[,:].*", "", reason) for reason in attempts(folder)]
    assert re.fullmatch(expected, " ".join(reasons)), log(folder)
    assert "launch: preempted by SIGUSR2; requeue" in log(folder)
    assert "task 1: Killed; requeue" in log(folder)
    uninterrupted = script(
        "train", *overrides, "trainer.accelerator=cpu", "trainer.devices=2", f"folder={tmp_path}/run", timeout=400
    )
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    ours, theirs = weights(folder), weights(tmp_path / "run")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert record(folder)["metrics"] == record(tmp_path / "run")["metrics"]


@pytest.mark.slow
def test_a_hang_is_located_from_beside_and_ended(cluster: Cluster) -> None:
    place = cluster.runs / "stalling"
    place.mkdir()
    (place / "stalling.py").write_text(STALLING)
    place.chmod(0o755)
    two = ["trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "timeout=40"]
    stall = ["+callback.stall._target_=stalling.Stall", "trainer.max_epochs=3"]
    folder, job = cluster.submit("hanging", *OVERRIDES, *two, *stall, PYTHONPATH=str(place))
    found = f"{place}/stalling.py:7 in on_train_batch_end"
    wait_until(lambda: found in places_by_node(cluster, folder), folder, 150)
    assert "waits for other ranks" in places_by_node(cluster, folder), "of rank 0, on the other node"
    assert cluster.job(job)["JobState"] == "RUNNING", "asking ends nothing"
    wait_until(lambda: cluster.job(job)["JobState"] == "FAILED", folder, 200)
    assert re.search(rf"^warning: .*timeout=40.*\n(.*\n)*?rank 1 \(step 3.*{re.escape(found)}", log(folder), re.M)
    assert not processes(folder)
    assert "rank 1" in attempts(folder)[-1]
    beside = cluster.call(sys.executable, "-m", "boltcutter", "why", f"run={folder}", "--hang")
    assert beside.returncode == 2
    assert beside.stderr.count("\n") == 1


def places_by_node(cluster: Cluster, folder: Path) -> str:
    """What ``why --hang`` prints on each node of a run."""
    printed = ""
    for node, _ in processes(folder):
        command = [sys.executable, "-m", "boltcutter", "why", f"run={folder}", "--hang"]
        printed += cluster.manage("exec", "-n", node, "-u", cluster.user, "env", "HOME=/tmp", *command).stdout
    return printed


@pytest.mark.slow
def test_one_task_of_an_array_is_requeued(cluster: Cluster) -> None:
    overrides = ["launch.array=seed=1,2", "launch.max_parallel=1", "trainer.max_epochs=60"]
    home, _ = cluster.submit("array", *OVERRIDES, *overrides)
    one, two = (home / f"array-{task}" for task in range(2))
    wait_until(lambda: is_training(one, 1), one)
    assert not processes(two)
    cluster.call("scancel", "--signal=USR2", record(one)["launch"]["id"])
    assert cluster.launch("logs", f"run={home}", "--wait").returncode == 0
    assert [reason.split(",")[0] for reason in attempts(one)] == ["preempted by SIGUSR2", "completed"]
    assert attempts(two) == ["completed"]
    assert [record(folder)["config"]["seed"] for folder in (one, two)] == [1, 2]
    assert "export WANDB_RUN_GROUP=array" in (home / "job.sh").read_text()
    assert cluster.launch("status", f"run={home}").stdout.count("COMPLETED") == 2


@pytest.mark.slow
def test_a_cancelled_run_saves_and_can_be_resumed(cluster: Cluster) -> None:
    folder, _ = cluster.submit("cancelled", *OVERRIDES, "trainer.max_epochs=60", "data.num_workers=2")
    wait_until(lambda: is_training(folder, 1), folder)
    refused = cluster.launch("launch=slurm", f"resume={folder}")
    assert refused.returncode == 2
    assert re.search(r"job \d+, RUNNING, on node\d; cancel it first", refused.stderr)
    cancelled = cluster.launch("cancel", f"run={folder}")
    assert cancelled.returncode == 0, cancelled.stderr
    wait_until(lambda: "CANCELLED" in cluster.launch("status", f"run={folder}").stdout, folder)
    assert attempts(folder)[0].startswith("preempted by SIGTERM, saved ")
    steps = torch.load(folder / "checkpoints" / "last-preempted.ckpt", weights_only=True)["global_step"]
    done = cluster.launch("launch=slurm", f"resume={folder}", "--wait", timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert record(folder)["attempts"][1]["resumed_from"].endswith("last-preempted.ckpt")
    assert steps > 0
    assert attempts(folder)[1:] == ["completed"]


def submit_script(cluster: Cluster, name: str, options: str, *overrides: str) -> tuple[Path, str]:
    """Submit a user's own job script; returns the folder of the run and the job id."""
    folder, file = cluster.runs / name, cluster.runs / f"{name}.sh"
    command = [
        "srun",
        sys.executable,
        "scripts/train.py",
        *OVERRIDES,
        "trainer.accelerator=cpu",
        f"folder={folder}",
        *overrides,
    ]
    lines = ["#!/bin/bash", f"#SBATCH {options} --output={cluster.runs}/{name}.log --open-mode=append", f"cd {ROOT}"]
    file.write_text("\n".join([*lines, "export OMP_NUM_THREADS=1", shlex.join(command)]) + "\n")
    done = cluster.call("sbatch", "--parsable", str(file))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.strip()


@pytest.mark.slow
def test_a_users_own_script_is_checked_and_resumes(cluster: Cluster) -> None:
    two = ["trainer=ddp", "trainer.devices=2"]
    folder, job = submit_script(cluster, "own", "--ntasks-per-node=2 --requeue", *two, "trainer.max_epochs=60")
    fewer, lone = submit_script(cluster, "fewer", "--ntasks=1", *two)
    more, alone = submit_script(cluster, "more", "--nodes=1 --ntasks=2")
    for message, number, place in (("1 task on 1 node", lone, fewer), ("2 tasks on 1 node", alone, more)):
        wait_until(lambda number=number: cluster.job(number)["JobState"] == "FAILED", place)
        text = place.with_suffix(".log").read_text()
        assert (
            len(re.findall(rf"^error: trainer.devices=\d, trainer.num_nodes=1: srun started {message}", text, re.M))
            == 1
        )
        assert not place.exists()
    wait_until(lambda: (folder / "checkpoints" / "last.ckpt").is_file(), folder)
    cluster.call("scontrol", "requeue", job)
    wait_until(lambda: cluster.job(job)["JobState"] == "COMPLETED", folder, 300)
    assert attempts(folder)[-1] == "completed", folder.with_suffix(".log").read_text()
    assert record(folder)["attempts"][1]["resumed_from"]


@pytest.mark.slow
def test_each_command_in_an_allocation_is_a_run(cluster: Cluster) -> None:
    train = f"{sys.executable} scripts/train.py {shlex.join(OVERRIDES)} trainer.accelerator=cpu trainer.max_epochs=1"
    train += f" runs={cluster.runs}/shell test=false"
    shell = [f"{train} seed=1", f"{train} seed=2", f"{train} trainer=ddp trainer.num_nodes=2 trainer.devices=1"]
    step = ["srun", "--job-name=try", "--ntasks=1", "bash", "-c", "; ".join(shell)]
    done = cluster.call(*step, OMP_NUM_THREADS="1")
    records = [json.loads(file.read_text()) for file in (cluster.runs / "shell").glob("*/*/record.json")]
    assert sorted(found["seed"] for found in records) == [1, 2], done.stdout + done.stderr
    assert "try trainer.devices=1 trainer.num_nodes=1, or srun --nodes=2" in done.stderr
    lone = cluster.call("salloc", "--ntasks=2", "bash", "-c", f"srun {train}; {shell[2]}", OMP_NUM_THREADS="1")
    errors = re.findall("^error: .*", lone.stderr, re.M)
    assert len(errors) == 2, lone.stderr
    assert "srun started 2 tasks on 1 node; try trainer.devices=2" in errors[0]
    assert "python was started without srun" in errors[1]


@pytest.mark.slow
def test_requeue_with_special_characters_and_without_exported_variables(cluster: Cluster) -> None:
    name = "a 'b' \"c\" #d %j"
    overrides = ["trainer.max_epochs=60", "launch.setup=[export CHOSEN=yes]", 'name=it\'s "new" #1']
    folder, job = cluster.submit(name, *OVERRIDES, *overrides, SBATCH_EXPORT="NONE")
    wait_until(lambda: is_training(folder, 1), folder)
    assert str(folder / "code") in " ".join(psutil.Process(next(iter(processes(folder).values()))).cmdline())
    cluster.call("scancel", "--signal=USR2", job)
    wait_until(lambda: is_training(folder, 2), folder)
    wait_until(lambda: cluster.job(job)["JobState"] == "COMPLETED", folder, 300)
    assert [reason.split(",")[0] for reason in attempts(folder)] == ["preempted by SIGUSR2", "completed"]
    listed = cluster.launch("list", f"runs={cluster.runs.parent}")
    assert f"{folder}: 2 attempts, completed" in listed.stdout, listed.stderr


@pytest.mark.slow
def test_an_orphaned_start_ends_when_another_has_begun(cluster: Cluster) -> None:
    folder, _ = cluster.submit("split", *OVERRIDES, "trainer.max_epochs=2000")
    wait_until(lambda: is_training(folder, 1), folder)
    (node, pid) = next((node, pid) for (node, _), pid in processes(folder).items())
    old = psutil.Process(pid)
    assert cluster.manage("kill-slurmd", node).returncode == 0
    wait_until(lambda: is_training(folder, 2), folder, 120)
    wait_until(lambda: not old.is_running() or old.status() == psutil.STATUS_ZOMBIE, folder, 60)
    assert [at for at, _ in processes(folder)] != [node]
    assert "was taken over by process" in (folder / "logs" / "rank-0.log").read_text()  # its srun is gone
    cluster.launch("cancel", f"run={folder}")
    wait_until(lambda: "CANCELLED" in cluster.launch("status", f"run={folder}").stdout, folder)
    assert attempts(folder)[-1].startswith("preempted by SIGTERM, saved ")
    assert cluster.manage("crash", node).returncode == cluster.manage("boot", node).returncode == 0


@pytest.mark.slow
def test_an_unreachable_controller_loses_no_job(cluster: Cluster) -> None:
    folder, _ = cluster.submit("before", interpreter(cluster, "short.sh", "sleep 5"))
    cluster.manage("pause-controller")
    try:
        status = cluster.launch("status", f"run={folder}")
        assert status.returncode == 2
        assert re.match(r"error: job \d+: SLURM does not respond \(.*\); try again later\n", status.stderr)
        resuming = threading.Timer(8, cluster.manage, ["resume-controller"])  # sbatch gives up after 5 s
        resuming.start()
        late, job = cluster.submit("late", interpreter(cluster, "later.sh", "exit 0"))
        resuming.join()
    finally:
        cluster.manage("resume-controller")
    wait_until(lambda: cluster.job(job)["JobState"] == "COMPLETED", late)
    assert cluster.launch("logs", f"run={folder}", "--wait").returncode == 0
    assert cluster.call("squeue", "-h").stdout == ""


def interpreter(cluster: Cluster, name: str, *lines: str) -> str:
    """Create a script that is started in place of the interpreter; returns the override."""
    file = cluster.runs / name
    file.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
    file.chmod(0o755)
    return f"launch.python={file}"


@pytest.mark.slow
def test_restarts_are_limited(cluster: Cluster) -> None:
    two = ["trainer.num_nodes=1", "trainer.devices=2"]
    # As a run that crashes after it has seen that its checkpoints can be written.
    place = '"${2#resume=}/checkpoints"'
    crash = interpreter(
        cluster, "crash.sh", f"mkdir -p {place}; touch {place}/.probe; rm {place}/.probe; kill -SEGV $$"
    )
    error = interpreter(cluster, "error.sh", "[ $SLURM_PROCID = 0 ] || exit 1", "exec sleep 60")
    chain = interpreter(cluster, "link.sh", 'echo >>"${2#resume=}/links"', '[ -e "${2#resume=}/over" ] && exit 0')
    with (cluster.runs / "link.sh").open("a") as more:
        more.write('echo SIGUSR2 >"$BOLTCUTTER_REQUEUE"; touch "${2#resume=}/over"\n')
    looping, again = cluster.submit("looping", crash)
    raising, once = cluster.submit("raising", *two, error)
    chained, links = cluster.submit("chained", chain, "launch.chain=3")
    wait_until(lambda: cluster.job(once)["JobState"] == "FAILED", raising)
    assert cluster.job(once)["Restarts"] == "0"
    assert "launch: job" in log(raising)
    for link in links.split(","):
        wait_until(lambda link=link: cluster.job(link)["JobState"] == "COMPLETED", chained)
    assert (chained / "links").read_text() == "\n\n"
    assert f"the run has ended; job {links.split(',')[2]} has nothing to do" in log(chained)
    wait_until(lambda: cluster.job(again)["JobState"] == "FAILED", looping)
    assert cluster.job(again)["Restarts"] == "3"
    assert "giving up: three consecutive starts" in log(looping)
    assert not any(map(processes, (looping, raising, chained)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["launch.partition=nowhere"], "launch=slurm: sbatch rejects the job: .*[Ii]nvalid partition"),
        (
            ["trainer.devices=5", "data.batch_size=65"],
            "trainer.devices=5: a node has at most 4 times 1 CPUs .*; try trainer.devices=4",
        ),
        (["trainer.accelerator=gpu"], "trainer.devices=1: a node has at most 0 GPUs; try trainer.accelerator=cpu"),
        (["trainer.num_nodes=4"], "trainer.num_nodes=4: the partition has 3 such nodes; try 3 or fewer"),
        (["name=bash"], "name=bash: Lightning treats it"),
    ],
)
def test_jobs_that_the_cluster_cannot_run_are_refused(cluster: Cluster, overrides: list[str], message: str) -> None:
    folder = cluster.runs / "refused"
    done = cluster.launch("launch=slurm", "trainer.accelerator=cpu", f"folder={folder}", *overrides)
    assert done.returncode == 2
    assert re.match(f"error: {message}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1
    assert not folder.exists()


def test_the_cluster_is_isolated_from_the_host(cluster: Cluster) -> None:
    assert str(cluster.folder) not in Path("/proc/self/mountinfo").read_text()
    assert "to-node1" not in psutil.net_if_addrs()
