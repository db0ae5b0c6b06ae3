"""Names that a project can have, and what they become in paths and text."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path

from project.git import Refused

OWN = "boltcutter"
WIDTH = 120  # of a line, for ruff
LONG, LONGEST = 20, 28  # beyond the first, ruff may find lines to wrap again
FOLDERS = {"src", "test", "tests", "configs", "data", "docs", "scripts", "runs", "hooks", "build", "dist"}
# Packages that are imported by another name than they are installed by.
IMPORTED = {"sklearn", "pil", "yaml", "google", "dateutil", "attr", "git"}


def check(name: str, root: Path) -> None:
    """See that a project can be called so.

    Raises:
        Refused: It cannot.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)
        better = re.sub(r"^[0-9-]+", "", "-".join(words).lower()) or "my-project"
        raise Refused(f"{name}: a name is made of lower-case words joined by hyphens; try {better}")
    package = name.replace("-", "_")
    if reason := taken(package, root):
        raise Refused(f"{name}: {reason}; try {name}-lab")
    if len(name) > LONGEST:
        raise Refused(f"{name}: {len(name)} characters make lines too long; {LONGEST} will do")


def taken(package: str, root: Path) -> str | None:
    """Why a package cannot be called so."""
    pinned = re.findall(r"^([\w.-]+)==", (root / "constraints.txt").read_text(), re.M)
    if package == OWN:
        return "this is the template's own name"
    if keyword.iskeyword(package):
        return f"{package} is a word of the Python language"
    if package in FOLDERS:
        return f"{package} is a folder of every project"
    if package in sys.stdlib_module_names:
        return f"{package} is a module of Python's own library"
    if package in {re.sub(r"[-.]", "_", other).lower() for other in pinned} | IMPORTED:
        return f"{package} is a package that the project needs"
    for folder in (root / "scripts", root / "tests"):
        if (folder / package).is_dir() or (folder / f"{package}.py").is_file():
            return f"{folder.name}/{package} would be imported in its place"
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return f"{package} is installed in {Path(found.origin).parent}" if found and found.origin else None


def rename(text: str, name: str) -> str:
    """Text or path of the template, as the project has it."""
    package = name.replace("-", "_")
    spellings = {
        OWN: package,
        OWN.title(): re.sub("[-_]", " ", name).title(),
        OWN.upper(): package.upper(),
    }
    return re.sub("|".join(spellings), lambda found: spellings[found[0]], text)


def wrap(text: str, name: str) -> str:
    """Code in which a longer name has made lines too long, as ruff would have it; it leaves texts alone."""
    package = name.replace("-", "_")
    lines = text.splitlines(keepends=True)
    return "".join(_wrap(line) if len(line) > WIDTH + 1 and package in line.lower() else line for line in lines)


def _wrap(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    remark = re.fullmatch(r"( *[^ #].*?)  (# (?!noqa|type:|fmt:)[^\"]*\n)", line)
    if remark and remark[1].count('"') % 2 == 0:
        code = f"{remark[1]}\n"
        return f"{indent}{remark[2]}{code if len(code) <= WIDTH + 1 else _wrap(code)}"
    if found := re.fullmatch(r" *(from \S+ import) ([^(#\n]+)\n", line):
        names = "".join(f"{indent}    {part.strip()},\n" for part in found[2].split(","))
        return f"{indent}{found[1]} (\n{names}{indent})\n"
    found = re.fullmatch(r" *(\w+ =) (f?\"[^\"]*\")\n", line)
    if found and len(indent) + 4 + len(found[2]) <= WIDTH:
        return f"{indent}{found[1]} (\n{indent}    {found[2]}\n{indent})\n"
    return line
