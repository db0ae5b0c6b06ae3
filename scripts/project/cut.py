"""Cuts a project from the template: under its own name, without the rooms that it does not need, as a first commit."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import NamedTuple

from project.git import ROOT, STATE, Refused, check_clean, git, git_bytes, identity
from project.mentions import Gone
from project.names import OWN, rename, wrap
from project.prune import prune
from project.rooms import KEPT, MINIMAL, ROOMS, TEMPLATE

LICENSES = ("MIT", "BSD-3-Clause", "Apache-2.0", "none")


class Choices(NamedTuple):
    """What a project is made with; kept in it, so that an update makes the same again."""

    name: str
    author: str
    license: str = "MIT"
    without: tuple[str, ...] = ()
    minimal: bool = False


class File(NamedTuple):
    """What is written."""

    data: bytes
    executable: bool = False


def snapshot(root: Path) -> tuple[str, dict[str, File]]:
    """The last commit of the template: hash of its tree, and its files."""
    if not (root / ".git").exists():  # an archive that was downloaded: its tree has the same hash
        with tempfile.TemporaryDirectory() as folder:
            git("init", "-q", folder)
            env = {"GIT_DIR": f"{folder}/.git", "GIT_WORK_TREE": str(root)}
            git("add", "--all", at=root, env=env)
            tree = git("write-tree", at=root, env=env).strip()
            return tree, _unpack(git_bytes("archive", tree, at=Path(folder)))
    return git("rev-parse", "HEAD^{tree}", at=root).strip(), _unpack(git_bytes("archive", "HEAD", at=root))


def _unpack(archive: bytes) -> dict[str, File]:
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and (content := tar.extractfile(member)):
                files[member.name] = File(content.read(), bool(member.mode & 0o100))
    return files


def render(root: Path, choices: Choices, source: str | None = None) -> dict[str, File]:
    """The files of a project; rooms that this version of the template does not have are passed over.

    Args:
        root: The template.
        choices: What the project is made with.
        source: Where the template is, instead of where it says it is.
    """
    tree, everything = snapshot(root)
    whole = {file: content.data.decode(errors="ignore") for file, content in everything.items()}
    files = _form(everything, minimal=choices.minimal)
    texts = {file: content.data.decode(errors="ignore") for file, content in files.items()}
    rooms = [TEMPLATE, *(ROOMS[room] for room in choices.without if room in ROOMS)]
    gone = Gone(texts, [pattern for room in rooms for pattern in room.files], [room.words for room in rooms])
    without = {"template", *choices.without}
    made = {}
    for file, content in files.items():
        if file in gone.files:
            continue
        path = rename(file, choices.name)
        try:
            text = content.data.decode()
        except UnicodeDecodeError:
            made[path] = content
            continue
        text = prune(file, text, gone, without)
        if file == "pyproject.toml":
            text = _pyproject(text, choices, [extra for room in rooms for extra in room.extras])
        text = rename(text, choices.name)
        made[path] = content._replace(data=(wrap(text, choices.name) if file.endswith(".py") else text).encode())
    _license(made, whole, choices)
    state = {"template": source or address(whole["pyproject.toml"]), "tree": tree, **choices._asdict()}
    made[STATE] = File((json.dumps(state, indent=2, ensure_ascii=False) + "\n").encode())
    return made


def _form(files: dict[str, File], *, minimal: bool) -> dict[str, File]:
    """The files that a project is made of, by the paths that they have in it."""
    if not minimal:
        return {file: content for file, content in files.items() if not file.startswith(MINIMAL)}
    own = {file.removeprefix(MINIMAL): content for file, content in files.items() if file.startswith(MINIMAL)}
    return {file: files[file] for file in KEPT} | own


def address(pyproject: str) -> str:
    """Where the template says that it is."""
    found = re.search(r'^Template = "(.*?)"', pyproject, re.M)
    if not found:
        raise Refused("pyproject.toml: [project.urls] has no Template; say there where this template is")
    return found[1]


def _pyproject(text: str, choices: Choices, extras: Collection[str]) -> str:
    distribution = choices.name.replace("_", "-")
    text = text.replace(f'name = "{OWN}"', f'name = "{distribution}"').replace(f'"{OWN}[', f'"{distribution}[')
    for extra in extras:
        text = re.sub(rf"^{extra} = \[.*?\]\n", "", text, flags=re.M | re.S)
    own = re.escape(distribution)
    text = re.sub(
        rf'(?<="{own}\[)([\w,-]+)(?=\]")',
        lambda found: ",".join(extra for extra in found[1].split(",") if extra not in extras),
        text,
    )
    if len(distribution) > len(OWN):  # texts and comments are not wrapped again
        text = re.sub(r"^(ignore = \[.*)\]", r'\1, "E501"]', text, flags=re.M)
    author = f"authors = [{{ name = {json.dumps(choices.author, ensure_ascii=False)} }}]\n"
    if choices.license == "none":
        text = re.sub(r"^license(-files)? = .*\n", "", text, flags=re.M)
    else:
        text = re.sub(r'^license = ".*"$', f'license = "{choices.license}"', text, flags=re.M)
    return re.sub(r"^(requires-python = )", lambda found: author + found[1], text, count=1, flags=re.M)


def _license(made: dict[str, File], texts: dict[str, str], choices: Choices) -> None:
    if choices.license == "none":
        del made["LICENSE"]
        return
    kept = texts["LICENSE"] if choices.license == "MIT" else texts[f"scripts/project/licenses/{choices.license}.txt"]
    line = f"Copyright (c) {date.today().year} {choices.author}"
    text = re.sub(r"^Copyright \(c\) .*$", lambda _: line, kept, count=1, flags=re.M)
    made["LICENSE"] = File(text.replace("[yyyy] [name of copyright owner]", line[14:]).encode())


def write(folder: Path, files: dict[str, File]) -> None:
    """Make the files below ``folder``."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.data)
        if content.executable:
            path.chmod(0o755)


def create(choices: Choices, to: Path, *, commit: bool = True) -> None:
    """Write a project to a folder that is empty or not there yet.

    Raises:
        Refused: There is something in the folder.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise Refused(f"--to {to}: there is something already; name a new folder")
    write(to, render(ROOT, choices, _origin()))
    if commit:
        git("init", "-q", "-b", "main", at=to)
        _commit(choices, to)


def convert(choices: Choices) -> None:
    """Turn this folder into the project; what git ignores stays.

    Raises:
        Refused: Something in it is not committed.
    """
    if (ROOT / ".git").exists():
        check_clean()
        old = [name for name in git("ls-files", "-z").split("\0") if name]
    else:
        old = list(snapshot(ROOT)[1])
    made = render(ROOT, choices)
    for name in old:
        (ROOT / name).unlink()
    for folder in {ROOT / parent for name in old for parent in Path(name).parents if parent != Path()}:
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    shutil.rmtree(ROOT / "src" / f"{OWN}.egg-info", ignore_errors=True)
    for folder in sorted({ROOT / parent for name in old for parent in Path(name).parents}, reverse=True):
        if folder != ROOT and not any(folder.iterdir()):
            folder.rmdir()
    write(ROOT, made)
    if not (ROOT / ".git").exists():
        git("init", "-q", "-b", "main")
    _commit(choices, ROOT)


def _commit(choices: Choices, at: Path) -> None:
    git("add", "--all", at=at)
    git("commit", "-q", "--no-verify", "-m", f"Begin {choices.name}", at=at, env=identity(at))


def _origin() -> str | None:
    """Where this copy of the template was cloned from, if it was, without what may be a password."""
    if not (ROOT / ".git").exists():
        return None
    try:
        found = git("config", "--get", "remote.origin.url").strip()
    except RuntimeError:
        return None
    return re.sub(r"(?<=://)[^/@]*@", "", found) if "://" in found or "@" in found else None
