import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from boltcutter import files
from boltcutter.assembly.overrides import read_overrides
from boltcutter.project import Project
from boltcutter.run import lineage
from boltcutter.run.folder import create_folder, read_record

PROJECT = Project.find(__file__)


def git(where: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(where), *identity, *arguments], check=True, capture_output=True, text=True, timeout=20
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
    assert (state["branch"], state["dirty"], state["patch"]) == ("main", False, b"")


def test_the_patch_reproduces_the_dirty_tree(repository: Path, tmp_path: Path) -> None:
    (repository / "known.py").write_text("a = 2\n")
    (repository / "new.py").write_text("b = 3\n")
    (repository / "ignored.py").write_text("secret\n")
    before = git(repository, "status", "--porcelain")
    patch = lineage.git_state(repository)["patch"]
    assert git(repository, "status", "--porcelain") == before  # the user's index is as it was
    (tmp_path / "patch").write_bytes(patch)
    git(tmp_path, "clone", "-q", str(repository), "again")
    git(tmp_path / "again", "apply", str(tmp_path / "patch"))
    assert (tmp_path / "again" / "known.py").read_text() == "a = 2\n"
    assert (tmp_path / "again" / "new.py").read_text() == "b = 3\n"
    assert b"secret" not in patch


def test_a_repository_of_another_user_has_a_state(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in a container that runs as root
    assert (
        lineage.git_state(repository)["commit"]
        == git(repository, "-c", "safe.directory=*", "rev-parse", "HEAD").strip()
    )


HandOver = Callable[[Path], None]


@pytest.mark.parametrize("kind", ["top", "git"])
def test_git_runs_nothing_of_a_repository_above_that_belongs_to_somebody_else(
    repository: Path,
    hand_over: HandOver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    (repository / "project").mkdir()
    marker = arm(repository)
    hand_over(repository if kind == "top" else repository / ".git")
    if os.geteuid() == 0:
        os.chown(repository / "project", 0, 0)
    else:
        monkeypatch.setattr(lineage, "_known_owners", lambda where: files.trusted_owners())
    assert lineage.git_state(repository / "project")["commit"] is None
    assert lineage.list_files(repository / "project", "--others") is None
    assert not marker.exists()
    assert "belongs to another user" in capsys.readouterr().err


def test_filters_and_hooks_of_a_project_of_another_user_do_not_run(repository: Path, hand_over: HandOver) -> None:
    marker = arm(repository)
    hand_over(repository)
    assert b"+a = 2" in lineage.git_state(repository)["patch"]
    assert not marker.exists()


def test_objects_of_a_partial_clone_are_not_fetched(repository: Path, tmp_path: Path) -> None:
    git(repository, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "-q", "--no-checkout", "--filter=blob:none", f"file://{repository}", "partial")
    (tmp_path / "partial" / "known.py").write_text("a = 2\n")
    marker = tmp_path / "ran"
    git(tmp_path / "partial", "config", "remote.origin.uploadpack", f"touch {marker}; git-upload-pack")
    assert lineage.git_state(tmp_path / "partial")["patch"] is None
    assert not marker.exists()


def arm(repository: Path) -> Path:
    """Let the settings of a repository run a program, which creates the returned file."""
    marker = repository.parent / "ran"
    for name in ("post-index-change", "reference-transaction"):
        (repository / ".git" / "hooks").mkdir(exist_ok=True)
        (hook := repository / ".git" / "hooks" / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        hook.chmod(0o755)
    (repository / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    git(repository, "config", "filter.evil.clean", f"touch {marker}; cat")
    git(repository, "config", "core.fsmonitor", f"touch {marker}")
    (repository / "known.py").write_text("a = 2\n")
    (repository / "new.py").write_text("b = 1\n")
    return marker


def test_the_state_of_a_copy_is_not_that_of_a_folder_of_somebody_else_above(
    tmp_path: Path, hand_over: HandOver
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / lineage.SNAPSHOT).write_text('{"commit": "forged"}')
    assert lineage.git_state(tmp_path / "project")["commit"] == "forged"
    if os.geteuid() == 0:
        hand_over(tmp_path / lineage.SNAPSHOT)
        assert lineage.git_state(tmp_path / "project")["commit"] is None


@pytest.mark.parametrize("worktree", [False, True])
def test_nothing_is_written_to_the_repository(repository: Path, worktree: bool) -> None:
    where = repository = repository.rename(repository.with_name('a: "b\\c" é'))
    if worktree:
        where = repository.with_name("second")
        git(repository, "worktree", "add", "-q", str(where))
    (where / "known.py").write_text("a = 2\n")
    (where / "new.py").write_text("b = 3\n")
    before = {file: file.stat().st_mtime_ns for file in (repository / ".git").rglob("*")}
    patch = lineage.git_state(where)["patch"]
    assert {file: file.stat().st_mtime_ns for file in (repository / ".git").rglob("*")} == before  # it may be read-only
    assert (patch.count(b"-a = 1"), patch.count(b"+b = 3")) == (1, 1)


def test_a_project_in_a_monorepo(repository: Path, tmp_path: Path) -> None:
    project = repository / "projects" / "one"
    project.mkdir(parents=True)
    (project / "own.py").write_text("a = 1\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "second")
    (repository / "known.py").write_text("a = 2\n")  # may be imported by the project
    (repository / "new.py").write_text("somebody else's\n")
    (project / "own.py").write_text("a = 2\n")
    (project / "new.py").write_text("b = 3\n")
    state = lineage.git_state(project)
    assert state["commit"] == git(repository, "rev-parse", "HEAD").strip()
    (tmp_path / "patch").write_bytes(state["patch"])
    git(tmp_path, "clone", "-q", str(repository), "again")
    git(tmp_path / "again", "apply", str(tmp_path / "patch"))
    assert git(tmp_path / "again", "status", "--porcelain", "-uall").split() == [
        *("M", "known.py", "M", "projects/one/own.py", "??", "projects/one/new.py")
    ]


def test_large_new_files_stay_out_of_the_patch(repository: Path) -> None:
    (repository / "weights.bin").write_bytes(b"x" * (lineage.MAX_UNTRACKED_BYTES + 1))
    (repository / "package" / "__pycache__").mkdir(parents=True)
    (repository / "package" / "__pycache__" / "module.cpython-311.pyc").write_bytes(b"compiled")
    state = lineage.git_state(repository)
    assert (state["patch"], state["large"]) == (b"", ["weights.bin (1.0 MB)"])


@pytest.mark.parametrize("marker", ["venv/pyvenv.cfg", "tools/env [1]/conda-meta/history", "node_modules/left/pad.js"])
def test_an_environment_stays_out_of_the_patch(repository: Path, marker: str) -> None:
    place = repository / marker
    place.parent.mkdir(parents=True)
    place.write_text("")
    (place.parent / "module.py").write_text("a = 1\n")
    (repository / "new.py").write_text("mine = 1\n")
    state = lineage.git_state(repository)
    assert b"mine" in state["patch"]
    assert place.name not in state["patch"].decode()
    assert b"module.py" not in state["patch"]
    assert len(state["large"]) == 1
    assert marker.startswith(state["large"][0].partition("/ (")[0])
    (repository / ".gitignore").write_text(f"/{marker.partition('/')[0]}/\n")
    assert lineage.git_state(repository)["large"] == []


@pytest.mark.parametrize("folder", ["data", "package/data", "."])
def test_a_folder_of_many_new_files_stays_out_of_the_patch(repository: Path, folder: str) -> None:
    (repository / "package").mkdir()
    (repository / "package" / "new.py").write_text("mine = 1\n")
    (repository / folder).mkdir(exist_ok=True)
    for number in range(lineage.MAX_UNTRACKED_FILES + 1):
        (repository / folder / f"{number}.txt").touch()
    state = lineage.git_state(repository)
    assert b"mine" in state["patch"]
    assert state["patch"].count(b"diff --git") == 1
    name = "*" if folder == "." else f"{folder}/"
    assert state["large"] == [f"{name} ({lineage.MAX_UNTRACKED_FILES + 1:,} files)"]


def test_the_size_of_all_new_files_is_limited(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "MAX_UNTRACKED_TOTAL", 2500)
    for name in "abc":
        (repository / f"{name}.txt").write_text(name * 1000)
    state = lineage.git_state(repository)
    assert state["patch"].count(b"diff --git") == 2
    assert len(state["large"]) == 1


FILES = {
    "known.py": b"a = 1\r\nb = 2\r\n",
    "latin.py": "# na\u00efve\n".encode("latin-1"),
    "na\u00efve [1]*?.py": b"c = 1\n",
    "binary.bin": bytes(range(256)),
    " leading.py": b"d = 1",
}


@pytest.mark.parametrize("committed", [False, True], ids=["new", "changed"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("diff.external", "true"),
        ("color.ui", "always"),
        ("diff.noprefix", "true"),
        ("diff.mnemonicPrefix", "true"),
        ("core.quotePath", "true"),
        ("diff.context", "0"),
        ("core.safecrlf", "true"),
        ("diff.renames", "copies"),
    ],
)
def test_the_patch_is_independent_of_the_git_configuration(
    repository: Path, tmp_path: Path, setting: str, value: str, committed: bool
) -> None:
    if committed:
        for name in FILES:
            (repository / name).write_bytes(b"before\n")
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", "second")
    for name, content in FILES.items():
        (repository / name).write_bytes(content)
    git(repository, "config", setting, value)
    state = lineage.git_state(repository)
    assert state["dirty"] is True
    (tmp_path / "patch").write_bytes(state["patch"])
    git(tmp_path, "clone", "-q", str(repository), "again")
    git(tmp_path / "again", "apply", str(tmp_path / "patch"))
    assert {name: (tmp_path / "again" / name).read_bytes() for name in FILES} == FILES


def test_a_git_that_fails_is_not_a_clean_tree(repository: Path) -> None:
    (repository / ".git" / "index").write_bytes(b"damaged")
    state = lineage.git_state(repository)
    assert (state["dirty"], state["patch"]) == (None, None)


@pytest.mark.parametrize("sparse_index", ["false", "true"])
def test_a_sparse_checkout_has_a_patch(repository: Path, sparse_index: str) -> None:
    for folder in ("inside", "outside"):
        (repository / folder).mkdir()
        (repository / folder / "known.py").write_text("a = 1\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "second")
    git(repository, "config", "index.sparse", sparse_index)
    git(repository, "sparse-checkout", "set", "inside")
    (repository / "outside").mkdir(exist_ok=True)
    for folder in ("inside", "outside"):
        (repository / folder / "new.py").write_text("b = 2\n")
    patch = lineage.git_state(repository)["patch"]
    assert (patch.count(b"+b = 2"), patch.count(b"deleted file")) == (2, 0)


@pytest.mark.parametrize("kind", ["sha1", "sha256"])
def test_a_repository_without_a_commit_has_a_patch(tmp_path: Path, kind: str) -> None:
    git(tmp_path, "init", "-q", f"--object-format={kind}")
    (tmp_path / "new.py").write_text("a = 1\n")
    state = lineage.git_state(tmp_path)
    assert (state["commit"], state["dirty"]) == (None, True)
    assert b"+a = 1" in state["patch"]


def test_variables_of_git_hooks_are_ignored(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "nowhere"))
    state = lineage.git_state(repository)
    assert state["commit"]
    assert state["dirty"] is False


def test_secret_files_stay_out_of_the_patch(repository: Path) -> None:
    secret = b"planted" + b"-secret"
    key = b"-----BEGIN " + b"PRIVATE KEY-----\n" + secret
    (repository / "conf").mkdir()
    for name in (".env", "conf/server.pem", "known.py"):
        (repository / name).write_bytes(key if name == "known.py" else secret)
    git(repository, "add", ".env")  # also one that git knows by now
    (repository / "new.py").write_text("b = 1\n")
    state = lineage.git_state(repository)
    assert secret not in state["patch"]
    assert b"+b = 1" in state["patch"]
    assert state["left_out"] == [".env", "conf/server.pem", "known.py"]
    assert state["dirty"] is True


def test_a_file_that_this_user_cannot_read_stays_out(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "locked.txt").write_text("x\n")
    monkeypatch.setattr("os.access", lambda file, mode: Path(file).name != "locked.txt")  # root can read everything
    state = lineage.git_state(repository)
    assert (state["left_out"], state["dirty"]) == (["locked.txt"], True)


def test_a_password_in_the_remote_is_not_stored(repository: Path) -> None:
    git(repository, "remote", "add", "origin", "https://me:hidden@example.org/x.git")
    assert lineage.git_state(repository)["remote"] == "https://example.org/x.git"


def test_code_outside_git_has_no_commit(tmp_path: Path) -> None:
    assert lineage.git_state(tmp_path)["commit"] is None


def test_a_library_in_the_repository_of_the_project_has_no_state_of_its_own() -> None:
    state = lineage.library_state(PROJECT.root)
    assert state["path"] == str(PROJECT.root / "src" / "boltcutter")
    assert (state["commit"], state["patch"]) == (None, b"")


def test_the_project_and_an_editable_library_are_recorded_apart(repository: Path, tmp_path: Path) -> None:
    cfg = read_overrides(PROJECT, [])
    cfg = cfg.changed({"folder": str(tmp_path / "run")})
    (repository / "new.py").write_text("x = 1\n")
    create_folder(cfg, repository)
    record = read_record(tmp_path / "run")
    assert record["git"]["commit"] == lineage.git_state(repository)["commit"]
    assert "new.py" in (tmp_path / "run" / "code.patch").read_text()
    ours = lineage.git_state(PROJECT.root)
    assert record["library"]["version"]
    assert (record["library"]["commit"], record["library"]["changes"]) == (ours["commit"], ours["changes"])
    assert (tmp_path / "run" / "library.patch").is_file() == bool(ours["patch"])
    assert lineage.differences(record, repository, 1) == []
    record["library"]["commit"] = "abc"
    assert any("the library's commit is" in line for line in lineage.differences(record, repository, 1))


def test_differences_are_listed(tmp_path: Path) -> None:
    cfg = read_overrides(PROJECT, [])
    cfg = cfg.changed({"folder": str(tmp_path / "run")})
    create_folder(cfg, PROJECT.root)
    record = read_record(tmp_path / "run")
    assert lineage.differences(record, PROJECT.root, 1) == []
    record["packages"]["torch"] = "0.1"
    record["git"]["commit"] = "abc"
    record["hardware"]["gpus"] = ["H200"]
    record["python"] = "2.7"
    record["attempts"] = [{}, {"devices": 1}, {"devices": 2}, {}]
    text = " | ".join(lineage.differences(record, PROJECT.root, 1))
    for part in (
        "git checkout abc",
        "package torch is",
        "was 0.1",
        "gpus is [], was ['H200']",
        "was 2.7",
        "number of ranks is 1, was 2",
    ):
        assert part in text


def test_a_record_of_somebody_else_cannot_control_the_terminal() -> None:
    name = "\x1b]0;title\x07"
    record = {"git": {"commit": name}, "library": {"commit": name}, "packages": {name: name}, "python": name}
    lines = lineage.differences(record | {"hardware": {name: name}}, Path(__file__).parent, 1)
    assert sum(r"\x1b]0;title\x07" in line for line in lines) == 5
    assert all(line.isprintable() for line in lines)
