from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.run import trust
from boltcutter.tries.sides import Version, find_baseline, has_settings, make_side, parse_change


def git(root: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=me", "-c", "user.email=me@example.com", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tracked(project: Project) -> Project:
    """A project with a commit, a branch ``other`` and an uncommitted change."""
    (project.root / "src" / "mine").mkdir(parents=True)
    (file := project.root / "src" / "mine" / "model.py").write_text("WIDTH = 1\nDEPTH = 1\n")
    git(project.root, "init", "-q", "-b", "main")
    git(project.root, "add", ".")
    git(project.root, "commit", "-qm", "first")
    git(project.root, "checkout", "-qb", "other")
    file.write_text("WIDTH = 2\nDEPTH = 1\n")
    git(project.root, "commit", "-qam", "wider")
    git(project.root, "checkout", "-q", "main")
    file.write_text("WIDTH = 1\nDEPTH = 5\n")
    return project


def code_of(project: Project) -> str:
    return (project.root / "src" / "mine" / "model.py").read_text()


def test_the_code_of_each_side_is_copied(tracked: Project, tmp_path: Path) -> None:
    _, other = parse_change(tracked, ["other"])
    assert other
    assert other.commit
    place = tmp_path / "runs" / "tries"
    current = make_side(tracked, place, "baseline", ["seed=1", "seed=2"], Version())
    branch = make_side(tracked, place, "other", [], other)
    assert code_of(current.project) == "WIDTH = 1\nDEPTH = 5\n"
    assert code_of(branch.project) == "WIDTH = 2\nDEPTH = 1\n"
    assert current.overrides == ("seed=2",)
    assert current.code != branch.code
    assert branch.is_identified
    (tracked.root / "src" / "mine" / "model.py").write_text("WIDTH = 9\n")  # while the try runs
    assert code_of(current.project) == "WIDTH = 1\nDEPTH = 5\n"
    assert make_side(tracked, place, "other", [], other).project == branch.project
    assert git(tracked.root, "worktree", "list").count("\n") == 1


def test_a_patch_applies_to_the_working_tree(tracked: Project, tmp_path: Path) -> None:
    file = tmp_path / "mine.patch"
    file.write_text(git(tracked.root, "diff").replace("DEPTH = 5", "DEPTH = 1").replace("-DEPTH = 1", "-DEPTH = 5"))
    _, version = parse_change(tracked, [str(file)])
    assert version
    assert version.patch
    side = make_side(tracked, tmp_path / "runs" / "tries", "patch", [], version)
    assert code_of(side.project) == "WIDTH = 1\nDEPTH = 1\n"
    (tmp_path / "wrong.patch").write_text(file.read_text().replace("WIDTH = 1", "WIDTH = 7"))
    with pytest.raises(ConfigError, match="does not apply"):
        make_side(tracked, tmp_path / "x", "patch", [], parse_change(tracked, [str(tmp_path / "wrong.patch")])[1])


def test_what_is_no_version_is_a_mistake(tracked: Project, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        parse_change(tracked, ["nowhere"])
    with pytest.raises(ConfigError, match="main"):
        parse_change(tracked, ["other", "main"])
    with pytest.raises(ConfigError, match="against=nothing"):
        find_baseline(tracked, "nothing", str(tmp_path))
    assert find_baseline(tracked, "model=mlp optimizer.lr=0.1", "")[1] == ["model=mlp", "optimizer.lr=0.1"]
    assert find_baseline(tracked, "other", str(tmp_path))[2].commit


def test_code_outside_of_a_repository_has_no_versions(project: Project, tmp_path: Path) -> None:
    side = make_side(project, tmp_path, "baseline", [], Version())
    assert side.project == project
    assert not side.is_identified
    with pytest.raises(ConfigError, match="not tracked by git"):
        make_side(project, tmp_path, "patch", [], Version(patch=b"x"))


def test_an_agent_runs_only_code_of_the_project(
    tracked: Project, monkeypatch: pytest.MonkeyPatch, hand_over: Callable[[Path], None]
) -> None:
    (runs := tracked.root / "runs" / "a").mkdir(parents=True)
    places = [tracked.root / "own.patch", runs / "theirs.patch", tracked.root.parent / "theirs.patch"]
    for place in places:
        place.write_text("patch")
    fetched = git(tracked.root, "commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "fetched").strip()
    git(tracked.root, "update-ref", "refs/remotes/origin/theirs", fetched)
    assert parse_change(tracked, ["origin/theirs"])[1]
    monkeypatch.setenv(trust.AGENT, "1")
    for word in ("other", "HEAD", str(places[0])):
        assert parse_change(tracked, [word])[1]
    for word in ("origin/theirs", *map(str, places[1:])):
        with pytest.raises(ConfigError, match="an agent may run"):
            parse_change(tracked, [word])
    hand_over(places[0])
    with pytest.raises(ConfigError, match="an agent may run"):
        parse_change(tracked, [str(places[0])])


def test_settings_that_were_taken_from_the_data_are_no_other_settings() -> None:
    wanted = {"data.path": "x", "data.shape": None, "data.kind": "regression", "model.size": None}
    same = {"data": {"path": "x", "shape": [10], "kind": "regression"}, "model": {"size": None}}
    assert has_settings(same, wanted)
    assert not has_settings({**same, "model": {"size": 3}}, wanted)  # null may mean anything elsewhere
    assert not has_settings({**same, "data": {**same["data"], "kind": "classification"}}, wanted)
    assert not has_settings({"data": {"path": "x", "kind": "regression"}, "model": {"size": None}}, wanted)
