"""What made a run: the code with its uncommitted changes, the packages and the hardware."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

UNTRACKED_BYTES = 1_000_000  # larger new files are not part of code.patch
SNAPSHOT = ".snapshot.json"  # in a copy of the code: the state of the repository that it was copied from


def differences(record: dict[str, Any]) -> list[str]:
    """One line for each way in which what made a run differs from what is here now."""
    source = git_state(Path(__file__).parent)
    then = record.get("git", {})
    found = []
    if then.get("commit") != source.get("commit"):
        found.append(
            f"git commit is {source.get('commit')}, was {then.get('commit')}; git checkout {then.get('commit')}"
        )
    if then.get("changes") != source["changes"]:
        found.append("uncommitted changes differ; code.patch of the run has those that it was made with")
    installed = packages()
    for name, was in record.get("packages", {}).items():
        if installed.get(name) != was:
            found.append(f"package {name} is {installed.get(name, 'absent')}, was {was}")
    if platform.python_version() != record.get("python"):
        found.append(f"Python is {platform.python_version()}, was {record.get('python')}")
    here = hardware()
    then = record.get("hardware", {})
    return found + [f"{key} is {here.get(key)}, was {was}" for key, was in then.items() if here.get(key) != was]


def git_state(where: Path) -> dict[str, Any]:
    """Commit, branch, remote and uncommitted changes of the code; empty where git does not know it."""
    if snapshot := next((file for folder in where.parents if (file := folder / SNAPSHOT).is_file()), None):
        return dict(json.loads(snapshot.read_text()) | {"patch": ""})
    top = _git(where, "rev-parse", "--show-toplevel")
    if not top:
        return {"commit": None, "branch": None, "remote": None, "dirty": None, "changes": None, "patch": ""}
    root = Path(top)
    patch = _patch(root)
    remote = _git(root, "config", "--get", "remote.origin.url") or None
    return {
        "commit": _git(root, "rev-parse", "HEAD") or None,
        "branch": _git(root, "rev-parse", "--abbrev-ref", "HEAD") or None,
        "remote": _without_password(remote) if remote else None,
        "dirty": bool(patch),
        "changes": hashlib.sha256(patch.encode()).hexdigest()[:16] if patch else None,
        "patch": patch,
    }


def packages() -> dict[str, str]:
    """Version of every installed distribution, by the names of their folders; to read what is in them takes long."""
    folders = [path.stem for entry in sys.path for path in Path(entry or ".").glob("*.dist-info")]
    found = {name: version for name, _, version in (folder.rpartition("-") for folder in reversed(folders))}
    return {name.replace("_", "-"): found[name] for name in sorted(found, key=str.lower)}


def hardware() -> dict[str, Any]:
    """Processor, memory and accelerators, and the number of threads that torch computes with."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _patch(root: Path) -> str:
    """All that the last commit lacks, new files included, in the form of ``git apply``."""
    new = [
        name
        for name in _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
        if name and (root / name).is_file() and (root / name).stat().st_size <= UNTRACKED_BYTES
    ]
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index"  # a copy, so that the user's own stays as it is
        own = Path(_git(root, "rev-parse", "--absolute-git-dir")) / "index"
        if own.is_file():
            shutil.copy(own, index)
        env = os.environ | {"GIT_INDEX_FILE": str(index)}
        if new:
            _git(root, "add", "--intent-to-add", "--", *new, env=env)
        return _git(root, "diff", "--binary", "HEAD", env=env, strip=False)


def _git(where: Path, *words: str, env: dict[str, str] | None = None, strip: bool = True) -> str:
    try:
        done = subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, env=env, timeout=60)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return (done.stdout.strip() if strip else done.stdout) if done.returncode == 0 else ""


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if separator else url
