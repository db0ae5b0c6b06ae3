"""Which checkpoint of a run is the newest, or the best."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from boltcutter.loading import find_damage, read_metadata
from boltcutter.storage import CheckpointError, is_url, resolve_filesystem, store_errors


def find_newest(place: str | Path, say: Callable[[str], None] = print) -> str | None:
    """The whole checkpoint named ``last…`` that has come furthest; a damaged one is passed over, and told.

    Args:
        place: A folder, or a URL.
        say: Told of each damaged file.

    Raises:
        CheckpointError: The store behind the URL cannot be reached.
    """
    # By steps, since a store's clock may tell only seconds. What cannot be read is shown first, to be passed over.
    return _first_whole(_files(place, "last"), lambda found: found.get("global_step", 0), say)


def find_best(place: str | Path, say: Callable[[str], None] = print) -> str | None:
    """The whole checkpoint named ``best…`` with the best score; without one the newest. As ``newest`` otherwise."""

    def score(found: Mapping[str, Any]) -> float:
        known = found.get("best", {"mode": "max", "score": -math.inf})
        return float(known["score"] if known["mode"] == "max" else -known["score"])

    return _first_whole(_files(place, "best"), score, say) or find_newest(place, say)


def list_names(place: str | Path) -> list[str]:
    """Of all checkpoints there."""
    return sorted(path.rpartition("/")[2] for path in _files(place))


def list_folders(place: str | Path) -> list[str]:
    """Checkpoints that are folders, as DeepSpeed writes them and FSDP's state_dict_type=sharded."""
    with store_errors(place):
        return [file for file in _files(place) if (found := resolve_filesystem(file))[0].isdir(found[1])]


def _files(place: str | Path, start: str = "") -> list[str]:
    """Paths or URLs of checkpoints whose names start so, the last written first."""
    with store_errors(place):
        store, folder = resolve_filesystem(place)
        try:
            listed = list(map(str, store.ls(folder, detail=False)))  # not glob: a folder's name may hold [, * or ?
        except FileNotFoundError as error:
            # Where the folder is not what is missing, it is the bucket. The text has a path with quotes escaped.
            if folder.strip("/") not in f"{error.filename} {error}":
                raise
            return []
        named = [file for file in listed if re.fullmatch(rf"{start}.*\.ckpt", file.rpartition("/")[2], re.S)]
        found = sorted(named, key=store.modified, reverse=True)
        return [str(store.unstrip_protocol(file)) if is_url(place) else str(file) for file in found]


def _first_whole(
    paths: list[str], merit: Callable[[Mapping[str, Any]], float], say: Callable[[str], None]
) -> str | None:
    def known(path: str) -> float:
        try:
            return merit(read_metadata(path))
        except CheckpointError:
            return math.inf

    for path in sorted(paths, key=known, reverse=True) if len(paths) > 1 else paths:
        fault = find_damage(path)
        if fault is None:
            return path
        say(f"warning: {path}: {fault}; taking another")
    return None
