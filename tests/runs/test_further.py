import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from compared_runs import write_group, write_run

from boltcutter.cli import commands as cli
from boltcutter.config.compose import compose
from boltcutter.config.values import plain
from boltcutter.project import Project
from boltcutter.run import trust
from boltcutter_runs.further import commands, further_seeds, overrides_of
from boltcutter_runs.groups import Group, read_group
from boltcutter_runs.record import find_runs

PROJECT = Project.find(None)


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["boltcutter"])


def trained(folder: Path, overrides: list[str], *, seed: int = 0, signs: bool = True, **facts: Any) -> Group:
    """A group of one run that was trained with these overrides in this project."""
    config = plain(compose(PROJECT, [*overrides, f"seed={seed}", f"folder={folder}"]))
    write_run(folder, 0.5, seed=seed)
    record = json.loads((folder / "record.json").read_text())
    command = shlex.join(["/usr/bin/boltcutter", "train", *overrides, f"seed={seed}", f"folder={folder}"])
    record |= {"config": config, "command": command, "signature": trust.sign(config) if signs else None}
    (folder / "record.json").write_text(json.dumps(record | facts))
    return read_group(str(folder), find_runs(folder), "test/accuracy")


def test_the_commands_repeat_the_overrides_with_new_seeds(tmp_path: Path) -> None:
    group = trained(tmp_path / "run", ["model=mlp", "model.hidden_sizes=[64, 32]"], seed=2)
    assert list(commands(PROJECT, group, [3, 4, 5, 9])) == [
        "boltcutter search search=seeds search.seeds=3 seed=3 model=mlp 'model.hidden_sizes=[64, 32]'",
        "boltcutter train seed=9 model=mlp 'model.hidden_sizes=[64, 32]'",
    ]


def test_the_commands_of_folds_repeat_the_cross_validation(tmp_path: Path) -> None:
    group = trained(tmp_path / "run", ["model=mlp", "data.num_folds=5", "data.fold=3"])
    assert list(commands(PROJECT, group, [1, 2])) == [
        "boltcutter search search=kfold search.folds=5 search.seeds=2 seed=1 model=mlp"
    ]


@pytest.mark.parametrize(
    ("facts", "signs"),
    [
        ({}, False),
        ({"command": "python notebook.py"}, True),
        ({"command": "boltcutter train model=mlp optimizer.lr=0.5"}, True),
        ({"command": "boltcutter train 'model=mlp"}, True),
        ({"command": None}, True),
    ],
)
def test_overrides_that_do_not_lead_to_the_settings_are_not_shown(
    tmp_path: Path, facts: dict[str, Any], signs: bool
) -> None:
    group = trained(tmp_path / "run", ["model=mlp"], signs=signs, **facts)
    assert overrides_of(PROJECT, group.results[0]) == [f"reproduce={tmp_path / 'run'}"]


@pytest.mark.parametrize(
    ("ours", "theirs", "count", "expected"),
    [
        ([0, 1], [0, 1], 4, ([2, 3], [2, 3])),
        ([0, 1, 2, 3], [0, 1], 4, ([], [2, 3])),
        ([0, 1], [5, 6], 4, ([5, 6], [0, 1])),
        ([0, 1], [5, 6], 5, ([5, 6, 7], [0, 1, 7])),
    ],
)
def test_seeds_of_the_other_group_come_first(
    tmp_path: Path, ours: list[int], theirs: list[int], count: int, expected: tuple[list[int], list[int]]
) -> None:
    groups = []
    for name, seeds in (("a", ours), ("b", theirs)):
        for seed in seeds:
            write_group(tmp_path, name, [0.5], seed=seed)
        groups.append(read_group(f"model={name}", find_runs(tmp_path), "test/accuracy"))
    assert further_seeds(*groups, count) == expected


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["model=mlp"], ["model=mlp", "data.num_folds=5"]])
@pytest.mark.parametrize("signs", [True, False])
def test_the_commands_are_accepted(
    tmp_path: Path, overrides: list[str], signs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    group = trained(tmp_path / "run", overrides, signs=signs)
    for command in commands(PROJECT, group, [7, 8]):
        cli.main([*shlex.split(command)[1:], "--check", *([] if signs else ["trust=true"])])
    assert "trials" in capsys.readouterr().out
