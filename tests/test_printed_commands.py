"""Each command that another one prints, or that the page of a run shows, does what it names, in a new project."""

import json
import re
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, patience
from new_project import in_shell

from boltcutter.project import Project
from boltcutter.scaffold import new

QUICK = "trainer.max_epochs=1 logger=csv report=false"
SHOWN = re.compile(r'<code class="command">(.*?)</code>', re.DOTALL)  # on a page
PRINTED = re.compile(r"\bboltcutter (?:train|search|evaluate|predict|runs|launch|compare) [^\n`]+")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project, whose ``configs/local.yaml`` changes settings of every command."""
    folder = new.new_command(Project.at(ROOT), ["small", f"folder={tmp_path_factory.mktemp('a new')}"])
    (folder / "configs" / "local.yaml").write_text("data:\n  batch_size: 64\n")
    return folder


def printed(output: str) -> dict[str, str]:
    """The commands in the output of another, by their names."""
    return {line.split()[1]: line.strip() for line in PRINTED.findall(output)}


def records(project: Path) -> dict[Path, dict[str, Any]]:
    """The records of all runs."""
    files = [file for file in project.glob("runs/**/record.json") if ".archive" not in file.parts]
    files = [file for file in files if not {"code", "tries"} & {*file.relative_to(project).parts}]
    return {file.parent: json.loads(file.read_text()) | {"folder": file.parent} for file in files}


def added(project: Path, command: str) -> tuple[str, list[dict[str, Any]]]:
    """What a command prints, and the records of the runs that it adds."""
    before = records(project).keys()
    out = in_shell(command, project)
    return out, [record for folder, record in records(project).items() if folder not in before and "config" in record]


def validated(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record["metrics"].items() if name.startswith("val/")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_a_training(project: Path) -> None:
    out, (record,) = added(project, f"boltcutter train {QUICK} seed=3 'name=o $n e'")
    commands = printed(out)
    assert commands.keys() == {"evaluate", "predict", "train"}
    evaluated = " ".join(in_shell(commands["evaluate"], project).split())
    assert all(f"{name} {value:.4f}" in evaluated for name, value in record["test"].items())
    _, (again,) = added(project, f"boltcutter train 'reproduce={record['folder']}'")
    assert validated(again) == validated(record)
    assert again["config"]["data"]["batch_size"] == 64
    _, runs = added(project, commands["train"].replace("<more>", "2"))
    assert not runs  # the same run goes on
    continued = records(project)[record["folder"]]
    assert continued["config"]["trainer"]["max_epochs"] == 2
    count = len(records(project))
    undo = printed(in_shell("boltcutter runs archive latest", project))["runs"]
    assert len(records(project)) == count - 1
    in_shell(undo, project)
    assert len(records(project)) == count


def shown(page: Path) -> str:
    """The command that a page shows."""
    return unescape("".join(SHOWN.findall(page.read_text()))).strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_a_reproduction(project: Path) -> None:
    _, (record,) = added(project, f"boltcutter train {QUICK} seed=4 name=original")
    out, (again,) = added(project, f"boltcutter train 'reproduce={record['folder']}'")
    assert f"reproduced: all {len(record['metrics'] | record['test'])} metrics equal those of" in out
    commands = printed(out)
    assert commands.keys() == {"evaluate", "predict", "train"}
    assert all(str(again["folder"].relative_to(project)) in command for command in commands.values())
    evaluated = " ".join(in_shell(commands["evaluate"], project).split())
    assert all(f"{name} {value:.4f}" in evaluated for name, value in record["test"].items())
    _, runs = added(project, commands["train"].replace("<more>", "2"))
    assert not runs
    assert records(project)[again["folder"]]["config"]["trainer"]["max_epochs"] == 2
    assert records(project)[record["folder"]]["config"]["trainer"]["max_epochs"] == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_on_the_page_of_a_run(project: Path) -> None:
    _, (record,) = added(project, f"boltcutter train {QUICK.replace(' report=false', '')} seed=5 name=page")
    _, (again,) = added(project, shown(record["folder"] / "report.html"))
    assert validated(again) == validated(record)
    in_shell(f"boltcutter train 'resume={record['folder']}' trainer.max_epochs=2", project)
    _, (longer,) = added(project, shown(record["folder"] / "report.html"))
    assert longer["config"]["trainer"]["max_epochs"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_on_the_page_of_a_trial(project: Path) -> None:
    _, trials = added(project, f"boltcutter train -m {QUICK.replace(' report=false', '')} seed=6,7 'name=t r'")
    pages = [next(project.glob(f"runs/t r/*/trials/{number:04d}/report.html")) for number in (0, 1)]
    again = [record for page in pages for record in added(project, shown(page))[1]]
    assert [run["config"]["seed"] for run in again] == [6, 7]
    assert list(map(validated, again)) == [validated(t) for t in sorted(trials, key=lambda t: t["config"]["seed"])]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_a_search(project: Path) -> None:
    out, trials = added(project, f"boltcutter search search=random search.num_trials=2 {QUICK}")
    _, (run,) = added(project, f"{printed(out)['train']} test=false")
    best = min((validated(trial) for trial in trials), key=lambda metrics: metrics["val/loss"])
    assert validated(run) == best
    (page,) = (file for file in project.glob("runs/**/report.html") if "random" in shown(file))
    _, again = added(project, shown(page))
    assert sorted(trial["metrics"]["val/loss"] for trial in again) == sorted(t["metrics"]["val/loss"] for t in trials)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_that_fill_in_folds_of_a_comparison(project: Path) -> None:
    added(project, f"boltcutter train {QUICK} name=single optimizer.lr=0.02 test=false")
    added(project, f"boltcutter search search=kfold search.folds=2 {QUICK} name=folded")
    refused = in_shell("boltcutter compare --metric val/loss name=single name=folded 2>&1 || true", project)
    command = printed(refused)["search"].partition(", and compare")[0]
    _, runs = added(project, command)
    assert sorted(run["config"]["data"]["fold"] for run in runs) == [0, 1]
    assert {run["config"]["optimizer"]["lr"] for run in runs} == {0.02}
    assert {run["config"]["data"]["batch_size"] for run in runs} == {64}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_a_launch(project: Path) -> None:
    out = in_shell(f"boltcutter launch launch=local {QUICK} name=far optimizer.lr=0.03", project)
    command = printed(out)["launch"]
    deadline = time.monotonic() + patience(120)
    while "completed" not in (status := in_shell(command.replace("status|logs|cancel", "status"), project)):
        assert time.monotonic() < deadline, status
        time.sleep(1)
    assert "epoch 1/1" in in_shell(command.replace("status|logs|cancel", "logs"), project)
    (run,) = (record for record in records(project).values() if record.get("name") == "far")
    assert (run["config"]["optimizer"]["lr"], run["config"]["data"]["batch_size"]) == (0.03, 64)
