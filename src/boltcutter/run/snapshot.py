"""Copy the code of the project, as it is or as it was at a commit, so that later changes do not affect what runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boltcutter.config.errors import ConfigError, one_line
from boltcutter.project import LIBRARY, SOURCE
from boltcutter.run import lineage

LINKED_BYTES = 50_000_000  # larger files are assumed to be data, and linked


def can_copy(root: Path) -> bool:
    """Whether the project is tracked by git, which determines its files."""
    return bool(lineage.list_files(root, "--cached"))


def list_files(root: Path, run: Path) -> list[str]:
    """List the tracked files of a project, and new files that git does not ignore, without links and the run's."""
    new = [
        name for name in lineage.list_files(root, "--others", "--exclude-standard") or () if _is_code(root / name, run)
    ]
    names = [*(lineage.list_files(root, "--cached", "--recurse-submodules") or ()), *new]
    return [name for name in names if (root / name).is_symlink() or (root / name).is_file()]  # others were deleted


def copy_code(
    root: Path, target: Path, state: dict[str, Any], library: dict[str, Any] | None, *, links: bool = True
) -> None:
    """Copy the project's files with uncommitted changes, and to ``src`` the library if it is an editable checkout.

    The states of both, from ``lineage.git_state`` and ``library_state``, are stored in the copy. With ``links``, it
    links to large files. If ``library`` is None, it is left out, unless it is a part of the project.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    names = list_files(root, target.parent)
    secret = [name for name in names if lineage.holds_secret(root / name)]
    if secret:
        print(f"note: the copy of the code excludes {', '.join(secret)}: their names or contents look like secrets")
    for name in (name for name in names if name not in secret):
        source, copy = root / name, draft / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            inside = source.resolve().is_relative_to(root.resolve()) and not os.path.isabs(os.readlink(source))
            copy.symlink_to(os.readlink(source) if inside else source.resolve())
        elif links and source.stat().st_size > LINKED_BYTES:
            copy.symlink_to(source)
        else:
            shutil.copy2(source, copy)
    _write_state(draft, state)
    copied_library = draft / "src" / LIBRARY
    if library is not None and lineage.is_editable() and not copied_library.exists():
        shutil.copytree(SOURCE / LIBRARY, copied_library, ignore=shutil.ignore_patterns("__pycache__"))
        _write_state(copied_library, library)
    shutil.rmtree(target, ignore_errors=True)
    draft.replace(target)


def find_commit(root: Path, ref: str) -> str | None:
    """The commit of a git ref in the repository of a project; None if there is none."""
    found = None if ref.startswith("-") else _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    return found.stdout.decode().strip() if found and found.returncode == 0 else None


def is_of_local_branch(root: Path, commit: str) -> bool:
    """Whether a commit is of a local branch of the repository of a project, or of what is checked out."""
    return bool(_git(root, "branch", "--list", "--contains", commit).stdout.strip())


def copy_commit(
    root: Path, target: Path, commit: str, patches: Sequence[bytes] = (), library: dict[str, Any] | None = None
) -> None:
    """Copy the project's files as they are at a commit, with patches, by a temporary worktree.

    Args:
        root: Root of the project, which may be a folder of the repository.
        target: Folder of the copy.
        commit: Commit of the repository.
        patches: Contents of patches that are applied to it, one after the other.
        library: State of the library, from ``library_state``; None: it is not copied.

    Raises:
        ConfigError: The commit does not have the project, or a patch does not apply.
    """
    top = Path(os.fsdecode(_git(root, "rev-parse", "--show-toplevel").stdout).strip())
    place = root.resolve().relative_to(top.resolve())
    _git(root, "worktree", "prune")  # those of processes that were killed
    with tempfile.TemporaryDirectory() as scratch:
        worktree = Path(scratch, "worktree")
        done = _git(root, "worktree", "add", "--detach", str(worktree), commit)
        try:
            if done.returncode or not (worktree / place).is_dir():
                raise ConfigError(f"{commit}: cannot be checked out ({_reason(done)}); choose another commit")
            for patch in patches:
                done = _git(worktree, "apply", "--whitespace=nowarn", "-", given=patch)
                if done.returncode:
                    raise ConfigError(f"a patch does not apply to commit {commit[:8]} ({_reason(done)}); correct it")
            state = lineage.git_state(worktree / place)
            copy_code(worktree / place, target, state, library, links=False)
        finally:
            _git(root, "worktree", "remove", "--force", str(worktree))


def _git(where: Path, *words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run git without variables that name another repository, and without hooks."""
    inherited = {name: value for name, value in os.environ.items() if name not in lineage.GIT_VARIABLES}
    command = ["git", *lineage.GIT_OPTIONS, "-C", str(where), *words]
    return subprocess.run(command, input=given, capture_output=True, env=inherited | lineage.GIT_OFFLINE, timeout=600)


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    return one_line(done.stderr.decode(errors="replace").strip().rpartition("error: ")[2], 200)


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    facts = {name: value for name, value in state.items() if name != "patch"}
    (folder / lineage.SNAPSHOT).write_text(json.dumps(facts, indent=2) + "\n")


def _is_code(file: Path, run: Path) -> bool:
    """Whether an untracked file belongs to the code, as in code.patch, and not to the run itself."""
    if file.is_symlink() or not file.is_file() or file.is_relative_to(run) or lineage.holds_secret(file):
        return False
    return file.stat().st_size <= lineage.MAX_UNTRACKED_BYTES
