"""Copy the code of the project into the run folder, so that changes after submission do not affect the job."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

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


def copy_code(root: Path, target: Path, state: dict[str, Any], library: dict[str, Any]) -> None:
    """Copy the project's files with uncommitted changes, and to ``src`` the library if it is an editable checkout.

    The states of both, from ``lineage.git_state`` and ``library_state``, are stored in the copy.
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
        elif source.stat().st_size > LINKED_BYTES:
            copy.symlink_to(source)
        else:
            shutil.copy2(source, copy)
    _write_state(draft, state)
    copied_library = draft / "src" / LIBRARY
    if lineage.is_editable() and not copied_library.exists():
        shutil.copytree(SOURCE / LIBRARY, copied_library, ignore=shutil.ignore_patterns("__pycache__"))
        _write_state(copied_library, library)
    shutil.rmtree(target, ignore_errors=True)
    draft.replace(target)


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    facts = {name: value for name, value in state.items() if name != "patch"}
    (folder / lineage.SNAPSHOT).write_text(json.dumps(facts, indent=2) + "\n")


def _is_code(file: Path, run: Path) -> bool:
    """Whether an untracked file belongs to the code, as in code.patch, and not to the run itself."""
    if file.is_symlink() or not file.is_file() or file.is_relative_to(run) or lineage.holds_secret(file):
        return False
    return file.stat().st_size <= lineage.MAX_UNTRACKED_BYTES
