"""The run folder: made once, traced, resumed and made again.

``<runs>/<name>/<id>/`` holds ``config.yaml`` (every value resolved), ``record.json`` (what made the run, and each of
its attempts), ``code.patch`` (what git had not committed), ``metrics.csv``, ``checkpoints/``, ``logs/`` of each rank,
``evaluation/``, ``report.html`` and the files of W&B.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from boltcutter import lineage, trust
from boltcutter.atomic import write_text
from boltcutter.config import ConfigError, DictConfig, as_yaml, compose, merge, plain, redacted
from boltcutter.environment import lease
from boltcutter.environment.process import is_rank_zero


def split_overrides(words: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Words whose key is one of ``names``, and the rest."""
    taken = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.partition("=")[0] in names}
    return taken, [word for word in words if word.partition("=")[0] not in names]


@contextmanager
def prefix_errors(setting: str, *kinds: type[Exception]) -> Iterator[None]:
    """Have what is refused inside begin with the setting that it came from.

    Args:
        setting: ``key=value``.
        kinds: Which exceptions become a ``ConfigError``.

    Raises:
        ConfigError: Something was refused.
    """
    caught: tuple[type[Exception], ...] = (ConfigError, *kinds)
    try:
        yield
    except caught as error:
        key, _, value = setting.partition("=")
        text = str(error)
        raise ConfigError(text if f"{key}=" in text else f"{setting}: {text.removeprefix(f'{value}: ')}") from error


def read_overrides(configs: Path, words: Sequence[str]) -> DictConfig:
    """The configuration that the words mean; ``resume=`` and ``reproduce=`` start from a run's own.

    Raises:
        ConfigError: A word is wrong, or there is no such run.
    """
    special, rest = split_overrides(words, "resume", "reproduce")
    if len(special) == 2:
        raise ConfigError("resume and reproduce exclude each other; give one of them")
    if not special:
        return compose(configs, rest)
    ((verb, text),) = special.items()
    if verb == "resume":
        check_resume(Path(text), rest)
    cfg = load_run_config(configs, Path(text), rest, verb)
    cfg.resume = text if verb == "resume" else None
    if verb == "reproduce":
        cfg.reproduce = text
        cfg.folder = next((word.partition("=")[2] for word in rest if word.startswith("folder=")), None)
    return cfg


def check_resume(folder: Path, words: Sequence[str]) -> None:
    """Refuse settings that a run which goes on has already used.

    Raises:
        ConfigError: One is given, with another value than the run has.
    """
    given, _ = split_overrides(words, "folder", "name", "runs", "init_from")
    recorded = _recorded(folder, "resume") if given else {}
    for key, text in given.items():
        same = Path(text).absolute() == folder.absolute() if key == "folder" else text == str(recorded.get(key))
        if not same:
            what = "weights" if key == "init_from" else "folder"
            raise ConfigError(f"{key}={text}: resume={folder} goes on with its own {what}; leave one of them out")


def load_run_config(
    configs: Path, folder: Path, words: Sequence[str] = (), setting: str = "run", *, builds: bool = True
) -> DictConfig:
    """The configuration of an earlier run, changed by ``words``.

    Args:
        configs: Folder of the configuration.
        folder: Of the run.
        words: Of the command line.
        setting: Which of them names the folder.
        builds: Whether what the record names is to be called, and has to be known or trusted.

    Raises:
        ConfigError: There is no run, or it names what is not trusted.
    """
    recorded = _recorded(folder, setting)
    if builds and not is_signed_by_user(folder):
        trust.check(recorded, f"{setting}={folder}", folder, configs)
    cfg = compose(configs, words, base=DictConfig(recorded))
    cfg.folder = str(folder)
    return cfg


def _recorded(folder: Path, setting: str) -> dict[str, Any]:
    with prefix_errors(f"{setting}={folder}"):
        config = read_record(folder).get("config")
        if not isinstance(config, dict):
            raise ConfigError(f"{folder}/record.json is damaged (it has no config); restore it from a copy")
    return config


def load_evaluation_config(configs: Path, special: dict[str, str], words: Sequence[str]) -> tuple[DictConfig, Path]:
    """The configuration of ``run=<folder>``, on one device unless ``words`` speak of the trainer; and the folder.

    Raises:
        ConfigError: ``run`` is missing, or holds no run.
    """
    if not special.get("run"):
        raise ConfigError("run: not set; say run=<folder of a run>, as in run=runs/digits-convnet/…")
    folder = Path(special["run"])
    cfg = load_run_config(configs, folder, words)
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
    if not isinstance(found, dict):
        raise ConfigError(f"{folder}/record.json is damaged (no record of a run); restore it from a copy")
    return found


def is_signed_by_user(folder: Path) -> bool:
    """Whether this user has signed the configuration in a run's record."""
    record = read_record(folder)
    return trust.is_signed(record.get("config"), record.get("signature"))


def update_record(folder: Path, **facts: Any) -> None:
    """Add to what is known of a run, in one step that cannot be half done.

    Raises:
        LeaseLostError: This process held the run, and another one does now.
    """
    lease.check()
    path = folder / "record.json"
    record = read_record(folder) if path.is_file() else {}
    write_text(path, json.dumps(record | facts, indent=2, default=str) + "\n")


def last_checkpoint(place: str) -> str | None:
    """Where a run with its checkpoints there would go on from: the newest whole one.

    Raises:
        ConfigError: There is no such store, it cannot be reached, or there are only folders, which cannot be resumed.
    """
    from boltcutter.selection import find_newest, list_folders  # imports torch, which --print does without
    from boltcutter.storage import CheckpointError

    try:
        found = find_newest(place, print if is_rank_zero() else lambda told: None)
        if found is None and (sharded := list_folders(place)):
            raise CheckpointError(
                f"{sharded[0]} is a folder, as DeepSpeed writes it, from which no run continues; give another "
                "folder=, with init_from=<the file of weights that zero_to_fp32.py in it writes>"
            )
        return found
    except CheckpointError as error:
        raise ConfigError(f"checkpoints={error}") from error


def save_config(cfg: DictConfig, **facts: Any) -> None:
    """Make the folder with ``config.yaml``, and what is known before the run begins in ``record.json``."""
    folder = Path(cfg.folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.yaml", as_yaml(redacted(cfg)))
    facts["config"] = plain(cfg)  # a resumed run may have been given new words
    earlier = read_record(folder) if (folder / "record.json").is_file() else {}
    # The user who composed it has signed it. A job may have no access to that user's key, as in a container.
    if not earlier.get("signature") or trust.signed_content(facts["config"]) != trust.signed_content(earlier["config"]):
        facts["signature"] = trust.sign(facts["config"])
    if "attempts" not in earlier:
        facts |= {"id": folder.name, "name": cfg.name, "command": shlex.join(sys.argv), "seed": cfg.seed}
        facts |= {"reproduces": cfg.reproduce, "attempts": []}
    update_record(folder, **facts)


def create(cfg: DictConfig) -> None:
    """Make the folder, if a launcher has not, and record what trains; one process does this."""
    save_config(cfg)
    folder = Path(cfg.folder)
    record = read_record(folder)
    if "git" not in record:
        record_code(folder, lineage.git_state(Path(__file__).parent))
    if "packages" not in record:
        update_record(
            folder,
            packages=lineage.packages(),
            python=platform.python_version(),
            hardware=lineage.hardware(),
        )


def record_code(folder: Path, state: dict[str, Any]) -> None:
    """Record the state of the code, with its patch beside the record.

    Args:
        folder: Of the run.
        state: From ``lineage.git_state``.
    """
    if patch := state["patch"]:
        (folder / "code.patch").write_bytes(patch)
    elif patch is None:
        print(f"warning: {folder}/code.patch is not written: git does not tell what is not committed", file=sys.stderr)
    if left_out := state.get("left_out"):
        print(f"note: code.patch leaves out {', '.join(left_out)}: by name or contents they hold secrets")
    update_record(folder, git=state | {"patch": "code.patch" if patch else None})


@contextmanager
def record_attempt(folder: Path, *, writes: bool, **facts: Any) -> Iterator[None]:
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
    reason, began = "completed", time.monotonic()  # the other clock may be set back
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
            now |= {"end": _time(), "seconds": round(time.monotonic() - began, 1), "reason": reason}
            update_record(folder, attempts=[*earlier, now])
        except OSError as error:
            if reason == "completed":
                raise
            print(f"warning: {folder}/record.json does not tell how the run ended ({error})", file=sys.stderr)


def _time() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
