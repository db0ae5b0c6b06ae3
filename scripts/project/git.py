"""Git, and mistakes told in one line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

# A minimal project has no engine of its own, and is updated by its template's.
ROOT = Path(os.environ.pop("PROJECT_TO_UPDATE", "") or Path(__file__).resolve().parents[2])
STATE = ".template.json"
# Of those who never told git who they are; names given by hand or by configuration come first.
NOBODY = {f"GIT_{role}_{what}": "nobody@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class Refused(ValueError):
    """What the user wrote, or the state of a folder, does not allow it; the text is one line."""


def git(*words: str, at: Path = ROOT, env: Mapping[str, str] | None = None, say: bytes | None = None) -> str:
    """What git prints.

    Raises:
        RuntimeError: Git failed.
    """
    return git_bytes(*words, at=at, env=env, say=say).decode()


def git_bytes(*words: str, at: Path = ROOT, env: Mapping[str, str] | None = None, say: bytes | None = None) -> bytes:
    """The same, where it may be no text."""
    # Filters and line endings of a user's configuration would make two copies of one version differ.
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.quotePath=false", *words]
    clean = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    clean.pop("GIT_INDEX_FILE", None)
    done = subprocess.run(command, cwd=at, input=say, capture_output=True, env={**clean, **(env or {})})
    if done.returncode:
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"git {words[0]}: {lines[-1] if lines else f'status {done.returncode}'}")
    return done.stdout


def identity(at: Path = ROOT) -> dict[str, str]:
    """Variables with which a commit can be made, whether or not git knows its user."""
    try:
        git("var", "GIT_COMMITTER_IDENT", at=at)
    except RuntimeError:
        return {name: os.environ.get(name, value) for name, value in NOBODY.items()}
    return {}


def check_clean(at: Path = ROOT) -> None:
    """See that nothing could be lost.

    Raises:
        Refused: Something is not committed.
    """
    if not (at / ".git").exists():
        raise Refused(f"{at}: not a git repository; run `git init && git add -A && git commit -m Begin` first")
    if changed := git("status", "--porcelain", at=at).splitlines():
        raise Refused(f"{changed[0][3:]} is not committed; commit your changes first, so that nothing can be lost")
