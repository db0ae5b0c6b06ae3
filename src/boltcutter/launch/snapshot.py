"""Copy the code of the project into the run folder, so that changes after submission do not affect the job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from boltcutter.run import lineage

LINKED_BYTES = 50_000_000  # larger files are assumed to be data, and linked


def can_copy(root: Path) -> bool:
    """Whether the project is tracked by git, which determines its files."""
    return bool(_files(root, "--cached"))


def copy_code(root: Path, target: Path, state: dict[str, Any]) -> None:
    """Copy all tracked files with uncommitted changes, and untracked ones that git does not ignore.

    Args:
        root: Root of the project.
        target: Folder for the copy; replaced if it exists.
        state: State of the repository, from ``lineage.git_state``.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    new = [name for name in _files(root, "--others", "--exclude-standard") if _is_code(root / name, target.parent)]
    for name in [*_files(root, "--cached", "--recurse-submodules"), *new]:
        source, copy = root / name, draft / name
        if not source.is_symlink() and not source.is_file():
            continue  # deleted in the working tree
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            inside = source.resolve().is_relative_to(root.resolve()) and not os.path.isabs(os.readlink(source))
            copy.symlink_to(os.readlink(source) if inside else source.resolve())
        elif source.stat().st_size > LINKED_BYTES:
            copy.symlink_to(source)
        else:
            shutil.copy2(source, copy)
    facts = {name: value for name, value in state.items() if name != "patch"}
    (draft / lineage.SNAPSHOT).write_text(json.dumps(facts, indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    draft.replace(target)


def _is_code(file: Path, run: Path) -> bool:
    """Whether an untracked file belongs to the code, as in code.patch, and not to the run itself."""
    if not file.is_file() or file.is_relative_to(run) or lineage.holds_secret(file):
        return False
    return file.stat().st_size <= lineage.MAX_UNTRACKED_BYTES


def _files(root: Path, *options: str) -> list[str]:
    """List files with git; empty without a repository or without git."""
    command = ["git", "-C", str(root), "ls-files", "-z", *options]
    env = {name: value for name, value in os.environ.items() if name not in lineage.GIT_VARIABLES}
    try:
        done = subprocess.run(command, capture_output=True, check=True, env=env)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
