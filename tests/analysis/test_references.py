"""Names of runs in overrides."""

import json
import os
import re
from pathlib import Path

import pytest

from boltcutter.analysis import references
from boltcutter.analysis.hang import print_hang
from boltcutter.analysis.record import find_runs
from boltcutter.analysis.references import VARIABLE, candidates, find, resolve
from boltcutter.cli import main as cli
from boltcutter.cli.completion import complete
from boltcutter.cli.table import COMMANDS
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project

from .conftest import Write

PROJECT = Project.find(__file__)
OLD, NEW, TRIAL = "20260101-120000-aaaa1111", "20260102-120000-bbbb2222", "20260103-120000-cccc3333"


@pytest.fixture
def runs(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    write(tmp_path / "digits" / OLD, day=1, metrics={"val/loss": 0.1, "val/accuracy": 0.7})
    write(tmp_path / "digits" / NEW, day=2, metrics={"val/loss": 0.2, "val/accuracy": 0.8})
    folder = tmp_path / "digits" / TRIAL
    write(folder / "trials" / "0000", day=5, metrics={"val/loss": 0.3, "val/accuracy": 0.9})
    (folder / "search.json").write_text(json.dumps({"created": "2026-01-04", "metrics": [["val/loss", "min"]]}))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("latest", NEW, "completed"),  # not a trial, and not the search
        ("best:val/loss", OLD, "with the smallest val/loss, 0.1000"),
        ("best:val/accuracy", f"{TRIAL}/trials/0000", "with the largest val/accuracy, 0.9000"),
        (OLD, OLD, ""),
        ("20260102", NEW, ""),
        ("aaaa", OLD, ""),
        ("20260103", TRIAL, ""),
        ("cccc3333/0000", f"{TRIAL}/trials/0000", ""),
        (f"{TRIAL}/00", f"{TRIAL}/trials/0000", ""),
    ],
)
def test_names_are_resolved_where_a_run_is_expected(
    runs: Path, text: str, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["seed=1", f"resume={text}", f"runs={runs}"]
    assert resolve(Project.at(runs), given) == ["seed=1", f"resume={runs}/digits/{name}", f"runs={runs}"]
    note = capsys.readouterr().err
    assert note.startswith(f"note: resume={text} is ") if words else not note
    assert words in note


@pytest.mark.parametrize("value", ["nothing", "registry:x@v1", "s3://bucket/run", "", "runs/gone/last.ckpt", "."])
def test_other_values_are_left_to_the_command(runs: Path, value: str) -> None:
    assert resolve(Project.at(runs), [f"run={value}", f"runs={runs}"])[0] == f"run={value}"


def test_a_path_comes_before_an_id(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    (runs / "aaaa").mkdir()
    assert resolve(Project.at(runs), ["run=aaaa", f"runs={runs}"])[0] == "run=aaaa"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best:", "run=best:: names no metric; write run=best:val/loss"),
        ("2026", f"run=2026: 3 runs begin like this ({OLD}, {NEW}, {TRIAL}); give more of the id"),
        ("best:val/acuracy", "run=best:val/acuracy: no run has val/acuracy; did you mean best:val/accuracy?"),
    ],
)
def test_mistakes_are_one_line(runs: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        resolve(Project.at(runs), [f"run={text}", f"runs={runs}"])


def test_without_runs_there_is_no_latest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run=latest: there are no runs"):
        resolve(Project.at(tmp_path), ["run=latest", f"runs={tmp_path}"])
    with pytest.raises(ConfigError, match="run=x: no run with this id"):
        find([], "x")


def test_processes_that_are_started_use_the_same_run(runs: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["reproduce=latest", f"runs={runs}"]
    found = resolve(Project.at(runs), given)
    write(runs / "digits" / "20260109-000000-dddd4444", day=9)
    monkeypatch.setattr(references, "distributed_rank", lambda: 1)
    assert resolve(Project.at(runs), given) == found
    monkeypatch.delitem(os.environ, VARIABLE)
    with pytest.raises(
        ConfigError, match=r"reproduce=latest: ranks could find different runs; use reproduce=.*dddd4444"
    ):
        resolve(Project.at(runs), given)


def test_candidates_are_names_and_ids(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "runs_folder", lambda project: str(runs))
    record = json.loads((runs / "digits" / NEW / "record.json").read_text())
    record["metrics"] |= {"lr-AdamW": 0.1, "train/loss": 0.1, "train/loss_epoch": 0.1}  # by which nobody chooses
    (runs / "digits" / NEW / "record.json").write_text(json.dumps(record))
    found = candidates(Project.at(runs))
    assert [name for name in found if not name.startswith("best:")] == ["latest", TRIAL, NEW, OLD]
    assert {name for name in found if name.startswith("best:")} == {"best:val/loss", "best:val/accuracy"}
    assert found[NEW] == "digits-convnet, completed"
    assert len(find_runs(runs)) == 4


def test_the_shell_completes_names_of_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "runs_folder", lambda project: str(runs))
    found = complete(Project.at(runs), "Evaluate: boltcutter evaluate run=<folder>", "run=20260101")
    assert found == {f"run={OLD}": "digits-convnet, completed"}
    assert [*complete(Project.at(runs), "", "resume=l")] == ["resume=latest"]


@pytest.mark.parametrize("where", ["given", "configured"])
def test_launch_takes_names_of_runs(
    runs: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"runs={runs}"]
    if where == "configured":
        given = []
        monkeypatch.setattr(references, "runs_folder", lambda project, overrides: str(runs))
    with pytest.raises(SystemExit, match="2"):
        cli.dispatch_command(PROJECT, COMMANDS["launch"], arguments=["status", "run=latest", *given])
    note, error = capsys.readouterr().err.splitlines()
    assert note.startswith(f"note: run=latest is {runs}/digits/{NEW}, ")
    assert error.startswith(f"error: run={runs}/digits/{NEW}: this run was not launched; ")


def test_why_takes_names_of_runs_that_hang(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "runs_folder", lambda project, overrides: str(runs))
    with pytest.raises(ConfigError, match=f"run={runs}/digits/{NEW}: no process trains in it"):
        print_hang(PROJECT, ["run=latest", "--hang"])


def test_search_takes_names_of_runs(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(references, "runs_folder", lambda project, overrides: str(runs))
    with pytest.raises(SystemExit, match="2"):
        cli.dispatch_command(PROJECT, COMMANDS["search"], arguments=["resume=cccc"])
    assert capsys.readouterr().err.startswith(f"error: resume={runs}/digits/{TRIAL}: its record holds")
