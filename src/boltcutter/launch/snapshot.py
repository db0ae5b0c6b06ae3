"""A copy of the project's code in the run's folder: what a job runs, however long it waits in the queue."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from boltcutter import lineage

LINKED_BYTES = 50_000_000  # a larger file is data rather than code: linked, not copied


def can_copy(root: Path) -> bool:
    """Whether git knows which files make up the project."""
    return bool(_files(root, "--cached"))


def copy_code(root: Path, to: Path, state: dict[str, Any]) -> None:
    """Copy all files that git tracks, as they are now, and new ones that it does not ignore.

    Args:
        root: Folder of the project.
        to: Replaced.
        state: Of the repository, from ``lineage.git_state``.
    """
    draft = to.with_name(f".{to.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    new = [name for name in _files(root, "--others", "--exclude-standard") if _is_code(root / name, to.parent)]
    for name in [*_files(root, "--cached", "--recurse-submodules"), *new]:
        source, target = root / name, draft / name
        if not source.is_symlink() and not source.is_file():
            continue  # deleted since
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            inside = source.resolve().is_relative_to(root.resolve()) and not os.path.isabs(os.readlink(source))
            target.symlink_to(os.readlink(source) if inside else source.resolve())
        elif source.stat().st_size > LINKED_BYTES:
            target.symlink_to(source)
        else:
            shutil.copy2(source, target)
    facts = {name: value for name, value in state.items() if name != "patch"}
    (draft / lineage.SNAPSHOT).write_text(json.dumps(facts, indent=2) + "\n")
    shutil.rmtree(to, ignore_errors=True)
    draft.replace(to)


def _is_code(file: Path, run: Path) -> bool:
    """Whether a new file belongs to the code, by the rule for code.patch, and not to the run itself."""
    if not file.is_file() or file.is_relative_to(run) or lineage.holds_secret(file):
        return False
    return file.stat().st_size <= lineage.MAX_UNTRACKED_BYTES


def _files(root: Path, *options: str) -> list[str]:
    """What git lists; nothing where there is no repository, or no git."""
    command = ["git", "-C", str(root), "ls-files", "-z", *options]
    env = {name: value for name, value in os.environ.items() if name not in lineage.GIT_VARIABLES}
    try:
        done = subprocess.run(command, capture_output=True, check=True, env=env)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
