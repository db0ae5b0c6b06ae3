"""Find the newest or the best checkpoint of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from boltcutter.checkpoint.load import find_damage, read_metadata
from boltcutter.checkpoint.storage import CheckpointError, is_url, resolve_filesystem, store_errors
from boltcutter.config.errors import ConfigError, hint, printable
from boltcutter.environment.process import is_rank_zero


def find_newest(place: str | Path, warn: Callable[[str], None] = print) -> str | None:
    """Find the valid checkpoint named ``last…`` with the largest step, or else a ``best…``.

    ``warn`` is called with a warning for each damaged file, and if a best checkpoint is used.

    Raises:
        CheckpointError: The storage at the URL cannot be reached.
    """
    # By step, since modification times may have a resolution of a second. Unreadable files come first and are reported.
    if newest := _first_valid(_files(place, "last"), _step, warn):
        return newest
    if best := _first_valid(_files(place, "best"), _step, warn):
        warn(printable(f"warning: {place} has no valid last checkpoint; using {best}"))
    return best


def find_best(place: str | Path, warn: Callable[[str], None] = print) -> str | None:
    """Find the valid checkpoint named ``best…`` with the best score, or else the newest, as ``find_newest`` does."""

    def score(found: Mapping[str, Any]) -> float:
        known = found.get("best", {"mode": "max", "score": -math.inf})
        return float(known["score"] if known["mode"] == "max" else -known["score"])

    return _first_valid(_files(place, "best"), score, warn) or _first_valid(_files(place, "last"), _step, warn)


def _step(found: Mapping[str, Any]) -> float:
    return float(found.get("global_step", 0))


def list_names(place: str | Path) -> list[str]:
    """List the file names of all checkpoints in a folder or URL."""
    return sorted(path.rpartition("/")[2] for path in _files(place))


def list_folders(place: str | Path) -> list[str]:
    """List the checkpoints that are folders, as written by DeepSpeed and by FSDP's ``state_dict_type="sharded"``."""
    with store_errors(place):
        return [file for file in _files(place) if (found := resolve_filesystem(file))[0].isdir(found[1])]


def _files(place: str | Path, start: str = "") -> list[str]:
    """List paths or URLs of checkpoints whose names begin with ``start``, the most recently written first."""
    with store_errors(place):
        store, folder = resolve_filesystem(place)
        try:
            listed = list(map(str, store.ls(folder, detail=False)))  # not glob: a folder's name may hold [, * or ?
        except FileNotFoundError as error:
            # If the missing path is not the folder, it is the bucket. In the message, quotes in the path are escaped,
            # and Cloud Storage has its own form of URLs.
            key = folder.strip("/").partition("/")[2] or folder
            if key not in unquote(f"{error.filename} {error}"):
                raise
            return []
        named = [file for file in listed if re.fullmatch(rf"{start}.*\.ckpt", file.rpartition("/")[2], re.S)]
        there = [file for file in named if is_url(place) or store.exists(file)]  # a link may lead nowhere
        found = sorted(there, key=store.modified, reverse=True)
        # Not unstrip_protocol: it loses the account of abfss://container@account.dfs.core.windows.net, and returns
        # another name of the protocol than Lightning compares with.
        return [f"{str(place).rstrip('/')}/{file.rpartition('/')[2]}" if is_url(place) else file for file in found]


def _first_valid(
    paths: list[str], score: Callable[[Mapping[str, Any]], float], warn: Callable[[str], None]
) -> str | None:
    def known(path: str) -> float:
        try:
            return score(read_metadata(path))
        except (CheckpointError, ValueError, TypeError, LookupError, OverflowError):  # not written by this library
            return math.inf

    for path in sorted(paths, key=known, reverse=True) if len(paths) > 1 else paths:
        if (fault := find_damage(path)) is None:
            return path
        warn(printable(f"warning: {path}: {fault}; trying another checkpoint"))
    return None


def find_checkpoint(folder: str, which: str) -> str:
    """Find a checkpoint of a run.

    Args:
        folder: Folder of the run's checkpoints; a path or a URL.
        which: ``best``, ``last``, the name of a checkpoint of the run, a path or a URL.

    Raises:
        ConfigError: The checkpoint does not exist, or is damaged.
    """
    try:
        known = list_names(folder)
        if which in ("best", "last"):
            find = find_best if which == "best" else find_newest
            found = find(folder, print if is_rank_zero() else lambda text: None)
        else:
            found = f"{folder}/{which}" if which in known else which
        fault = find_damage(found) if found else "not found"
    except CheckpointError as error:
        raise ConfigError(f"ckpt={which}: {error}") from error
    if found is None or fault:
        names = ("best", "last", *known)
        near = "" if which in names else hint(which, names)
        raise ConfigError(f"ckpt={which}: {fault}{near} (checkpoints of the run: {', '.join(known) or 'none yet'})")
    return found
