import json
import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from boltcutter import run_files
from boltcutter.config.errors import ConfigError
from boltcutter.environment import lease, user_key
from boltcutter.environment.process import start_time
from boltcutter.environment.this_process import this_process
from boltcutter.launch import slurm_queue
from boltcutter.launch.jobs import find_launcher, job_of, list_runs, read_launch, remember, run_verb

SLURM = {"_target_": "boltcutter.launch.slurm.SlurmLauncher"}


def make_run(folder: Path, *reasons: str, job: str | None = None) -> None:
    folder.mkdir(parents=True)
    launch = {"launch": {"settings": SLURM, "id": job}} if job else {}
    (folder / "record.json").write_text(json.dumps({"attempts": [{"reason": reason} for reason in reasons], **launch}))


def test_all_runs_and_jobs_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    make_run(runs / "digits" / "one", "completed", job="5")
    make_run(runs / "digits" / "two", "preempted by SIGUSR2", job="7")
    make_run(runs / "digits" / "array" / "array-0", job="8_0")
    make_run(runs / "mnist" / "three", "completed")
    make_run(runs / "mnist" / "gone", "completed", "running")
    answers = {
        "scontrol": "echo JobId=$4 JobState=PENDING Reason=Priority",
        "squeue": f"echo '7|RUNNING|digits|{runs}/digits/two/job.sh'\n"
        f"echo '8|PENDING|digits|{runs}/digits/array/job.sh'\n"
        "echo '9|RUNNING|digits|/elsewhere/run/job.sh'; echo '10|RUNNING|interactive|(null)'",
    }
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    list_runs(runs)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(
        [
            "runs/digits/one: 1 attempt, completed",
            "runs/digits/two: job 7, PENDING, for Priority, 1 attempt, preempted by SIGUSR2",
            "runs/digits/array/array-0: job 8_0, PENDING, for Priority, 0 attempts, never started",
            "runs/mnist/three: not launched, 1 attempt, completed",
            "runs/mnist/gone: not launched, 2 attempts, killed",
            "job 9, RUNNING: /elsewhere/run/job.sh",
            "job 10, RUNNING: interactive",
        ]
    )
    monkeypatch.setattr(slurm_queue, "RETRY_DELAYS", ())
    for name in ("scontrol", "squeue"):
        (tmp_path / name).write_text("#!/bin/bash\necho 'error: Unable to contact slurm controller' >&2; exit 1\n")
    (runs / "mnist" / "gone" / "record.json").write_text("{")
    with pytest.raises(ConfigError, match=r"Unable to contact(?s:.)*gone/record\.json") as error:
        list_runs(runs)
    output = capsys.readouterr().out
    assert "runs/digits/two: unknown\n" in output
    assert "runs/mnist/gone: unknown\n" in output
    assert "runs/mnist/three: not launched, 1 attempt, completed\n" in output
    assert len(str(error.value).splitlines()) == 4  # of two jobs, a record, and the queue


def test_runs_with_a_folder_of_their_own_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/digits/one", "elsewhere/two", "elsewhere/array/array-0", "gone"):
        make_run(tmp_path / folder, "completed")
    for folder in ("runs/digits/one", "elsewhere/two", "elsewhere/two", "elsewhere/array", "gone"):
        remember("runs", Path(folder))
    (tmp_path / "gone" / "record.json").unlink()
    list_runs(Path("runs"))
    listed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == ["elsewhere/array/array-0", "elsewhere/two", "runs/digits/one"]


def test_a_fifo_in_place_of_the_list_of_folders_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    os.mkfifo(tmp_path / "runs" / run_files.FOLDERS)
    remember(str(tmp_path / "runs"), tmp_path / "elsewhere")
    list_runs(tmp_path / "runs")


LOCAL = "boltcutter.launch.local.LocalLauncher"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"_target_": "lightning.Trainer"}, "launch._target_=lightning.Trainer: no launcher; launch the run again"),
        ({}, "None: no module named None; give the full dotted path of a class"),
        ({"_target_": LOCAL, "grace_seconds": "${oc.env:NOT_SET}"}, "${oc.env:NOT_SET}, which reads your environment"),
        ({"_target_": LOCAL, "b": 1}, "launch.b: LocalLauncher takes no such argument; "),
    ],
)
def test_only_launchers_are_built_from_a_record(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    (tmp_path / "record.json").write_text(json.dumps({"launch": {"id": "1", "settings": settings}}))
    with pytest.raises(ConfigError) as error:
        find_launcher(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_variable_that_a_trusted_record_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"_target_": LOCAL, "python": "${oc.env:NOT_SET}"}
    (tmp_path / "record.json").write_text(json.dumps({"launch": {"id": "1", "settings": settings}}))
    monkeypatch.setattr(this_process, "trusts_all", True)
    with pytest.raises(ConfigError, match="export NOT_SET=…; launch the run again"):
        find_launcher(tmp_path)


ESCAPES = "\x1b]0;title\x07\x9b31m"


def test_runs_of_somebody_else_cannot_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm_queue, "jobs", list)
    folder = tmp_path / ESCAPES / "run"
    settings = {"_target_": "boltcutter.launch.local.LocalLauncher"}
    (folder / "logs").mkdir(parents=True)
    record = {"attempts": [{"reason": ESCAPES}], "launch": {"settings": settings, "id": ESCAPES}, "config": {}}
    (folder / "record.json").write_text(json.dumps(record))
    (folder / "logs" / "local.log").write_text(f"{ESCAPES}\n")
    for verb in ("status", "logs"):
        run_verb(verb, folder, follow=False)
    for content in (json.dumps(record), "{"):
        (folder / "record.json").write_text(content)
        with suppress(ConfigError):
            list_runs(tmp_path)
    shown = capsys.readouterr().out
    assert shown.count("title") > 6
    assert not [line for line in shown.splitlines() if not line.isprintable()]


def test_lists_and_reasons_of_another_type_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm_queue, "jobs", list)
    for number, reason in enumerate((None, 1, [], {"a": 1})):
        (folder := tmp_path / "digits" / str(number)).mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps({"attempts": [{"reason": reason}]}))
    for spoil in (lambda file: os.mkfifo(file), lambda file: file.mkdir(), lambda file: file.write_bytes(b"\xff\0\n")):
        spoil(file := tmp_path / ".folders")
        list_runs(tmp_path)
        assert capsys.readouterr().out.count("not launched, 1 attempt, ") == 4
        file.rmdir() if file.is_dir() else file.unlink()
    make_run(tmp_path / "digits" / "leased", "running")
    (tmp_path / "digits" / "leased" / lease.FILE).mkdir()
    with pytest.raises(ConfigError, match="digits/leased: "):
        list_runs(tmp_path)
    assert capsys.readouterr().out.count("\n") == 5


def test_only_a_job_that_this_user_has_signed_is_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_key, "KEY_FILE", tmp_path / "key")
    settings = {"_target_": "boltcutter.launch.local.LocalLauncher"}
    facts = {"settings": settings, "id": "7 on elsewhere since 3", "signature": user_key.sign(settings)}
    (tmp_path / "config.yaml").touch()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        its = f"{process.pid} on {socket.gethostname()} since {start_time(process.pid)}"
        signature = user_key.sign(job_of(facts))
        for job in ({"id": its}, {"id": its, "id_signature": signature}):  # of another job
            (tmp_path / "record.json").write_text(json.dumps({"launch": facts | job}))
            run_verb("status", tmp_path, follow=False)
            with pytest.raises(ConfigError, match="you have not signed the id of its job; set trust=true"):
                run_verb("cancel", tmp_path, follow=False)
            assert process.poll() is None
        signed = facts | {"id": its, "id_signature": user_key.sign(job_of(facts | {"id": its}))}
        (tmp_path / "record.json").write_text(json.dumps({"launch": signed}))
        run_verb("cancel", tmp_path, follow=False)
        assert process.wait(30) == -signal.SIGTERM


def test_colors_in_logs_of_own_runs_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "local.log").write_text("\x1b[31mred\x1b[0m\n")
    settings = {"_target_": "boltcutter.launch.local.LocalLauncher"}
    record = {"launch": {"settings": settings, "id": "1"}, "config": {}, "signature": user_key.sign({})}
    (tmp_path / "record.json").write_text(json.dumps(record))
    run_verb("logs", tmp_path, follow=False)
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m\n"


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"id": 1, "settings": SLURM}, "no id of a job"),
        ({"id": "1", "settings": 1}, "no launch settings"),
        ({"id": "1", "settings": {"_target_": "os.system"}}, "refers to os.system"),
    ],
)
def test_launch_settings_of_somebody_else_are_checked(tmp_path: Path, launch: dict[str, object], message: str) -> None:
    (tmp_path / "record.json").write_text(json.dumps({"launch": launch}))
    with pytest.raises(ConfigError, match=message):
        find_launcher(tmp_path)
    (tmp_path / "record.json").write_text(json.dumps({"launch": {"id": "1", "settings": SLURM}}))
    assert read_launch(tmp_path, "run")
    with pytest.raises(ConfigError, match="that you have not signed"):
        read_launch(tmp_path, "resume", runs=True)
    (tmp_path / "job.log").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="leads out of it"):
        read_launch(tmp_path, "run")
