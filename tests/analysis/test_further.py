import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared_runs import write_group, write_run, write_search

from boltcutter import ConfigError
from boltcutter.analysis.further import check_folds, commands, further_seeds, lasting_filter, overrides_of
from boltcutter.analysis.groups import Group, read_group
from boltcutter.analysis.record import find_runs
from boltcutter.cli import commands as cli
from boltcutter.config.compose import compose
from boltcutter.environment import user_key
from boltcutter.project import Project

PROJECT = Project.find(None)


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["boltcutter"])


def trained(folder: Path, overrides: list[str], *, seed: int = 0, signs: bool = True, **facts: Any) -> Group:
    """A group of one run that was trained with these overrides in this project."""
    config = compose(PROJECT, [*overrides, f"seed={seed}", f"folder={folder}"]).written
    write_run(folder, 0.5, seed=seed)
    record = json.loads((folder / "record.json").read_text())
    command = shlex.join(["/usr/bin/boltcutter", "train", *overrides, f"seed={seed}", f"folder={folder}"])
    record |= {"config": config, "command": command, "signature": user_key.sign(config) if signs else None}
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


def test_a_chosen_trial_is_trained_again_with_its_seed(tmp_path: Path) -> None:
    write_search(tmp_path / "search", [0.3, 0.2])
    write_group(tmp_path, "b", [0.5, 0.6])
    groups = [read_group(text, find_runs(tmp_path), "test/accuracy") for text in (f"{tmp_path}/search", "model=b")]
    assert further_seeds(*groups, 3) == ([0, 1, 2], [2])


def test_the_best_trial_is_trained_from_its_experiment(tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text("{}")
    (tmp_path / "best.yaml").write_text("defaults:\n  model: mlp\noptimizer:\n  lr: 0.5\n")
    overrides = ["model=mlp", "optimizer.lr=0.5", "~scheduler"]
    group = trained(tmp_path / "trials" / "0001", overrides)
    trial = replace(group.results[0], run=replace(group.results[0].run, kind="trial"))
    assert overrides_of(PROJECT, trial) == [f"experiment={tmp_path}/best.yaml", "~scheduler"]
    (tmp_path / "best.yaml").write_text("defaults:\n  model: mlp\n")  # of another trial by now
    assert overrides_of(PROJECT, trial) == overrides


@pytest.mark.parametrize(
    ("first", "second", "numbers", "start"),
    [
        (["model=mlp", "data.num_folds=3"], ["model=linear"], "3 and null", "seed=0 model=linear"),
        (["model=mlp"], ["model=linear", "data.num_folds=3"], "3 and null", "seed=0 model=mlp"),
        (["model=mlp", "data.num_folds=3"], ["model=linear", "data.num_folds=5"], "3 and 5", "seed=0 model=linear"),
        (
            ["model=mlp", "data.num_folds=3"],
            ["model=linear", "data.num_folds=3", "data.fold=1"],
            "3",
            "seed=0 model=linear",
        ),
    ],
)
def test_other_folds_are_refused_with_the_command_that_trains_them(
    tmp_path: Path, first: list[str], second: list[str], numbers: str, start: str
) -> None:
    groups = [trained(tmp_path / name, given) for name, given in (("a", first), ("b", second))]
    with pytest.raises(ConfigError, match=rf"data\.num_folds={numbers}: folds are compared with the same") as caught:
        check_folds(PROJECT, *groups)
    number = 3 if "data.num_folds=3" in first + second else 5
    command = f"boltcutter search search=kfold search.folds={number} search.seeds=1 {start}"
    assert f"; run {command}, and compare its folder" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model=a and model.note=null", "model=a and model.note=null"),
        ("model=a and model.note=null and seed<3", 'model=a and model.note=""'),
        ("model=a and model.note=null and test/accuracy>0.1", 'model=a and model.note=""'),
        ("runs/a", 'model=a and model.note=""'),
        ("runs/a/a-0", 'model=a and model.note=""'),
        ("runs/b", 'model=b and data.num_folds=""'),
        ("runs/f", "model=b and data.num_folds=2"),
        ("runs/c", 'model.note="it\'s x, y"'),
        ("runs/d", r"""model.note~"^it's\ .x.,\ y$" """.strip()),
    ],
)
def test_the_next_comparison_counts_the_further_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, values in (("a", [0.5, 0.6]), ("b", [0.5, 0.6])):
        write_group(Path("runs"), name, values)
    for fold in (0, 1):
        settings = {"choices": {"model": "b"}, "model": {"name": "b"}, "data": {"num_folds": 2, "fold": fold}}
        write_run(Path("runs", "f", str(fold)), 0.5, settings=settings)
    for name, note in (("c", "it's x, y"), ("d", 'it\'s "x", y')):
        for seed in (0, 1):
            settings = {"choices": {"model": "a"}, "model": {"name": "a", "note": note}}
            write_run(Path("runs", name, str(seed)), 0.5, seed=seed, settings=settings)
    known = find_runs("runs")
    group = read_group(text, known, "test/accuracy")
    assert lasting_filter(group, known) == expected
    folder = next(Path(result.run.folder) for result in group.results).parent
    record = json.loads((group.results[0].folder / "record.json").read_text())
    record["config"]["seed"] = 7
    (folder / "further").mkdir()
    (folder / "further" / "record.json").write_text(json.dumps(record))
    counted = read_group(lasting_filter(group, known), find_runs("runs"), "test/accuracy")
    assert {result.key[0] for result in counted.results} >= {result.key[0] for result in group.results} | {7}


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


def test_a_command_in_the_folder_of_somebody_else_is_not_repeated(
    tmp_path: Path, hand_over: Callable[[Path], None]
) -> None:
    """The configuration in a copy has this user's signature, the command beside it has none."""
    planted = ["callback.progress._target_=os.mkdir", "+callback.progress.path=executed", "checkpoints=/elsewhere"]
    group = trained(tmp_path / "run", ["model=mlp"], command=f"boltcutter train model=mlp {' '.join(planted)} seed=0")
    assert overrides_of(PROJECT, group.results[0]) == ["model=mlp", *planted]
    hand_over(tmp_path / "run")
    assert overrides_of(PROJECT, group.results[0]) == [f"reproduce={tmp_path / 'run'}"]
