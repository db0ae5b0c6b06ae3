import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boltcutter.launch import jobs
from boltcutter.launch.cloud_job import CloudLauncher, job_name
from boltcutter.launch.job import Job, Status, UnclearSubmissionError

from .test_library import git


class Platform(CloudLauncher):
    """A platform that accepts every job, and whose jobs end at once."""

    option, protocols = "platform", ("file",)

    def render(self, job: Job) -> str:
        return json.dumps({"command": self.command(job), "environment": self.variables(job)})

    def create(self, job: Job, file: Path) -> str:
        assert json.loads(file.read_text())["command"]
        return "job-1"

    def status(self, job_id: str) -> Status:
        return Status("ended", f"job {job_id}, Succeeded")

    def cancel(self, job_id: str) -> None:
        raise NotImplementedError


def write_run(root: Path, job: Job, **record: Any) -> Job:
    """Make a project with one file, and a run of it that can be submitted."""
    folder = root / "runs" / "digits" / "one"
    (folder / "code").mkdir(parents=True)
    for place in (root, folder / "code"):
        (place / "a.py").write_text("a = 1\n")
    git(root, "init", "-q")
    git(root, "add", "a.py")
    (folder / "record.json").write_text(json.dumps({"attempts": [], **record}))
    return replace(job, folder=folder, root=root, code=folder / "code")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    launched = Job("digits", tmp_path, None, environment={"A": "1"}, digests=("0" * 32,))
    return write_run(tmp_path / "project", launched, launch={"id": "job-1"})


def test_an_interrupted_submission_is_unclear(job: Job, tmp_path: Path) -> None:
    class Interrupted(Platform):
        def create(self, job: Job, file: Path) -> str:
            raise KeyboardInterrupt

    launcher, file = Interrupted(storage=f"file://{tmp_path}/runs"), job.folder / "job.yaml"
    file.write_text(launcher.render(job))
    with pytest.raises(UnclearSubmissionError, match=r"launch=platform: interrupted; .* look for digits-one there"):
        launcher.submit(job, file)


def test_mistakes_are_found_before_submission(job: Job) -> None:
    cases = {
        "launch.storage: not set; give the parent URL of the runs, launch.storage=file://<bucket>/runs": {},
        "launch.storage=ftp://x/runs: the nodes cannot write there; use file://": {"storage": "ftp://x/runs"},
        "launch.max_code_mb=0: the project's files have 0.0 MB; the largest are a.py": {
            **{"storage": "file://x", "max_code_mb": 0}
        },
    }
    for message, settings in cases.items():
        with pytest.raises(ValueError, match="launch") as error:
            Platform(**settings).check(job)
        assert str(error.value).startswith(message)
    with pytest.raises(ValueError, match=r"launch=platform: only files tracked by git are sent"):
        Platform(storage="file://x").check(Job("digits", job.folder, None, root=job.root))
    with pytest.raises(ValueError, match=r"launch\.environment\.API_KEY: secrets"):
        Platform(environment={"API_KEY": "x"})


def test_secrets_are_references(job: Job) -> None:
    place = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-a1b2c3"
    launcher = Platform(storage="file://x", secrets={"WANDB_API_KEY": place})
    assert f"--secret=WANDB_API_KEY={place}" in json.loads(launcher.render(job))["command"]
    with pytest.raises(ValueError, match=r"^launch\.secrets\.WANDB_API_KEY: .*try launch\.secrets='{WANDB_") as error:
        Platform(secrets={"WANDB_API_KEY": "abcdefabcdef"})
    assert "abcdefabcdef" not in str(error.value)  # may be the secret
    with pytest.raises(ValueError, match=r"^launch\.secrets\.'A-B' is not a valid variable name"):
        Platform(secrets={"A-B": place})


def test_a_job_is_sent_followed_and_fetched(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Platform(storage=f"file://{tmp_path}/bucket/runs/", environment={"B": "2"})
    launcher.check(job)
    file = job.folder / launcher.job_file
    file.write_text(launcher.render(job))
    there = tmp_path / "bucket" / "runs" / "digits" / "one"
    command = [
        "python",
        "-m",
        "boltcutter.launch.node",
        f"file://{there}",
        "trust=sha256:00000000000000000000000000000000",
    ]
    assert json.loads(file.read_text()) == {"command": command, "environment": {"A": "1", "B": "2"}}
    assert launcher.submit(job, file) == ["job-1"]
    assert {path.name for path in there.iterdir()} == {"job.tar.gz", "job.yaml", "record.json"}

    assert list(launcher.logs("job-1", job.folder, follow=True)) == []
    (there / "logs").mkdir()
    (there / "logs" / "rank-0.log").write_text("training\n")
    assert "".join(launcher.logs("job-1", job.folder, follow=True)) == "training\n"
    attempts = [{"start": "now", "reason": "completed"}]
    (there / "record.json").write_text(json.dumps({"attempts": attempts, "test": {"accuracy": 1}}))
    monkeypatch.setattr(jobs, "find_launcher", lambda folder, **_: (launcher, "job-1"))
    jobs.run_verb("status", job.folder, follow=False)
    assert capsys.readouterr().out.endswith(": job job-1, Succeeded\n  now  completed\n")
    jobs.run_verb("fetch", job.folder, follow=False)
    assert (job.folder / "logs" / "rank-0.log").read_text() == "training\n"
    record = json.loads((job.folder / "record.json").read_text())
    assert record == {"attempts": attempts, "test": {"accuracy": 1}, "launch": {"id": "job-1"}}


def test_names_of_jobs_are_unique_and_valid(tmp_path: Path) -> None:
    run = tmp_path / "20261122-115500_ab12"
    assert job_name(Job("Digits_CNN", run, None)) == "digits-cnn-20261122-115500-ab12"
    # SkyPilot refuses three hyphens in sequence: _VALID_NAME_REGEX of its task.py
    assert job_name(Job("a - b---c", run, None)) == "a-b-c-20261122-115500-ab12"
    assert job_name(Job("x" * 80, run, None), limit=30).endswith("-20261122-115500-ab12")


def test_the_cost_is_estimated_and_limited(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(**settings: Any) -> None:
        Platform(storage=f"file://{tmp_path}/runs", time="10:00:00", **settings).check(replace(job, nodes=2))

    check(price_per_hour=4)
    expected = "80.00: 2 nodes, launch.time=10:00:00, launch.price_per_hour=4"
    assert capsys.readouterr().err == f"note: costs at most {expected}\n"
    check(price_per_hour=4, max_cost=80)
    with pytest.raises(ValueError, match=rf"^launch\.max_cost=79 is less than {expected}; reduce launch\.time"):
        check(price_per_hour=4, max_cost=79)
    with pytest.raises(ValueError, match=r"^launch\.max_cost=79: needs launch\.price_per_hour"):
        check(max_cost=79)
    for price in (-1, float("nan")):  # with which no cost is above the limit
        with pytest.raises(ValueError, match=rf"^launch\.price_per_hour={price} is less than 0; try"):
            check(price_per_hour=price, max_cost=79)


def test_an_array_is_sent_once_with_the_record_of_each_run(job: Job, tmp_path: Path) -> None:
    array, launcher = replace(job, array_size=2), Platform(storage=f"file://{tmp_path}/bucket")
    for folder in array.run_folders:
        folder.mkdir()
        (folder / "record.json").write_text("{}")
    (file := job.folder / launcher.job_file).write_text(launcher.render(array))
    assert launcher.submit(array, file) == ["job-1:0", "job-1:1"]
    there = tmp_path / "bucket" / "digits" / "one"
    assert {str(path.relative_to(there)) for path in there.rglob("*.*") if path.is_file()} == {
        *("job.tar.gz", "job.yaml", "one-0/record.json", "one-1/record.json")
    }
