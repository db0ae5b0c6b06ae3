import json
from pathlib import Path

import pytest

from boltcutter.launch import jobs, stored_runs, submit
from boltcutter.launch.job import Job, Status, UnreachableError
from boltcutter.launch.stored_runs import read_object

from .test_cloud_job import Platform
from .test_cloud_job import job as job


def test_a_resumed_run_keeps_its_attempts(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Platform(storage=f"file://{tmp_path}/bucket")
    file = job.folder / launcher.job_file
    file.write_text(launcher.render(job))
    launcher.submit(job, file)
    there = tmp_path / "bucket" / "digits" / "one" / "record.json"
    attempts = [{"start": "now", "reason": "preempted"}]
    there.write_text(json.dumps({"attempts": attempts}))
    monkeypatch.setattr(submit, "find_launcher", lambda folder: (launcher, "job-1"))
    submit.check_unused(job.folder, resumed=True)
    launcher.submit(job, file)
    assert json.loads(there.read_text())["attempts"] == attempts


def test_another_run_in_the_storage_is_not_overwritten(job: Job, tmp_path: Path) -> None:
    launcher = Platform(storage=f"file://{tmp_path}/bucket")
    there = tmp_path / "bucket" / "digits" / "one" / "record.json"
    there.parent.mkdir(parents=True)
    there.write_text(text := json.dumps({"attempts": [{"reason": "completed"}]}))
    (file := job.folder / launcher.job_file).write_text(launcher.render(job))
    with pytest.raises(
        ValueError, match=rf"^folder={job.folder}: file://{there.parent} holds another run; choose another"
    ):
        launcher.submit(job, file)
    assert [path.read_text() for path in there.parent.iterdir()] == [text]
    there.write_text("{")
    with pytest.raises(ValueError, match=rf"^file://{there}: damaged \(.*\); remove it, or choose another folder$"):
        launcher.submit(job, file)


def test_the_output_is_followed_over_interruptions(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stored_runs, "POLL_SECONDS", 0)
    launcher = Platform(storage=f"file://{tmp_path}/bucket")
    log = tmp_path / "bucket" / "digits" / "one" / "logs" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("Epoch 0\n")
    answers = [Status("running", ""), UnreachableError("no answer"), UnreachableError("no answer"), Status("ended", "")]

    def status(job_id: str) -> Status:
        if isinstance(answer := answers.pop(0), Status):
            return answer
        log.write_text("Epoch 0\nEpoch 1\n")
        raise answer

    monkeypatch.setattr(launcher, "status", status)
    assert "".join(launcher.logs("job-1", job.folder, follow=True)) == "Epoch 0\nEpoch 1\n"
    assert capsys.readouterr().err == "note: no answer\n"


def test_storage_that_cannot_be_reached_is_a_note(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Platform(storage="nonsense://bucket")
    jobs.refresh(launcher, job.folder)
    assert capsys.readouterr().err.startswith("note: nonsense://bucket/digits/one/record.json: cannot be read (")
    with pytest.raises(ValueError, match="is a path on the nodes; copy the run from there"):
        Platform(storage="/mnt/runs").fetch(job.folder)


def test_objects_are_read_from_a_position_on(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("abc")
    assert [read_object(f"file://{tmp_path}/log", start) for start in (0, 2, 3)] == [b"abc", b"c", b""]
    assert read_object(f"file://{tmp_path}/none") == b""
