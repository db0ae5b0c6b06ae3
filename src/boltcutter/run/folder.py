"""The run folder: created once, recorded, resumed and reproduced.

``<runs>/<name>/<id>/`` holds ``config.yaml`` (every value resolved), ``record.json`` (lineage of the run, and all
attempts), ``code.patch`` (uncommitted changes), ``metrics.csv``, ``steps.ledger``, ``checkpoints/``, ``logs/`` of each
rank, ``evaluation/``, ``report.html`` and the files of W&B.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.checkpoint.atomic import write_atomically, write_text
from boltcutter.config.errors import ConfigError, prefix_errors, printable
from boltcutter.config.redaction import hide_variables, redact_arguments
from boltcutter.config.settings import Settings
from boltcutter.config.values import NOT_FINITE, as_yaml
from boltcutter.environment import lease, user_key
from boltcutter.formatting import to_json
from boltcutter.project import Project
from boltcutter.protocols import PlannedExit
from boltcutter.run import lineage, trust
from boltcutter.run.destinations import use_own_destinations
from boltcutter.run.remote.store import run_store

MAX_NAMED = 5  # files and folders in a line
BASIC = ("name", "checkpoints")  # keys of each configuration, also of those that are only compared
REQUIRED = (*BASIC, "seed", "timeout", "data", "task", "trainer")
# Entries of a record that are not plain values.
MAPPINGS = (
    *("config", "git", "library", "packages", "hardware", "environment", "files", "launch", "best_by", "metrics"),
    *("test", "measured_after"),
)
MAX_COUNT = 1e12  # seconds, or optimizer steps
COUNTS = ("seconds", "devices", "resumed_at")  # entries of an attempt, which are computed with
WRITTEN_NUMBERS = {str(number): text for text, number in NOT_FINITE.items()}
ENTRIES = {**dict.fromkeys(("attempts", "tags"), list), **dict.fromkeys(MAPPINGS, dict)}


def read_run_config(
    project: Project, folder: Path, setting: str = "run", *, instantiates: bool = True, shows: bool = False
) -> Settings:
    """Read the configuration of an earlier run, with its folder and checkpoints where they are now.

    Where somebody else's run writes to is replaced, by ``use_own_destinations``.

    Args:
        project: Project whose configuration files tell which targets in a record are allowed.
        folder: Folder of the run.
        setting: Key of the override that names the folder, for error messages.
        instantiates: Whether the classes in the record will be instantiated, and so must be trusted.
        shows: Whether it is only shown, as it is recorded.

    Raises:
        ConfigError: The folder holds no run, or its record names a class that is not trusted.
    """
    recorded, signature = recorded_config(folder, setting)
    where = f"{setting}={folder}"
    if broken := [key for key, value in recorded.items() if isinstance(value, str) and "\0" in value]:
        raise ConfigError(f"{where}: its record.json has a NUL character in {broken[0]}; restore it from a copy")
    if not (shows or trust.is_own_record(recorded, signature, folder)):
        from boltcutter.run.foreign_references import check_number  # only for records of others

        check_number(recorded, where)  # before any of them is resolved
        recorded = use_own_destinations(recorded, folder, project, continues=setting == "resume")
    trust.check_record(
        recorded,
        where,
        folder,
        project,
        signature=signature,
        instantiates=instantiates,
        walks=True,
        writes=setting == "resume",
    )
    if missing := [key for key in REQUIRED if (instantiates or key in BASIC) and key not in recorded]:
        raise ConfigError(f"{where}: its record.json has no {missing[0]} in config; restore it from a copy")
    return moved_to(folder, Settings(recorded), setting)


def recorded_config(folder: Path, setting: str) -> tuple[dict[str, Any], object]:
    """Return the recorded configuration and its signature, of one reading: the file may change between two."""
    with prefix_errors(f"{setting}={folder}"):
        record = read_record(folder)
        config = record.get("config")
        if not isinstance(config, dict):
            raise ConfigError(f"{folder}/record.json is damaged (config is missing); restore it from a copy")
    return config, record.get("signature")


def moved_to(folder: Path, cfg: Settings, setting: str = "run") -> Settings:
    """Return the configuration of a run that is in ``folder``; a reproduction writes its checkpoints elsewhere."""
    found = cfg.changed({"folder": str(folder)})
    return found if setting == "reproduce" else run_store().use_url(found)


def read_record(folder: Path) -> dict[str, Any]:
    """Read ``record.json`` of a run.

    Raises:
        ConfigError: The folder holds no run, or the record is damaged.
    """
    try:
        found = _decoded(trust.read_json(folder / run_files.RECORD))
        found |= {name: kind() for name, kind in ENTRIES.items() if found.get(name, kind) is None}
        is_valid = all(isinstance(found.get(name, kind()), kind) for name, kind in ENTRIES.items())
        if not is_valid or not all(map(_is_attempt, found.get("attempts") or ())):
            raise ValueError("an entry has another type")
        return found
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{folder}: no run there (record.json is missing); give the folder of a run", kind="unknown_run"
        ) from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder}/record.json is damaged ({error}); restore it from a copy") from None


def _is_attempt(found: Any) -> bool:
    """Whether an attempt in a record has numbers where it is written with numbers."""
    if not isinstance(found, dict):
        return False
    numbers = [found[name] for name in COUNTS if found.get(name) is not None]
    return all(isinstance(number, int | float) and 0 <= number < MAX_COUNT for number in numbers)


def encoded(record: dict[str, Any]) -> dict[str, Any]:
    """A record as it is written: settings that are NaN or infinite as YAML has them, since JSON knows neither."""
    return {**record, "config": _replaced(record["config"], WRITTEN_NUMBERS)} if "config" in record else record


def _decoded(record: dict[str, Any]) -> dict[str, Any]:
    """A record as it was before ``encoded``, and with metrics that were not finite as NaN."""
    if isinstance(record.get("config"), dict):
        record["config"] = _replaced(record["config"], NOT_FINITE)
    for name in ("metrics", "test"):
        if isinstance(record.get(name), dict):
            record[name] = {metric: math.nan if value is None else value for metric, value in record[name].items()}
    return record


def _replaced(value: Any, by: Mapping[Any, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(inner, by) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(inner, by) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return by.get(str(value), value)
    return by.get(value, value) if isinstance(value, str) and by is NOT_FINITE else value  # "nan" may be any text


def is_own(folder: Path) -> bool:
    """Return whether a run is this user's, with the entries of its record that are not signed."""
    record = read_record(folder)
    return trust.is_own_record(record.get("config"), record.get("signature"), folder)


def update_record(folder: Path, **facts: Any) -> None:
    """Add or replace entries of ``record.json`` atomically.

    Raises:
        LeaseLostError: Another process has taken over the run.
    """
    lease.check_lease()
    path = folder / run_files.RECORD
    record = read_record(folder) if path.is_file() else {}
    write_text(path, to_json(encoded(record | facts), indent=2, default=str) + "\n")


def save_config(cfg: Settings, **facts: Any) -> None:
    """Create the run folder, with ``config.yaml`` and the entries of ``record.json`` that are known before the run."""
    folder = cfg.place.folder
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_text(folder / run_files.CONFIG, run_store().show(as_yaml(cfg.redacted)))
    facts["config"] = run_store().portable(cfg)  # a resumed run may have new overrides
    facts["tags"] = facts["config"].get("tags", [])
    earlier = read_record(folder) if (folder / run_files.RECORD).is_file() else {}
    # Keep the signature of the user who composed it: a job, as in a container, may have no access to that user's key.
    if not earlier.get("signature") or user_key.signed_content(facts["config"]) != user_key.signed_content(
        earlier["config"]
    ):
        facts["signature"] = user_key.sign(facts["config"])
    if "attempts" not in earlier:
        command = shlex.join(redact_arguments(sys.argv))
        facts |= {"id": folder.name, "name": cfg.name, "command": command, "seed": cfg.seed}
        facts |= {"reproduces": facts["config"]["reproduce"], "attempts": []}
    update_record(folder, **facts)


def writable_place(folder: Path, runs: str) -> Path:
    """The folder of a run; if it cannot be written, as that of a colleague, one below the folder of all own runs."""
    return folder if os.access(folder, os.W_OK) else Path(runs, "elsewhere", folder.name)


def create_folder(cfg: Settings, root: Path) -> None:
    """Create the run folder, unless a launcher has, and record code, packages and hardware; called on one process."""
    save_config(cfg)
    record = read_record(folder := cfg.place.folder)
    if "git" not in record:
        record_code(folder, lineage.git_state(root), lineage.library_state(root))
    if "packages" not in record:
        facts = {"packages": lineage.packages(), "python": platform.python_version(), "hardware": lineage.hardware()}
        update_record(folder, **facts)


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
    if large := state.get("large"):
        more = f" and {len(large) - MAX_NAMED} more" if len(large) > MAX_NAMED else ""
        named = printable(", ".join(large[:MAX_NAMED]))
        print(f"note: {file.name} excludes {named}{more}: new, but large; add them to .gitignore, or commit them")
    if patch is None:
        print(f"warning: {file} is not written: git failed to list uncommitted changes", file=sys.stderr)
    if not patch:
        return None
    write_atomically(file, lambda opened: opened.write(patch))
    return file.name


@contextmanager
def record_attempt(folder: Path, *, writes: bool, **facts: Any) -> Iterator[None]:
    """Record an attempt at the run, if this process writes the record: start, end, its reason, and further facts."""
    if not writes:
        yield
        return
    known = read_record(folder)
    earlier = known["attempts"]
    for before in earlier:
        if before["end"] is None:
            before["reason"] = "killed"  # otherwise it would have recorded its end
    now = {"start": _time(), "end": None, "reason": "running", "host": socket.gethostname(), "pid": os.getpid()} | facts
    update_record(folder, attempts=[*earlier, now], **({"warning": None} if known.get("warning") else {}))
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
        kind = getattr(error, "original", type(error).__name__)
        reason = hide_variables(f"{kind}: {' '.join(str(error).split())}")[:300]
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
