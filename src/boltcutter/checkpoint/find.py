"""Find the newest or the best checkpoint in folders, by what the files say and not by their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from boltcutter.checkpoint.load import find_damage, read_metadata
from boltcutter.checkpoint.storage import CheckpointError, is_url, resolve_filesystem, store_errors
from boltcutter.config.errors import printable


def find_newest(*places: str | Path, warn: Callable[[str], None] = print, resumes: bool = False) -> str | None:
    """Find the valid checkpoint that a run saved last, whatever its name.

    That is the one of the latest attempt, and in it of the largest step: an attempt may have been resumed from an
    earlier checkpoint, while files of later steps are left.

    Args:
        places: Folders or URLs.
        warn: Called with a warning for each damaged file.
        resumes: Whether training continues from it, so that one of weights only is the last choice.

    Raises:
        CheckpointError: The storage at a URL cannot be reached.
    """

    def key(found: Mapping[str, Any]) -> tuple[float, ...]:
        saved = found.get("boltcutter") or {}
        numbers = (saved.get("attempt", 0), found.get("global_step", 0), saved.get("save", 0))
        return (not resumes or "optimizer_states" in found, *map(float, numbers))

    return _first_valid([file for place in places for file in _files(place)], key, warn)


def find_best_by_score(*places: str | Path, warn: Callable[[str], None] = print) -> str | None:
    """Find the valid checkpoint with the best score, of those that have one, as ``BestCheckpoint`` saves it."""

    def score(found: Mapping[str, Any]) -> tuple[float, ...]:
        known = found.get("best", {"mode": "max", "score": -math.inf})
        value = float(known["score"] if known["mode"] == "max" else -known["score"])
        return (value if math.isfinite(value) else -math.inf,)  # the metric was NaN

    files = [file for place in places for file in _files(place)]
    return _first_valid(files, score, warn, least=(-math.inf,))


def list_names(place: str | Path) -> list[str]:
    """List the file names of all checkpoints in a folder or URL."""
    return sorted(path.rpartition("/")[2] for path in _files(place))


def list_folders(place: str | Path) -> list[str]:
    """List the checkpoints that are folders, as written by DeepSpeed and by FSDP's ``state_dict_type="sharded"``."""
    with store_errors(place):
        return [file for file in _files(place) if (found := resolve_filesystem(file))[0].isdir(found[1])]


def _files(place: str | Path) -> list[str]:
    """List paths or URLs of checkpoints, the most recently written first."""
    with store_errors(place):
        store, folder = resolve_filesystem(place)
        try:
            listed = list(map(str, store.ls(folder, detail=False)))  # not glob: a folder's name may hold [, * or ?
        except FileNotFoundError as error:
            # On a storage, if the missing path is not the folder, it is the bucket. In the message, quotes in the path
            # are escaped, and Cloud Storage has its own form of URLs.
            key, text = folder.strip("/").partition("/")[2] or folder, f"{error.filename} {error}"
            if is_url(place) and key not in text and key not in unquote(text):
                raise
            return []
        named = [file for file in listed if file.endswith(".ckpt")]
        there = [file for file in named if is_url(place) or store.exists(file)]  # a link may lead nowhere
        found = sorted(there, key=store.modified, reverse=True)
        # Not unstrip_protocol: it loses the account of abfss://container@account.dfs.core.windows.net, and returns
        # another name of the protocol than Lightning compares with.
        return [f"{str(place).rstrip('/')}/{file.rpartition('/')[2]}" if is_url(place) else file for file in found]


def _first_valid(
    paths: list[str],
    key: Callable[[Mapping[str, Any]], tuple[float, ...]],
    warn: Callable[[str], None],
    least: tuple[float, ...] | None = None,
) -> str | None:
    """The valid file with the largest key, if that is above ``least``; damaged ones, which have none, come first."""

    def known(path: str) -> tuple[float, ...]:
        try:
            return key(read_metadata(path))
        except CheckpointError:
            return (math.inf,) if find_damage(path) else (-math.inf,)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):  # not written by this library
            return (-math.inf,)

    is_replaced = False
    keys = {path: known(path) for path in paths} if len(paths) > 1 or least else dict.fromkeys(paths, (0.0,))
    for path in sorted(paths, key=keys.__getitem__, reverse=True):
        if least and keys[path] <= least:
            break
        if (fault := find_damage(path)) is None:
            if is_replaced:
                warn(printable(f"warning: using {path} instead"))
            return path
        is_replaced = True
        warn(printable(f"warning: {path}: {fault}; trying another checkpoint"))
    return None
