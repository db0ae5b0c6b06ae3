"""The two sides of a try, baseline and change: their code, which is copied, and their configuration."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boltcutter import files, run_files
from boltcutter.analysis.further import overrides_of
from boltcutter.analysis.groups import Result, is_compared
from boltcutter.analysis.record import Run, find_runs
from boltcutter.analysis.references import BEST, LATEST, find
from boltcutter.assembly.overrides import INFERRED, read_overrides
from boltcutter.config.compose import OVERRIDE
from boltcutter.config.errors import ConfigError
from boltcutter.config.values import flatten, last_of_each
from boltcutter.project import Project
from boltcutter.run import lineage, snapshot, trust
from boltcutter.run.folder import read_record
from boltcutter.run.foreign_record import DATA_FOLDERS

CODE = ".code"  # in the folder of tries: copies of the code by its state
Code = Mapping[str, Any]  # ``lineage.code_key``


@dataclass(frozen=True)
class Version:
    """Code of the project.

    Args:
        commit: A commit; None: the working tree with its uncommitted changes.
        patch: Content of a patch that is applied to it.
    """

    commit: str | None = None
    patch: bytes = b""


@dataclass(frozen=True)
class Side:
    """The baseline or the change.

    Args:
        label: What it is called.
        overrides: Of training, without seed and folder.
        version: Its code.
        project: The copy of that code; the project itself if its code cannot be copied.
        code: What identifies the code; commits are None outside of a git repository.
    """

    label: str
    overrides: tuple[str, ...]
    version: Version
    project: Project
    code: Code

    def settings(self, seed: int) -> dict[str, Any]:
        """The settings that may affect the results, by dotted key."""
        return compared(read_overrides(self.project, [*self.overrides, f"seed={seed}"]).written)

    @property
    def is_identified(self) -> bool:
        """Whether the code is known, so that other runs of it can be recognized."""
        return self.code.get("commit") is not None


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that may affect the results, by dotted key, apart from the seed."""
    return {key: value for key, value in flatten(config) if is_compared(key)}


def has_settings(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a recorded configuration has these settings, apart from those that null let it take from the data."""
    free = [key for key in (f"data.{name}" for name in INFERRED) if wanted.get(key, 0) is None]
    found = compared(config)
    return {**found, **{key: None for key in free if key in found}} == wanted


def parse_change(project: Project, words: Sequence[str]) -> tuple[list[str], Version | None]:
    """Overrides, and the version of the code where a word is a git ref or a patch.

    Raises:
        ConfigError: A word is neither, or several are versions.
    """
    overrides = [word for word in words if OVERRIDE.fullmatch(word)]
    others = [word for word in words if word not in overrides]
    if len(others) > 1:
        raise ConfigError(f"{others[1]}: a second version of the code; give one git ref or patch", kind="conflict")
    return overrides, read_version(project, others[0]) if others else None


def read_version(project: Project, word: str) -> Version:
    """A git ref, or the file of a patch, which is applied to the working tree.

    Raises:
        ConfigError: It is neither, or the project is not in a git repository.
    """
    is_patch = Path(word).is_file()
    commit = None if is_patch else snapshot.find_commit(project.root, word)
    if os.environ.get(trust.AGENT):
        is_own = _is_own_patch(project.root, Path(word)) if is_patch else _is_local(project, commit)
        if not is_own:
            raise ConfigError(
                f"{word}: neither a patch in the project nor a commit of a local branch, whose code an agent may run; "
                "run it yourself"
            )
    if is_patch:
        return Version(patch=Path(word).read_bytes())
    if commit:
        return Version(commit)
    raise ConfigError(f"{word}: no override, git ref or patch; see boltcutter try --help", kind="invalid_override")


def _is_own_patch(root: Path, file: Path) -> bool:
    """Whether a patch is of this user and in the project, apart from runs and data, which may be of anybody."""
    place, root = file.resolve(), root.resolve()
    inner = place.relative_to(root) if place.is_relative_to(root) else None
    in_run = any((folder / run_files.RECORD).exists() for folder in place.parents)
    is_code = inner is not None and inner.parts[0] not in DATA_FOLDERS and not in_run
    return is_code and files.is_ours(place.stat())


def _is_local(project: Project, commit: str | None) -> bool:
    """Whether a commit is of the current or another local branch, rather than of one that was only fetched."""
    return commit is None or snapshot.is_of_local_branch(project.root, commit)


def find_baseline(project: Project, text: str | None, runs: str) -> tuple[str, list[str], Version]:
    """The label, overrides and version of a baseline.

    Args:
        project: The project.
        text: Overrides; a run, or a tag of runs; a git ref or patch; None: the default configuration.
        runs: Folder of all runs.

    Raises:
        ConfigError: There is none.
    """
    if text is None:
        return "the default configuration", [], Version()
    words = shlex.split(text)
    if words and all(OVERRIDE.fullmatch(word) for word in words):
        return text, words, Version()
    known = find_runs(runs) if Path(runs).is_dir() else []
    tagged = [run for run in known if text in run.tags and run.status == "completed"]
    if tagged or text == LATEST or text.startswith(BEST) or _names_run(known, text):
        run = tagged[-1] if tagged else find(known, text, "against")
        folder = Path(run.folder)
        return text, overrides_of(project, Result(run, 0.0, folder, read_record(folder))), Version()
    try:
        return text, [], read_version(project, text)
    except ConfigError:
        raise ConfigError(
            f"against={text}: no run, tag, git ref or patch, and no overrides; see boltcutter runs",
            kind="unknown_run",
        ) from None


def _names_run(known: Sequence[Run], text: str) -> bool:
    if Path(text, run_files.RECORD).is_file():
        return True
    return any(run.id == text or run.id.startswith(text) or run.id.rpartition("-")[2].startswith(text) for run in known)


def make_side(project: Project, folder: Path, label: str, overrides: Sequence[str], version: Version) -> Side:
    """Copy the code of a side below the folder of tries, unless a copy of its state is there.

    Raises:
        ConfigError: A patch does not apply, or the code is in no git repository.
    """
    given = tuple(last_of_each(overrides))
    if not snapshot.can_copy(project.root):
        if version != Version():
            raise ConfigError(f"{label}: {project.root} is not tracked by git, so its code has no other version")
        state = lineage.git_state(project.root)
        return Side(label, given, version, project, lineage.code_key(state, lineage.library_state(project.root)))
    state, library = lineage.git_state(project.root), lineage.library_state(project.root)
    base = lineage.code_key({} if version.commit else state, library)  # a commit does not depend on the working tree
    text = json.dumps([base, version.commit, hashlib.sha256(version.patch).hexdigest()], sort_keys=True)
    copy = folder / CODE / hashlib.sha256(text.encode()).hexdigest()[:12]
    if not copy.is_dir():
        copy.parent.mkdir(parents=True, exist_ok=True)
        if version == Version():
            snapshot.copy_code(project.root, copy, state, library)
        else:
            patches = [version.patch] if version.commit else [state.get("patch") or b"", version.patch]
            commit = version.commit or str(state["commit"])
            snapshot.copy_commit(project.root, copy, commit, [patch for patch in patches if patch], library)
    copied = lineage.git_state(copy)
    return Side(label, given, version, Project.find(copy), lineage.code_key(copied, library))
