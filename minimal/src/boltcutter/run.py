"""A run is a folder: named alike by all of its processes, traced to its code, and all that it takes to go on.

``<runs>/<name>/<id>/`` holds ``config.yaml`` (every value resolved), ``record.json`` (what made the run, and each of
its attempts), ``code.patch`` (what git had not committed), ``metrics.csv`` and ``checkpoints/``.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from boltcutter.config import ConfigError, DictConfig, as_yaml, compose, plain

VARIABLE = "BOLTCUTTER_RUN_ID"
_stores: list[Any] = []  # each serves the other ranks until this process ends


def is_first() -> bool:
    """Whether this is the run's first process, or the only one: the one that speaks and writes."""
    env = os.environ
    rank = env.get("RANK", env.get("SLURM_PROCID"))  # torchrun's, srun's; the others are Lightning's
    return int(rank) == 0 if rank else {env.get("NODE_RANK", "0"), env.get("LOCAL_RANK", "0")} == {"0"}


@contextmanager
def run_id() -> Iterator[str]:
    """This run's name, the same in all of its processes; those that are started inside the block inherit it."""
    env, given = os.environ, os.environ.get(VARIABLE)
    if "SLURM_STEP_ID" in env:
        name = f"slurm-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"  # the same again after a requeue
    elif env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        name = f"torchrun-{env['TORCHELASTIC_RUN_ID']}"  # and after an elastic restart
    else:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        if "RANK" in env and not given:
            name = _agree(name)
    env[VARIABLE] = given or name
    try:
        yield env[VARIABLE]
    finally:
        if not given:
            del env[VARIABLE]


def _agree(name: str) -> str:
    """The name that the first process to come has written where ranks meet."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    env, wait = os.environ, timedelta(minutes=5)
    serves = is_first() and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, serves, wait, False, multi_tenant=True)
    _stores.append(store)
    return str(store.compare_set("run_id", "", name).decode())


def read_words(configs: Path, words: list[str]) -> DictConfig:
    """The configuration that the words mean; ``resume=<folder>`` starts from a run's own."""
    rest = [word for word in words if not word.startswith("resume=")]
    if rest == words:
        return compose(configs, words)
    folder = next(word for word in words if word not in rest).removeprefix("resume=")
    if not (record := read_record(Path(folder))):
        raise ConfigError(f"resume={folder}: no run there (record.json is missing); give the folder of a run")
    cfg = compose(configs, rest, base=DictConfig(record["config"]))
    cfg.folder = cfg.resume = folder
    return cfg


def create(cfg: DictConfig) -> None:
    """Make the folder and record what trains."""
    folder = Path(cfg.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(as_yaml(plain(cfg, resolve=True)))
    if not read_record(folder):
        commit, patch = git_state(Path(__file__).parent)
        if patch:
            (folder / "code.patch").write_bytes(patch)
        packages = {found.name: found.version for found in sorted(distributions(), key=lambda found: found.name)}
        facts = {"command": shlex.join(sys.argv), "seed": cfg.seed, "commit": commit, "changed": bool(patch)}
        update_record(folder, **facts, python=platform.python_version(), packages=packages, attempts=[])
    update_record(folder, config=plain(cfg))  # a resumed run may have been given new words


@contextmanager
def attempt(folder: Path, **facts: Any) -> Iterator[None]:
    """One go at the run, in its record with start, end and the reason why it ended; the first process keeps it."""
    if not is_first():
        yield
        return
    earlier = read_record(folder)["attempts"]
    now = {"start": time.strftime("%FT%T%z"), "end": None, "reason": "killed", "host": platform.node()} | facts
    update_record(folder, attempts=[*earlier, now])
    now["reason"] = "completed"
    try:
        yield
    except BaseException as error:
        now["reason"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        now["end"] = time.strftime("%FT%T%z")
        update_record(folder, attempts=[*earlier, now])


def read_record(folder: Path) -> dict[str, Any]:
    """What is known of a run."""
    file = folder / "record.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def update_record(folder: Path, **facts: Any) -> None:
    """Add to what is known of a run; a kill leaves the old file or the new one."""
    draft = folder / f".record.json.{os.getpid()}"
    draft.write_text(json.dumps(read_record(folder) | facts, indent=2) + "\n")
    draft.replace(folder / "record.json")


def git_state(where: Path) -> tuple[str | None, bytes]:
    """The commit, and all that it lacks, new files included, in the form of ``git apply``."""

    def git(*words: str, **env: str) -> bytes:
        done = subprocess.run(["git", "-C", where, *words], capture_output=True, env=os.environ | env)
        return done.stdout if done.returncode == 0 else b""

    words = ("HEAD", "--show-toplevel", "--absolute-git-dir")
    commit, top, folder = (git("rev-parse", word).decode().strip() for word in words)
    if not commit:
        return None, b""
    with tempfile.TemporaryDirectory() as scratch:  # with a copy of the index, so that the user's own stays as it is
        copy = shutil.copy(Path(folder, "index"), scratch)
        git("-C", top, "add", "--intent-to-add", ".", GIT_INDEX_FILE=copy)
        return commit, git("-C", top, "diff", "--binary", "HEAD", GIT_INDEX_FILE=copy)
