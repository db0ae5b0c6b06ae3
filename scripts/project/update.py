"""Brings what changed in the template since this project was made into the project: a merge of three versions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from project.git import ROOT, STATE, Refused, check_clean, git, git_bytes, identity


class Merged(NamedTuple):
    """What a merge would give.

    Args:
        tree: Hash; conflicts are marked in its files.
        stages: For each file in conflict what git keeps in its index.
        conflicts: For each file in conflict one line.
        followed: Files written here that name what the template has renamed, and now by its new name.
    """

    tree: str
    stages: list[str]
    conflicts: dict[str, str]
    followed: list[str]


def update(source: str | None, version: str | None, *, show: bool) -> str:
    """Merge the template's ``version`` into the working tree, or show what that would change.

    Files that nobody but the template changed come as they are; files that were deleted or moved here stay deleted or
    moved, and those that were moved get what is new all the same. Modules and options that the template renamed are
    called by their new names in what was written here, too.

    Args:
        source: Where the template is, if not where it was.
        version: Tag, branch or commit; its newest commit by default.
        show: Change nothing.

    Raises:
        Refused: Something is not committed, or the template does not know the version this project was made from.
    """
    if not (ROOT / STATE).is_file():
        raise Refused(f"{STATE} is missing: it says which template this project was made from; put it back")
    state = json.loads((ROOT / STATE).read_text(encoding="utf-8"))
    check_clean()
    with tempfile.TemporaryDirectory() as folder:
        theirs, base = _versions(Path(folder), source or state["template"], version, state)
        if git("diff", "--name-only", base, theirs, "--", ":!" + STATE) == "":
            return "nothing new"
        merged = _merge(base, theirs)
    if show:
        return git("diff", "HEAD", merged.tree) + _told(merged)
    git("read-tree", "-m", "-u", "HEAD", merged.tree)
    if merged.stages:
        git("update-index", "--index-info", say="".join(merged.stages).encode())
    changed = git("status", "--short")
    return f"{changed}{_told(merged)}\nLook at it (git diff HEAD), run pytest, commit. To undo it: git reset --hard"


def _versions(folder: Path, source: str, version: str | None, state: dict[str, Any]) -> tuple[str, str]:
    """Commits, on no branch, of what the template makes now and of what it made then."""
    clone = folder / "template"
    local = Path(source.removeprefix("git+")).expanduser()
    place = str((ROOT / local).resolve()) if (ROOT / local).is_dir() else source.removeprefix("git+")
    try:
        git("clone", "-q", "--no-checkout", "--", place, str(clone), at=folder)
    except RuntimeError as error:
        raise Refused(f"--from {source}: {error}; say where the template is") from None
    try:
        names = [f"refs/remotes/origin/{version}", version] if version else ["HEAD"]
        newest = next(found for name in names if (found := _commit_named(name, clone)))
    except StopIteration:
        known = ", ".join(git("tag", "--sort=-creatordate", at=clone).split()[:5]) or "none"
        raise Refused(f"--version {version}: the template has no such version (newest tags: {known})") from None
    if git("rev-parse", f"{newest}^{{tree}}", at=clone).strip() == state["tree"]:
        return "HEAD", "HEAD"  # the same, without making both
    of_tree = dict(line.split() for line in git("log", "--all", "--format=%T %H", at=clone).splitlines())
    if state["tree"] not in of_tree:
        raise Refused(
            f"{STATE}: {place} does not have the version {state['tree'][:12]} that this project was made from"
        )
    base = _made(folder / "old", clone, of_tree[state["tree"]], state)
    return _made(folder / "new", clone, newest, state, parent=base), base


def _commit_named(name: str, clone: Path) -> str | None:
    try:
        return git("rev-parse", "--verify", "-q", f"{name}^{{commit}}", at=clone).strip()
    except RuntimeError:
        return None


def _made(folder: Path, clone: Path, commit: str, state: dict[str, Any], parent: str | None = None) -> str:
    """What one version of the template makes of this project's choices, by its own scripts/new.py."""
    git("worktree", "add", "-q", "--detach", str(folder), commit, at=clone)
    out = folder.with_suffix(".out")
    command = [
        sys.executable,
        "-B",
        str(folder / "scripts" / "new.py"),
        "--render",
        json.dumps(state),
        "--to",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(f"the template's version {commit[:12]} failed: {''.join(last)}")
    index = {"GIT_DIR": git("rev-parse", "--absolute-git-dir").strip(), "GIT_INDEX_FILE": f"{folder}.index"}
    git("add", "--all", "--force", ".", at=out, env={**index, "GIT_WORK_TREE": str(out)})
    tree = git("write-tree", env=index).strip()
    parents = ["-p", parent] if parent else []
    return git("commit-tree", tree, *parents, "-m", "template", env=identity()).strip()


def _merge(base: str, theirs: str) -> Merged:
    ours = git("commit-tree", "HEAD^{tree}", "-p", base, "-m", "ours", env=identity()).strip()
    # A folder that the template renamed does not take along what was put into it here.
    options = ["-c", "merge.directoryRenames=false", "-c", "merge.conflictStyle=merge"]
    command = ["git", *options, "merge-tree", "--write-tree", "-z", ours, theirs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode not in (0, 1):
        raise RuntimeError(f"git merge-tree: {done.stderr.decode(errors='replace').strip()} (it needs git 2.38)")
    tree, _, rest = done.stdout.decode().partition("\0")
    unmerged = re.findall(r"(\d{6} [0-9a-f]+ [123]\t([^\0]+))\0", rest.partition("\0\0")[0] + "\0")
    kept = set(git("ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0"))
    stages: dict[str, list[str]] = {}
    for line, file in unmerged:
        stages.setdefault(file, []).append(line)
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git("read-tree", tree, env=index)
        if strays := [file for file in stages if file not in kept]:  # deleted, or moved elsewhere, here
            git("rm", "-q", "--cached", "--ignore-unmatch", "--", *strays, env=index)
        tree = git("write-tree", env=index).strip()
    conflicts, entries = {}, []
    for file, lines in stages.items():
        if file not in kept:
            continue
        sides = {line.partition("\t")[0][-1] for line in lines}
        if sides >= {"2", "3"}:
            marked = "<<<<<<< " in git_bytes("show", f"{tree}:{file}").decode(errors="ignore")
            conflicts[file] = "the same lines, which are marked in it" if marked else "both; yours is there"
            entries += [f"0 {'0' * 40}\t{file}\n", *(f"{line}\n" for line in lines)]
        else:
            conflicts[file] = "the template has deleted it" if "1" in sides else "the template has moved it elsewhere"
            conflicts[file] += "; yours is there"
    tree, followed = _follow(tree, base, theirs)
    return Merged(tree, entries, conflicts, followed)


def _follow(tree: str, base: str, theirs: str) -> tuple[str, list[str]]:
    """Let files that are not as the template has them name modules and options as they are called now."""
    told = git("diff", "-M", "--diff-filter=R", "--name-status", "-z", base, theirs, "--", "src", "configs").split("\0")
    there = set(git("ls-tree", "-r", "-z", "--name-only", tree).split("\0"))
    moves = [
        move for old, new in zip(told[1::3], told[2::3], strict=True) if old not in there for move in _moves(old, new)
    ]
    own = git("diff", "--diff-filter=AM", "--name-only", "-z", theirs, tree).split("\0") if moves else []
    followed, entries = [], []
    for file in filter(None, own):
        try:
            before = after = git("show", f"{tree}:{file}")
        except UnicodeDecodeError:
            continue
        for pattern, new in moves:
            after = re.sub(pattern, new, after, flags=re.M)
        if after != before:
            followed.append(file)
            blob = git("hash-object", "-w", "--stdin", say=after.encode()).strip()
            entries.append(f"{git('ls-tree', tree, '--', file).split()[0]} {blob}\t{file}\n")
    if entries:
        with tempfile.TemporaryDirectory() as folder:
            index = {"GIT_INDEX_FILE": f"{folder}/index"}
            git("read-tree", tree, env=index)
            git("update-index", "--index-info", env=index, say="".join(entries).encode())
            tree = git("write-tree", env=index).strip()
    return tree, followed


def _moves(old: str, new: str) -> list[tuple[str, str]]:
    """Regular expressions for how a file was named, and what is said now."""
    before, after = PurePosixPath(old), PurePosixPath(new)
    if before.suffix == after.suffix == ".py":
        one, other = (".".join(path.with_suffix("").parts[1:]) for path in (before, after))
        moves = [(rf"\b{re.escape(one)}\b", other)]
        if before.parent == after.parent:  # from package import old
            package = re.escape(one.rpartition(".")[0])
            moves.append((rf"^( *from {package} import (?:.*, )?){before.stem}\b", rf"\1{after.stem} as {before.stem}"))
        return moves
    if before.suffix == after.suffix == ".yaml" and before.parent == after.parent:
        group = before.parent.name
        return [
            (rf"^(  {group}: ){before.stem}\b", rf"\1{after.stem}"),
            (rf"(?<![\w.]){group}={before.stem}(?![\w.])", f"{group}={after.stem}"),
        ]
    return []


def _told(merged: Merged) -> str:
    told = "".join(f"\n{file} names what the template has renamed by its new name" for file in merged.followed)
    if not merged.conflicts:
        return told
    lines = [f"  {file}: {reason}" for file, reason in sorted(merged.conflicts.items())]
    return told + "\nYou and the template both changed:\n" + "\n".join(lines) + "\n"
