"""Find checkpoints of a run: the best and the last are what its callbacks have said, as its record has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from boltcutter import run_files
from boltcutter.checkpoint import find as select
from boltcutter.checkpoint.load import find_damage
from boltcutter.checkpoint.storage import CheckpointError, is_url
from boltcutter.config.errors import ConfigError, hint, printable
from boltcutter.config.settings import RunPlace, Settings
from boltcutter.environment.identity import is_restarted
from boltcutter.environment.process import is_rank_zero
from boltcutter.run import trust
from boltcutter.run.folder import is_own, read_record


def resumed_checkpoint(cfg: Settings, warn: Callable[[str], None] = print) -> str | None:
    """Find the checkpoint to resume from: the newest, or the one given with ``resume=``; None for a new run.

    ``warn`` is called with a warning for each damaged file, on rank zero.

    Raises:
        ConfigError: The given checkpoint does not exist or is damaged, or the storage cannot be reached, or holds only
            checkpoints that are damaged, or DeepSpeed's checkpoint folders.
    """
    if cfg.ckpt and not is_restarted():  # a requeued job continues from what it has saved since
        return find_checkpoint(cfg.place, cfg.ckpt)
    try:
        places = saved_places(cfg.place)
        found = select.find_newest(*places, warn=warn if is_rank_zero() else lambda text: None, resumes=True)
        if found is None and (sharded := [folder for place in places for folder in select.list_folders(place)]):
            raise CheckpointError(
                f"{sharded[0]} is a folder written by DeepSpeed, from which runs cannot be resumed; use another "
                "folder=, with init_from=<weights file written by zero_to_fp32.py in that folder>"
            )
    except CheckpointError as error:
        raise ConfigError(f"checkpoints={error}") from error
    return found


def saved_places(place: RunPlace) -> list[str]:
    """Folders or URLs of a run's checkpoints: that of the configuration, and those to which callbacks have saved."""
    saved = _record(place).get("saved")
    names = saved if isinstance(saved, list) else []
    return list(dict.fromkeys([place.checkpoints, *(resolve(place, str(name)) for name in names)]))


def find_checkpoint(place: RunPlace, which: str = "best") -> str:
    """Find a checkpoint of a run.

    Args:
        place: Where the run writes.
        which: ``best``, ``last``, the name of a checkpoint of the run, a path or a URL. The best is the last if no
            callback has saved one, which is reported.

    Raises:
        ConfigError: The checkpoint does not exist, or is damaged.
    """
    warn = print if is_rank_zero() else lambda text: None
    try:
        found = find_best(place, warn) if which == "best" else None
        places = saved_places(place)
        files = {name: f"{folder}/{name}" for folder in reversed(places) for name in select.list_names(folder)}
        if which in ("best", "last") and found is None:
            found = select.find_newest(*places, warn=warn)
            if found and which == "best":
                warn(printable(f"note: ckpt=best: no callback has saved a best checkpoint; using {found}"))
        elif found is None:
            found = files.get(which, which)
        fault = find_damage(found) if found else "not found"
    except CheckpointError as error:
        raise ConfigError(f"ckpt={which}: {error}") from error
    if found is None or fault:
        names = ("best", "last", *sorted(files))
        near = "" if which in names else hint(which, names)
        listed = ", ".join(sorted(files)) or "none yet"
        raise ConfigError(f"ckpt={which}: {fault}{near} (checkpoints of the run: {listed})")
    return found


def find_best(place: RunPlace, warn: Callable[[str], None] = print) -> str | None:
    """Find the best checkpoint of a run; None if no callback has saved one, or only such whose metric was NaN.

    It is the one in the record. If that is damaged, or a killed run could not record it, scores in the files decide.
    """
    return _recorded(place) or select.find_best_by_score(*saved_places(place), warn=warn)


def find_tested(place: RunPlace, warn: Callable[[str], None] = print) -> str | None:
    """Find the checkpoint that is tested after training: the best, or else the last; None if nothing was saved."""
    return find_best(place, warn) or select.find_newest(*saved_places(place), warn=warn)


def resolve(place: RunPlace, name: str) -> str:
    """The path or URL of a name in the record of a run, which is relative to the folder of the run if within it.

    Raises:
        ConfigError: It is elsewhere, and the record, of which this entry is not signed, is that of somebody else.
    """
    folder = place.folder
    path = name if is_url(name) or os.path.isabs(name) else os.path.join(str(folder), name)
    if is_url(path) or "::" in path:
        if "::" in path or not path.startswith(f"{place.checkpoints}/"):  # which is verified
            trust.check_record(path, f"run={folder}", folder)
        return path
    is_inside = _is_inside(path, folder) or _is_inside(path, place.checkpoints)
    if not (is_inside or is_own(folder)):
        raise ConfigError(f"run={folder}: its record.json names {path}, which is elsewhere; {trust.REMEDY}")
    return path


def _is_inside(path: str, place: str | Path) -> bool:
    return not is_url(str(place)) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(place))


def relative(place: RunPlace, path: str) -> str:
    """The name under which a path or URL is recorded, which stays right when the folder of the run is moved."""
    if is_url(path):
        return path
    folder, found = os.path.realpath(place.folder), os.path.realpath(os.path.dirname(path))
    found = os.path.join(found, os.path.basename(path))  # which may be a link to another checkpoint
    return os.path.relpath(found, folder) if _is_inside(found, folder) else found


def _record(place: RunPlace) -> dict[str, object]:
    folder = place.folder
    return read_record(folder) if (folder / run_files.RECORD).is_file() else {}


def _recorded(place: RunPlace) -> str | None:
    """The best checkpoint according to the record, unless it is damaged."""
    record = _record(place)
    if not record.get("best_by") or not record.get("best"):
        return None
    path = resolve(place, str(record["best"]))
    try:
        fault = find_damage(path)
    except CheckpointError as error:
        fault = str(error)
    if fault is None:
        return path
    if is_rank_zero():
        print(printable(f"warning: ckpt=best: {path}: {fault}; trying another checkpoint"), file=sys.stderr)
    return None
