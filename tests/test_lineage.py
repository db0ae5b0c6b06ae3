import subprocess
from pathlib import Path

import pytest

from boltcutter import lineage, run

CONFIGS = Path(__file__).parents[1] / "configs"


def git(where: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(where), *identity, *words], check=True, capture_output=True, text=True, timeout=20
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    where = tmp_path / "repository"
    where.mkdir()
    git(where, "init", "-q", "-b", "main")
    (where / "known.py").write_text("a = 1\n")
    (where / ".gitignore").write_text("ignored.py\n")
    git(where, "add", "-A")
    git(where, "commit", "-qm", "first")
    return where


def test_a_clean_tree_has_no_patch(repository: Path) -> None:
    state = lineage.git_state(repository)
    assert state["commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert (state["branch"], state["dirty"], state["patch"]) == ("main", False, "")


def test_the_patch_makes_the_dirty_tree_again(repository: Path, tmp_path: Path) -> None:
    (repository / "known.py").write_text("a = 2\n")
    (repository / "new.py").write_text("b = 3\n")
    (repository / "ignored.py").write_text("secret\n")
    before = git(repository, "status", "--porcelain")
    patch = lineage.git_state(repository)["patch"]
    assert git(repository, "status", "--porcelain") == before  # the user's index is as it was
    (tmp_path / "patch").write_text(patch)
    git(tmp_path, "clone", "-q", str(repository), "again")
    git(tmp_path / "again", "apply", str(tmp_path / "patch"))
    assert (tmp_path / "again" / "known.py").read_text() == "a = 2\n"
    assert (tmp_path / "again" / "new.py").read_text() == "b = 3\n"
    assert "secret" not in patch


def test_large_new_files_stay_out_of_the_patch(repository: Path) -> None:
    (repository / "weights.bin").write_bytes(b"x" * (lineage.UNTRACKED_BYTES + 1))
    assert lineage.git_state(repository)["patch"] == ""


def test_a_password_in_the_remote_is_not_kept(repository: Path) -> None:
    git(repository, "remote", "add", "origin", "https://me:hidden@example.org/x.git")
    assert lineage.git_state(repository)["remote"] == "https://example.org/x.git"


def test_code_outside_git_has_no_commit(tmp_path: Path) -> None:
    assert lineage.git_state(tmp_path)["commit"] is None


def test_differences_are_told_one_by_one(tmp_path: Path) -> None:
    cfg = run.read_words(CONFIGS, [])
    cfg.folder = str(tmp_path / "run")
    run.create(cfg)
    record = run.read_record(tmp_path / "run")
    assert lineage.differences(record) == []
    record["packages"]["torch"] = "0.1"
    record["git"]["commit"] = "abc"
    record["hardware"]["gpus"] = ["H200"]
    record["python"] = "2.7"
    told = " | ".join(lineage.differences(record))
    for part in ("git checkout abc", "package torch is", "was 0.1", "gpus is [], was ['H200']", "was 2.7"):
        assert part in told
