from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tries_runs import write_baseline

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.search.trial import Sampled
from boltcutter.tries.plan import STATE, prepare
from boltcutter.tries.question import parse_request

GIVEN = ["optimizer.lr=0.1", "metric=val/accuracy", "effect=0.5%"]


def plan(project: Project, tmp_path: Path, *arguments: str):
    return prepare(project, parse_request([*GIVEN[1:], *(arguments or GIVEN[:1]), f"runs={tmp_path / 'runs'}"]))


def test_the_seeds_are_fixed_before_the_first_run(project: Project, tmp_path: Path) -> None:
    tried = plan(project, tmp_path)
    assert json.loads((tried.folder / STATE).read_text())["seeds"] == list(range(12)) == tried.pairs.seeds
    again = plan(project, tmp_path)
    assert (again.id, again.askings) == (tried.id, 1)
    other = plan(project, tmp_path, "optimizer.lr=0.1", "seed=5")
    assert other.pairs.seeds[0] == 12  # the question is the same, so its seeds are fresh
    assert plan(project, tmp_path, "optimizer.lr=0.2", "seed=5").pairs.seeds[0] == 5


def test_seeds_of_which_the_change_is_known_are_not_used(project: Project, tmp_path: Path) -> None:
    write_baseline(project, tmp_path / "runs" / "mlp" / "seen", 1)
    tried = plan(project, tmp_path, "model=mlp")
    assert tried.pairs.seeds[:3] == [0, 2, 3]


def test_a_change_of_nothing_is_a_mistake(project: Project, tmp_path: Path) -> None:
    for arguments in (("against=model=mlp",), ("model=mlp", "against=model=mlp"), ("tags=[a]",)):
        with pytest.raises(ConfigError, match="the same as"):
            plan(project, tmp_path, *arguments)


def test_the_split_of_the_data_is_named(project: Project, tmp_path: Path) -> None:
    assert not plan(project, tmp_path).notes
    (note,) = plan(project, tmp_path, "optimizer.lr=0.1", "split=fixed").notes
    assert "data.seed=0" in note
    assert not plan(project, tmp_path, "optimizer.lr=0.1", "against=data.seed=3", "split=by-seed").notes


def test_the_folder_of_a_try_is_that_of_its_state_and_of_this_user(
    project: Project, tmp_path: Path, hand_over: Callable[[Path], None]
) -> None:
    tried = plan(project, tmp_path)
    place = tried.folder.parent
    (place / "x").mkdir()
    state = json.loads((tried.folder / STATE).read_text()) | {"id": str(tmp_path / "precious"), "asking": 9}
    (place / "x" / STATE).write_text(json.dumps(state))
    assert plan(project, tmp_path).folder == tried.folder
    hand_over(place)  # as if it was exchanged while the first runs trained
    with pytest.raises(ConfigError, match="would be executed"):
        tried.pairs.make_trial(Sampled(0, {}), {})
