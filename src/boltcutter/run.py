"""The run folder: made once, traced, resumed and made again.

``<runs>/<name>/<id>/`` holds ``config.yaml`` (every value resolved), ``record.json`` (what made the run, and each of
its attempts), ``code.patch`` (what git had not committed), ``metrics.csv``, ``checkpoints/``, ``logs/`` of each rank,
``evaluation/``, ``report.html`` and the files of W&B.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from boltcutter.config import ConfigError, DictConfig, as_yaml, compose, merge, plain, public
from boltcutter.environment.process import is_first

UNTRACKED_BYTES = 1_000_000  # larger new files are not part of code.patch


def take(words: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Words whose key is one of ``names``, and the rest."""
    taken = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.partition("=")[0] in names}
    return taken, [word for word in words if word.partition("=")[0] not in names]


def read_words(configs: Path, words: Sequence[str]) -> DictConfig:
    """The configuration that the words mean; ``resume=`` and ``reproduce=`` start from a run's own.

    Raises:
        ConfigError: A word is wrong, or there is no such run.
    """
    special, rest = take(words, "resume", "reproduce")
    if len(special) == 2:
        raise ConfigError("resume and reproduce exclude each other; give one of them")
    if not special:
        return compose(configs, rest)
    ((verb, text),) = special.items()
    cfg = reopen(configs, Path(text), rest)
    cfg.resume = text if verb == "resume" else None
    if verb == "reproduce":
        cfg.reproduce = text
        cfg.folder = next((word.partition("=")[2] for word in rest if word.startswith("folder=")), None)
    return cfg


def reopen(configs: Path, folder: Path, words: Sequence[str] = ()) -> DictConfig:
    """The configuration of an earlier run, changed by ``words``."""
    cfg = compose(configs, words, base=DictConfig(read_record(folder)["config"]))
    cfg.folder = str(folder)
    return cfg


def reopen_for(configs: Path, special: dict[str, str], words: Sequence[str]) -> tuple[DictConfig, Path]:
    """The configuration of ``run=<folder>``, on one device unless ``words`` speak of the trainer; and the folder.

    Raises:
        ConfigError: ``run`` is missing, or holds no run.
    """
    if not special.get("run"):
        raise ConfigError("run: not set; say run=<folder of a run>, as in run=runs/digits-convnet/…")
    folder = Path(special["run"])
    cfg = reopen(configs, folder, words)
    if not any(word.lstrip("+~").startswith("trainer") for word in words):
        cfg.trainer = merge(cfg.trainer, DictConfig({"devices": 1, "num_nodes": 1, "strategy": "auto"}))
    return cfg, folder


def read_record(folder: Path) -> dict[str, Any]:
    """What is known of a run.

    Raises:
        ConfigError: The folder holds no run.
    """
    try:
        found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"{folder}: no run there (record.json is missing); give the folder of a run") from None
    except ValueError as error:
        raise ConfigError(f"{folder}/record.json is damaged ({error}); restore it from a copy") from None
    return found


def update_record(folder: Path, **facts: Any) -> None:
    """Add to what is known of a run, in one step that cannot be half done."""
    path = folder / "record.json"
    record = json.loads(path.read_text()) if path.is_file() else {}
    write_atomically(path, json.dumps(record | facts, indent=2, default=str) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write beside the file, then put it in place."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def last_checkpoint(place: str) -> str | None:
    """Where a run with its checkpoints there would go on from: the newest whole one.

    Raises:
        ConfigError: There is no such store, or it cannot be reached.
    """
    from boltcutter.checkpoint import CheckpointError, newest  # imports torch, which --print does without

    try:
        return newest(place, print if is_first() else lambda told: None)
    except CheckpointError as error:
        raise ConfigError(f"checkpoints={error}") from error


def freeze(cfg: DictConfig, **facts: Any) -> None:
    """Make the folder with ``config.yaml``, and what is known before the run begins in ``record.json``."""
    folder = Path(cfg.folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.yaml", as_yaml(public(cfg)))
    facts["config"] = plain(cfg)  # a resumed run may have been given new words
    if not (folder / "record.json").is_file():
        facts |= {"id": folder.name, "name": cfg.name, "command": shlex.join(sys.argv), "seed": cfg.seed}
        facts |= {"reproduces": cfg.reproduce, "attempts": []}
    update_record(folder, **facts)


def create(cfg: DictConfig) -> None:
    """Make the folder, if a launcher has not, and record what trains; one process does this."""
    freeze(cfg)
    folder = Path(cfg.folder)
    if "git" in read_record(folder):
        return
    source = git_state(Path(__file__).parent)
    patch = source.pop("patch")
    if patch:
        (folder / "code.patch").write_text(patch)
    update_record(
        folder,
        git=source | {"patch": "code.patch" if patch else None},
        packages=packages(),
        python=platform.python_version(),
        hardware=hardware(),
    )


@contextmanager
def attempt(folder: Path, *, writes: bool, **facts: Any) -> Iterator[None]:
    """One go at the run, in its record with start, end and the reason why it ended.

    Args:
        folder: The run's.
        writes: Whether this process keeps the record.
        facts: What else is known of the attempt.
    """
    if not writes:
        yield
        return
    earlier = read_record(folder)["attempts"]
    for before in earlier:
        if before["end"] is None:
            before["reason"] = "killed"  # else it would have said how it ended
    now = {"start": _time(), "end": None, "reason": "running", "host": socket.gethostname(), "pid": os.getpid()} | facts
    update_record(folder, attempts=[*earlier, now])
    reason = "completed"
    try:
        yield
    except KeyboardInterrupt:
        reason = "interrupted"
        raise
    except SystemExit as error:
        reason = getattr(error, "reason", None) or ("completed" if not error.code else f"exit {error.code}")
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise
    finally:
        try:
            update_record(folder, attempts=[*earlier, now | {"end": _time(), "reason": reason}])
        except OSError as error:
            if reason == "completed":
                raise
            print(f"warning: {folder}/record.json does not tell how the run ended ({error})", file=sys.stderr)


@contextmanager
def keep_log(folder: Path, rank: int) -> Iterator[None]:
    """Also write what this process prints to ``logs/rank-<rank>.log``."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    log = open(folder / "logs" / f"rank-{rank}.log", "a", buffering=1)  # noqa: SIM115 - closing must not fail
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            log.write(traceback.format_exc())
        raise
    finally:
        sys.stdout, sys.stderr = before
        with suppress(OSError):
            log.close()


class _Tee(io.TextIOBase):
    """A stream that also writes to a log, for as long as its disk has room."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream, self.log = stream, log

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.log.write(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding


def differences(record: dict[str, Any]) -> list[str]:
    """One line for each way in which what made a run differs from what is here now."""
    source = git_state(Path(__file__).parent)
    then = record["git"]
    found = []
    if then.get("commit") != source.get("commit"):
        found.append(
            f"git commit is {source.get('commit')}, was {then.get('commit')}; git checkout {then.get('commit')}"
        )
    if then.get("changes") != source["changes"]:
        found.append("uncommitted changes differ; code.patch of the run has those that it was made with")
    installed = packages()
    for name, was in record["packages"].items():
        if installed.get(name) != was:
            found.append(f"package {name} is {installed.get(name, 'absent')}, was {was}")
    if platform.python_version() != record["python"]:
        found.append(f"Python is {platform.python_version()}, was {record['python']}")
    here = hardware()
    found += [f"{key} is {here.get(key)}, was {was}" for key, was in record["hardware"].items() if here.get(key) != was]
    return found


def git_state(where: Path) -> dict[str, Any]:
    """Commit, branch, remote and uncommitted changes of the code; empty where git does not know it."""
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


def _time() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
