import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from boltcutter.launch.bundle import pack
from boltcutter.run import lineage, snapshot


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *arguments], cwd=folder, check=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    for name, text in {
        "src/a.py": "A",
        "src/gone.py": "G",
        "large": "x" * 2000,
        ".gitignore": "runs/\n*.log\n",
    }.items():
        (root / name).write_text(text)
    (tmp_path / "data").mkdir()
    (root / "outside").symlink_to(tmp_path / "data")
    (root / "inside").symlink_to("src/a.py")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "x")
    return root


def test_a_copy_has_the_current_files_only(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LINKED_BYTES", 1000)
    (project / "src" / "a.py").write_text("changed")
    (project / "src" / "gone.py").unlink()
    (project / "new.py").write_text("new")
    (project / "debug.log").touch()
    (project / ".env").write_text("API_KEY=x\n")
    code = project / "runs" / "x" / "code"
    code.mkdir(parents=True)
    (code / "old.py").touch()
    state = lineage.git_state(project)
    monkeypatch.setattr(lineage, "is_editable", lambda: False)
    snapshot.copy_code(project, code, state, {})
    assert {path.name for path in code.iterdir()} == {
        *("src", "new.py", "large", "outside", "inside", ".gitignore", lineage.SNAPSHOT)
    }
    (project / "src" / "a.py").write_text("changed again")
    assert (code / "inside").read_text() == (code / "src" / "a.py").read_text() == "changed"
    assert [path.name for path in (code / "src").iterdir()] == ["a.py"]
    assert os.readlink(code / "large") == str(project / "large")
    assert (code / "outside").resolve() == project.parent / "data"
    assert lineage.git_state(code / "src") == state | {"patch": b""}


def test_secrets_are_not_sent_along(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tracked ones neither, nor what an untracked link leads to, which would be packed with its contents."""
    (tmp_path / "credentials").write_text("planted")
    (project / "innocent.txt").symlink_to(tmp_path / "credentials")
    (project / "kept.txt").symlink_to(tmp_path / "credentials")
    (project / "kaggle.json").write_text("planted")
    (project / "notes.md").write_text(f"ghp_{'d4' * 18}")
    git(project, "add", "kept.txt", "kaggle.json", "notes.md")
    folder = project / "runs" / "x"
    (folder / "code").mkdir(parents=True)
    snapshot.copy_code(project, folder / "code", lineage.git_state(project), {})
    assert "note: the copy of the code excludes kaggle.json, kept.txt, notes.md: " in capsys.readouterr().out
    names = {path.name for path in (folder / "code").iterdir()}
    assert not names & {"innocent.txt", "kept.txt", "kaggle.json", "notes.md"}
    assert b"planted" not in gzip.decompress(pack(folder).read_bytes())


def test_a_copy_has_an_editable_library(project: Path) -> None:
    code = project / "runs" / "x" / "code"
    (project / "src" / "a.py").write_text("import boltcutter.project\nprint(boltcutter.project.__file__)\n")
    library = lineage.library_state(project)
    snapshot.copy_code(project, code, lineage.git_state(project), library)
    script = f"""import a, json
from boltcutter.run import lineage
print(json.dumps(lineage.library_state(lineage.Path({str(code)!r})), default=str))"""
    command = [sys.executable, "-c", script]
    env = os.environ | {"PYTHONPATH": str(code / "src")}
    done = subprocess.run(command, env=env, cwd=project, capture_output=True, text=True, check=True)
    file, state = done.stdout.splitlines()
    assert file == str(code / "src" / "boltcutter" / "project.py")
    assert (code / "src" / "boltcutter" / "configs" / "train.yaml").is_file()
    assert {**json.loads(state), "patch": None} == {**library, "patch": None}


def test_a_project_in_a_monorepo_is_copied_alone(project: Path) -> None:
    inner = project / "projects" / "one"
    (inner / "src").mkdir(parents=True)
    (inner / "src" / "own.py").touch()
    (inner / "runs").mkdir()  # ignored by the repository
    (inner / "runs" / "result").touch()
    git(project, "add", "-A")
    (inner / "new.py").touch()
    (project / "new.py").touch()
    assert snapshot.can_copy(inner)
    assert snapshot.list_files(inner, project / "runs" / "x") == ["src/own.py", "new.py"]


def test_no_copy_without_git(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot.can_copy(project)
    assert not snapshot.can_copy(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert not snapshot.can_copy(project)
