"""With scripts in place of the commands of SLURM; test_slurm_cluster.py uses the real ones."""

from pathlib import Path

import pytest

from boltcutter.launch import slurm_queue
from boltcutter.launch.job import UnclearSubmissionError, UnreachableError
from boltcutter.launch.slurm_queue import UNLIMITED, Partition, QueuedJob


def command(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def test_partitions_with_gpus_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    lines = ["gpu*|4|128|gpu:a100:8(S:0-1),shard:2|2-00:00:00", "cpu|9|64+|(null)|infinite", "gpu*|1|8|gpu:2|1:30:00"]
    command(tmp_path, "sinfo", f"printf '%s\\n' '{lines[0]}' '{lines[1]}' '{lines[2]}'")
    first, third = Partition(4, 128, 8, 172800), Partition(1, 8, 2, 5400)
    assert slurm_queue.partitions(None) == [first, third]
    assert slurm_queue.partitions("gpu,cpu") == [first, Partition(9, 64, 0, UNLIMITED), third]
    command(tmp_path, "sinfo", "exit 1")
    assert slurm_queue.partitions(None) == []


def test_the_environment_overrides_no_option_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SLURM_JOB_ID": "7", "SRUN_CPUS_PER_TASK": "2", "SBATCH_PARTITION": "old", "SBATCH_TIMELIMIT": "1"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "mine"}
    for name, value in (given | kept).items():
        monkeypatch.setenv(name, value)
    found = slurm_queue.environment("#!/bin/bash\n#SBATCH --partition=new\n#SBATCH --time=1:00:00\n")
    assert {name: found.get(name) for name in given | kept} == dict.fromkeys(given) | kept


def test_status_of_an_unknown_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_queue.status("7").text == "job 7; SLURM is not installed on this host"
    with pytest.raises(ValueError, match="sbatch is not installed on this host; use a login node"):
        slurm_queue.submit(tmp_path / "job.sh")
    with pytest.raises(ValueError, match="scancel is not installed on this host"):
        slurm_queue.cancel("7")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    command(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    command(tmp_path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert slurm_queue.status("7") == slurm_queue.Status("unknown", "job 7, no longer known to SLURM")
    command(tmp_path, "sacct", "echo 'CANCELLED by 1000|node[1-2]'")
    assert slurm_queue.status("7") == slurm_queue.Status("ended", "job 7, CANCELLED, on node[1-2]")


def test_queries_are_retried_while_slurm_does_not_respond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(slurm_queue, "RETRY_DELAYS", (0.01,))
    silent = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    command(tmp_path, "scontrol", silent)
    command(tmp_path, "squeue", silent)
    command(tmp_path, "sacct", "exit 1")
    with pytest.raises(UnreachableError, match=r"job 7: SLURM does not respond \(Unable to contact"):
        slurm_queue.status("7")
    with pytest.raises(UnreachableError):
        slurm_queue.jobs()
    command(tmp_path, "sacct", "echo 'RUNNING|node1'")
    assert slurm_queue.status("7").state == "running"
    first = f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; {silent}; }}"
    command(tmp_path, "scontrol", f"{first}; echo 'JobId=7 JobState=RUNNING NodeList=node2'")
    assert slurm_queue.status("7").text == "job 7, RUNNING, on node2"


def test_a_job_whose_confirmation_was_lost_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    file = tmp_path / "job.sh"
    file.write_text("#!/bin/bash\n")
    command(tmp_path, "sbatch", "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1")
    lines = [
        f"7|RUNNING|a|{file}",
        "8|PENDING|a|b|/elsewhere/job.sh",
        f"9|PENDING|a|{file} next",
        "10|RUNNING|sh|(null)",
    ]
    command(tmp_path, "squeue", "".join(f"echo '{line}'\n" for line in lines))
    assert slurm_queue.submit(file) == "9"
    assert slurm_queue.submit(file, known=["9"]) == "7"
    with pytest.raises(UnclearSubmissionError, match=f"remove {tmp_path}"):
        slurm_queue.submit(file, known=["7", "9"])
    assert slurm_queue.jobs()[1:] == [
        QueuedJob("8", "PENDING", "a|b", Path("/elsewhere/job.sh")),
        QueuedJob("9", "PENDING", "a", file),
        QueuedJob("10", "RUNNING", "sh", None),
    ]
