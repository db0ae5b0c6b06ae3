"""The run folder: created once, recorded, resumed and reproduced.

``<runs>/<name>/<id>/`` holds ``config.yaml`` (every value resolved), ``record.json`` (lineage of the run, and all
attempts), ``code.patch`` (uncommitted changes), ``metrics.csv``, ``checkpoints/``, ``logs/`` of each rank,
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

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.compose import DictConfig, compose, merge
from boltcutter.config.errors import ConfigError
from boltcutter.config.values import as_yaml, redacted
from boltcutter.environment import lease
from boltcutter.project import Project
from boltcutter.protocols import PlannedExit
from boltcutter.run import lineage, remote, trust


def split_overrides(overrides: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Split overrides into those whose key is one of ``names``, as a dictionary, and the others."""
    selected = {
        override.partition("=")[0]: override.partition("=")[2]
        for override in overrides
        if override.partition("=")[0] in names
    }
    return selected, [override for override in overrides if override.partition("=")[0] not in names]


@contextmanager
def prefix_errors(setting: str, *kinds: type[Exception]) -> Iterator[None]:
    """Prefix the messages of errors raised in this context with the setting that caused them.

    Args:
        setting: ``key=value``.
        kinds: Exceptions that are converted to a ``ConfigError``.

    Raises:
        ConfigError: In place of a ``ConfigError``, or of one of ``kinds``.
    """
    caught: tuple[type[Exception], ...] = (ConfigError, *kinds)
    try:
        yield
    except caught as error:
        key, _, value = setting.partition("=")
        text = str(error)
        raise ConfigError(text if f"{key}=" in text else f"{setting}: {text.removeprefix(f'{value}: ')}") from error


def read_overrides(project: Project, overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration; ``resume=`` and ``reproduce=`` start from the configuration of an earlier run.

    ``resume=`` takes the folder of the run, with ``ckpt=best|last|<name>|<path>``, or a checkpoint file in it.
    """
    special, rest = split_overrides(overrides, "resume", "reproduce")
    if special.get("resume", "").endswith(".ckpt"):
        rest = [f"ckpt={special['resume']}", *rest]
        special["resume"] = _run_above(special["resume"])
    given, rest = split_overrides(rest, "ckpt") if "resume" in special else ({}, rest)
    if len(special) == 2:
        raise ConfigError("resume and reproduce exclude each other; give one of them")
    if not special:
        return compose(project, rest)
    ((verb, text),) = special.items()
    if verb == "resume":
        check_resume(Path(text), rest)
    cfg = load_run_config(project, Path(text), rest, verb)
    cfg.resume = text if verb == "resume" else None
    cfg.pop("ckpt", None)  # of an earlier attempt
    if given:
        cfg.ckpt = given["ckpt"]
    if verb == "reproduce":
        cfg.reproduce = text
        cfg.folder = next((override.partition("=")[2] for override in rest if override.startswith("folder=")), None)
    return cfg


def _run_above(checkpoint: str) -> str:
    """The folder of the run whose checkpoint is given.

    Raises:
        ConfigError: There is none above the file.
    """
    for folder in Path(checkpoint).parents:
        if (folder / "record.json").is_file():
            return str(folder)
    raise ConfigError(f"resume={checkpoint}: not in the folder of a run; use resume=<folder of the run> ckpt=<file>")


def check_resume(folder: Path, overrides: Sequence[str]) -> None:
    """Check that no override changes a setting that a resumed run cannot change."""
    given, _ = split_overrides(overrides, "folder", "name", "runs", "init_from")
    recorded = _recorded(folder, "resume")[0] if given else {}
    for key, text in given.items():
        same = (
            remote.locate(text).absolute() == folder.absolute() if key == "folder" else text == str(recorded.get(key))
        )
        if not same:
            what = "weights" if key == "init_from" else "folder"
            raise ConfigError(f"{key}={text}: resume={folder} continues with its own {what}; remove one of the two")


def load_run_config(
    project: Project, folder: Path, overrides: Sequence[str] = (), setting: str = "run", *, instantiates: bool = True
) -> DictConfig:
    """Load the configuration of an earlier run and apply ``overrides``.

    Args:
        project: Project whose configuration is used.
        folder: Folder of the run.
        overrides: Overrides of the command line.
        setting: Key of the override that names the folder, for error messages.
        instantiates: Whether the classes in the record will be instantiated, and so must be trusted.

    Raises:
        ConfigError: The folder holds no run, or its record names a class that is not trusted.
    """
    recorded, signature = _recorded(folder, setting)
    trust.check(recorded, f"{setting}={folder}", folder, project, signature=signature, instantiates=instantiates)
    cfg = compose(project, overrides, base=DictConfig(recorded))
    cfg.folder = str(folder)
    if setting != "reproduce":
        remote.use_url(cfg)
    return cfg


def _recorded(folder: Path, setting: str) -> tuple[dict[str, Any], object]:
    """Return the recorded configuration and its signature, of one reading: the file may change between two."""
    with prefix_errors(f"{setting}={folder}"):
        record = read_record(folder)
        config = record.get("config")
        if not isinstance(config, dict):
            raise ConfigError(f"{folder}/record.json is damaged (config is missing); restore it from a copy")
    return config, record.get("signature")


def load_evaluation_config(
    project: Project, special: dict[str, str], overrides: Sequence[str]
) -> tuple[DictConfig, Path]:
    """Load the configuration of ``run=<folder>``, for one device unless an override sets the trainer.

    Returns:
        The configuration and the folder of the run.

    Raises:
        ConfigError: ``run`` is not set, or the folder holds no run.
    """
    if not special.get("run"):
        given = next((text for text in overrides if "=" not in text), "runs/digits-convnet/…")
        raise ConfigError(f"run is not set; use run=<folder of a run>, as in run={given}")
    folder = Path(special["run"])
    cfg = load_run_config(project, folder, overrides)
    if not any(override.lstrip("+~").startswith("trainer") for override in overrides):
        cfg.trainer = merge(cfg.trainer, DictConfig({"devices": 1, "num_nodes": 1, "strategy": "auto"}))
    return cfg, folder


def read_record(folder: Path) -> dict[str, Any]:
    """Read ``record.json`` of a run.

    Raises:
        ConfigError: The folder holds no run, or the record is damaged.
    """
    try:
        found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder}: no run there (record.json is missing); give the folder of a run") from None
    except ValueError as error:
        raise ConfigError(f"{folder}/record.json is damaged ({error}); restore it from a copy") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{folder}/record.json is damaged (not a JSON object); restore it from a copy")
    return found


def is_signed_by_user(folder: Path) -> bool:
    """Return whether the configuration in a run's record has a valid signature of this user."""
    record = read_record(folder)
    return trust.is_signed(record.get("config"), record.get("signature"))


def update_record(folder: Path, **facts: Any) -> None:
    """Add or replace entries of ``record.json`` atomically.

    Raises:
        LeaseLostError: Another process has taken over the run.
    """
    lease.check()
    path = folder / "record.json"
    record = read_record(folder) if path.is_file() else {}
    write_text(path, json.dumps(record | facts, indent=2, default=str) + "\n")


def save_config(cfg: DictConfig, **facts: Any) -> None:
    """Create the run folder, with ``config.yaml`` and the entries of ``record.json`` that are known before the run."""
    folder = Path(cfg.folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.yaml", remote.show(as_yaml(redacted(cfg))))
    facts["config"] = remote.portable(cfg)  # a resumed run may have new overrides
    facts["tags"] = facts["config"].get("tags", [])
    earlier = read_record(folder) if (folder / "record.json").is_file() else {}
    # Keep the signature of the user who composed it: a job, as in a container, may have no access to that user's key.
    if not earlier.get("signature") or trust.signed_content(facts["config"]) != trust.signed_content(earlier["config"]):
        facts["signature"] = trust.sign(facts["config"])
    if "attempts" not in earlier:
        facts |= {"id": folder.name, "name": cfg.name, "command": shlex.join(sys.argv), "seed": cfg.seed}
        facts |= {"reproduces": facts["config"]["reproduce"], "attempts": []}
    update_record(folder, **facts)


def create(cfg: DictConfig, root: Path) -> None:
    """Create the run folder, unless a launcher has, and record code, packages and hardware; called on one process."""
    save_config(cfg)
    folder = Path(cfg.folder)
    record = read_record(folder)
    if "git" not in record:
        record_code(folder, lineage.git_state(root), lineage.library_state(root))
    if "packages" not in record:
        update_record(
            folder,
            packages=lineage.packages(),
            python=platform.python_version(),
            hardware=lineage.hardware(),
        )


def record_code(folder: Path, project: dict[str, Any], library: dict[str, Any]) -> None:
    """Record the state of the project's code and of the library, and write their patches next to the record."""
    update_record(
        folder,
        git=project | {"patch": _write_patch(folder / "code.patch", project)},
        library=library | {"patch": _write_patch(folder / "library.patch", library)},
    )


def _write_patch(file: Path, state: dict[str, Any]) -> str | None:
    """Write uncommitted changes, if there are any; returns the name of the file."""
    patch = state.get("patch", b"")
    if left_out := state.get("left_out"):
        print(f"note: {file.name} excludes {', '.join(left_out)}: their names or contents look like secrets")
    if patch is None:
        print(f"warning: {file} is not written: git failed to list uncommitted changes", file=sys.stderr)
    if not patch:
        return None
    file.write_bytes(patch)
    return file.name


@contextmanager
def record_attempt(folder: Path, *, writes: bool, **facts: Any) -> Iterator[None]:
    """Record an attempt at the run: its start, its end and the reason for the end.

    Args:
        folder: Folder of the run.
        writes: Whether this process writes the record.
        facts: Further entries of the attempt.
    """
    if not writes:
        yield
        return
    earlier = read_record(folder)["attempts"]
    for before in earlier:
        if before["end"] is None:
            before["reason"] = "killed"  # otherwise it would have recorded its end
    now = {"start": _time(), "end": None, "reason": "running", "host": socket.gethostname(), "pid": os.getpid()} | facts
    update_record(folder, attempts=[*earlier, now])
    reason, began = "completed", time.monotonic()  # the wall clock may be set back
    try:
        yield
    except KeyboardInterrupt:
        reason = "interrupted"
        raise
    except SystemExit as error:
        code = f"exit {error.code}" if error.code else "completed"
        reason = error.reason if isinstance(error, PlannedExit) else code
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise
    finally:
        try:
            if reason == "completed" and (warning := read_record(folder).get("warning")):
                reason = f"completed, but {warning}"
            now |= {"end": _time(), "seconds": round(time.monotonic() - began, 1), "reason": reason}
            update_record(folder, attempts=[*earlier, now])
        except OSError as error:
            if reason.startswith("completed"):
                raise
            print(f"warning: {folder}/record.json does not record how the run ended ({error})", file=sys.stderr)


def _time() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
