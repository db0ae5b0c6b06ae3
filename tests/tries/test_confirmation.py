from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tries_runs import ENTRY

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.tries import ledger
from boltcutter.tries.confirmation import arguments_of


def test_changes_of_code_have_to_be_joined_by_a_person(project: Project, tmp_path: Path) -> None:
    ledger.append(tmp_path, replace(ENTRY, verdict="accepted", code="abc", change="my-branch", effect="1%"))
    with pytest.raises(ConfigError, match="my-branch"):
        arguments_of(project, ["--confirm", f"runs={tmp_path}"])
    found, ids = arguments_of(project, ["--confirm", "joined", f"runs={tmp_path}"])
    assert ids == ("a",)
    assert {"joined", "effect=1%", "seed=2", "optimizer.lr=0.1"} <= {*found}


def test_of_two_values_the_last_or_the_given_one_is_taken(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--confirm", f"runs={tmp_path}"]
    for name, value, baseline in (("a", "0.1", ()), ("b", "0.2", ()), ("c", "0.3", ("optimizer.lr=0.2",))):
        new = (f"optimizer.lr={value}",)
        more = {"change_overrides": new, "baseline_overrides": baseline}
        ledger.append(tmp_path, replace(ENTRY, id=name, verdict="accepted", effect="1%", **more))
    found, ids = arguments_of(project, command)
    assert "note: optimizer.lr=0.2 replaces optimizer.lr=0.1, which was accepted" in capsys.readouterr().err
    assert (found[-1], ids) == ("optimizer.lr=0.3", ("a", "b", "c"))
    found, ids = arguments_of(project, [*command, "optimizer.lr=0.2"])
    assert {one for one in found if one.startswith("optimizer.lr=")} == {"optimizer.lr=0.2"}
    assert ids == ("b",)
    with pytest.raises(ConfigError, match="nothing that was accepted has the given values"):
        arguments_of(project, [*command, "optimizer.lr=0.5"])


@pytest.mark.parametrize(
    ("second", "given", "is_said"),
    [
        (["model=mlp", "optimizer.lr=0.1"], [], False),  # on top of the first
        (["model=convnet"], [], True),
        ([], [], True),
        (["model=convnet"], ["against=model=vit"], False),
    ],
)
def test_another_baseline_than_the_first_is_said(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str], second: list[str], given: list[str],
    is_said: bool,
) -> None:  # fmt: skip
    made = (("a", ["model=mlp"], "optimizer.lr=0.1"), ("b", second, "data.batch_size=8"))
    for name, baseline, change in made:
        more = {"baseline_overrides": baseline, "change_overrides": [*baseline, change]}
        ledger.append(tmp_path, replace(ENTRY, id=name, verdict="accepted", effect="1%", **more))
    found, ids = arguments_of(project, ["--confirm", f"runs={tmp_path}", *given])
    assert ids == ("a", "b")
    assert ("b was accepted against" in capsys.readouterr().err) is is_said
    assert (given or ["against=model=mlp"])[0] in found


def test_one_metric_is_confirmed_at_a_time(project: Project, tmp_path: Path) -> None:
    for name, metric in (("a", "val/loss"), ("b", "val/accuracy")):
        ledger.append(tmp_path, replace(ENTRY, id=name, verdict="accepted", metric=metric))
    with pytest.raises(ConfigError, match="metric="):
        arguments_of(project, ["--confirm", f"runs={tmp_path}"])
