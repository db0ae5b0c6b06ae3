"""Commands in a new project, with this environment's library."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import patience


def run(*command: str, cwd: Path, seconds: float = 170, **environment: str) -> str:
    """What a command prints; it has to succeed."""
    names = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "BOLTCUTTER_"))}
    env |= names | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"} | environment
    done = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, timeout=patience(seconds))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_shell(command: str, cwd: Path) -> str:
    """The output of a line of the documentation, with this environment's programs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run("bash", "-c", command, cwd=cwd, seconds=1500, PATH=path)


def run_tests(project: Path, *arguments: str, **environment: str) -> str:
    """The output of the project's own tests."""
    return run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, cwd=project, **environment)


def check_style(project: Path) -> None:
    """Ruff finds nothing."""
    ruff = str(Path(sys.executable).parent / "ruff")
    run(ruff, "check", "--no-cache", cwd=project)
    run(ruff, "format", "--check", "--no-cache", cwd=project)
