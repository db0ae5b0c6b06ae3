"""Fills the folder that cookiecutter made: the template's own scripts/new.py does it, with what was answered."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ANSWERS = json.loads(r"""{{ cookiecutter | jsonify }}""")


def template(scratch: str) -> Path:
    """Where the template is; a clone of it where cruft does not tell."""
    if clone := ANSWERS.get("_repo_dir"):  # it may be relative to where cookiecutter was started
        places = [Path(os.environ.get("PWD", ".")), *Path.cwd().parents]
        return next(place / clone for place in places if (place / clone / "cookiecutter.json").is_file()).resolve()
    subprocess.run(["git", "clone", "-q", "--", ANSWERS["_template"].removeprefix("git+"), scratch], check=True)
    subprocess.run(["git", "checkout", "-q", ANSWERS.get("_commit") or "HEAD"], cwd=scratch, check=True)
    return Path(scratch)


def main(scratch: str) -> int:
    """Make the project where we are; the status of scripts/new.py."""
    minimal = ANSWERS.pop("minimal")
    without = "" if minimal else ",".join(room for room, wanted in ANSWERS.items() if wanted is False)
    words = [ANSWERS["project_slug"], "--to=.", f"--license={ANSWERS['license']}", f"--without={without}"]
    words += ["--minimal"] if minimal else []
    words += [f"--author={ANSWERS['author']}"] if ANSWERS["author"] else []
    words += [] if ANSWERS.get("_repo_dir") else ["--no-commit"]  # cruft has a file of its own to add
    command = [sys.executable, "-B", str(template(scratch) / "scripts" / "new.py"), *words]
    Path(".keep").unlink()
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode


with tempfile.TemporaryDirectory() as folder:
    sys.exit(main(folder))
