"""The words of scripts/new.py that make a project; asks for what they leave open."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from project import names
from project.cut import LICENSES, Choices, convert, create, render, write
from project.git import ROOT, Refused, git
from project.rooms import ROOMS

EXAMPLES = """
  python scripts/new.py my-project --to ../my-project         a new project there; this folder stays as it is
  python scripts/new.py my-project --without launch,bench     this folder becomes the project, without these parts
  python scripts/new.py my-project --minimal                  likewise, with one part of each kind and no others
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be said of a project."""
    rooms = "; ".join(f"{name}: {room.title}" for name, room in ROOMS.items())
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write the project here, and leave this folder alone")
    parser.add_argument("--without", metavar="ROOMS", help=f"what the project does not need, with commas ({rooms})")
    parser.add_argument("--minimal", action="store_true", help="one part of each kind: all in less than 1,200 lines")
    parser.add_argument("--author", help="by default git's user.name")
    parser.add_argument("--license", help=f"{', '.join(LICENSES)}; by default MIT")
    parser.add_argument("--no-commit", action="store_true", help="with --to, only write the files")
    parser.add_argument("--render", help=argparse.SUPPRESS)  # what an update of a project says: its choices, as JSON


def begin(words: argparse.Namespace) -> bool:
    """Make a project, if that is what the words ask for; whether it is.

    Raises:
        Refused: It cannot be called so, or the folder is not fit.
    """
    given: list[str] = words.words
    if words.render:
        state = json.loads(words.render)
        choices = Choices(**{name: state[name] for name in Choices._fields if name in state})
        write(words.to, render(ROOT, choices, state["template"]))
    elif len(given) == 1:
        _make(words, given[0])
    elif not given and sys.stdin.isatty():
        _make(words, _ask("Name of the project", "my-project"))
    else:
        return False
    return True


def _make(words: argparse.Namespace, name: str) -> None:
    names.check(name, ROOT)
    asking = sys.stdin.isatty()
    without = [room for room in (words.without or "").replace(" ", ",").split(",") if room]
    if words.minimal and without:
        raise Refused(f"--without {without[0]}: a minimal project has none of these parts; leave it out")
    asked = asking and words.without is None and not words.minimal
    minimal = words.minimal or (asked and _ask("Minimal: one part of each kind", "n").lower().startswith("y"))
    if asked and not minimal:
        without = [key for key, room in ROOMS.items() if _ask(f"With {room.title}", "y").lower().startswith("n")]
    if unknown := [room for room in without if room not in ROOMS]:
        raise Refused(f"--without {unknown[0]}: no such part (there are: {', '.join(ROOMS)})")
    author = words.author or _user() or f"The {name} authors"
    if asking and not words.author:
        author = _ask("Author", author)
    license = words.license or (_ask(f"License ({', '.join(LICENSES)})", "MIT") if asking else "MIT")
    if license not in LICENSES:
        raise Refused(f"--license {license}: no such license (there are: {', '.join(LICENSES)})")
    choices = Choices(name, author, license, tuple(room for room in ROOMS if room in without), minimal)
    if words.to:
        create(choices, words.to, commit=not words.no_commit)
    else:
        convert(choices)
    print(f"{name} is in {(words.to or ROOT).resolve()}. Next:\n\n  cd {words.to or ROOT}")
    print("  python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[dev]'")
    if len(name) > names.LONG:
        print("  .venv/bin/ruff check -q --select I --fix; .venv/bin/ruff format -q  # lines with so long a name")
    print("  .venv/bin/python scripts/train.py")


def _ask(question: str, default: str) -> str:
    return input(f"{question} [{default}]: ").strip() or default


def _user() -> str:
    try:
        return git("config", "user.name").strip()
    except RuntimeError:
        return ""
