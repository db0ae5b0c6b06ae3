"""Runs on object storage."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from boltcutter.checkpoint.atomic import write_text
from boltcutter.checkpoint.storage import CheckpointError, resolve_filesystem, store_errors
from boltcutter.config.errors import ConfigError


def publish(folder: Path, url: str, names: Iterable[str]) -> None:
    """Copy files of a run to its URL.

    Args:
        folder: Folder of the run on this machine.
        url: URL of the run.
        names: Files, relative to the folder.

    Raises:
        ConfigError: The storage cannot be reached.
    """
    try:
        with store_errors(url):
            store, place = resolve_filesystem(url)
            for name in names:
                store.makedirs(f"{place}/{name}".rpartition("/")[0], exist_ok=True)
                store.put_file(str(folder / name), f"{place}/{name}")
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def fetch(url: str, folder: Path) -> list[str]:
    """Download a run, keeping how it was launched; files of the same size and of a later time here are left alone.

    Args:
        url: URL of the run.
        folder: Folder on this machine.

    Returns:
        Names of the files that were downloaded.

    Raises:
        ConfigError: The storage cannot be reached, or has no such run.
    """
    names = []
    launch = json.loads(file.read_text()).get("launch") if (file := folder / "record.json").is_file() else None
    try:
        with store_errors(url):
            store, place = resolve_filesystem(url)
            found = store.find(place, detail=True)
            if f"{place}/record.json" not in found:
                raise ConfigError(f"{url}: no run there (record.json is missing); give the URL of a run")
            for path, facts in found.items():
                name = path[len(place) + 1 :]
                target = folder / name
                known = target.stat() if target.is_file() else None
                if known and known.st_size == facts["size"] and known.st_mtime >= store.modified(path).timestamp():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                store.get_file(path, str(target))
                names.append(name)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if launch is not None:
        write_text(file, json.dumps(json.loads(file.read_text()) | {"launch": launch}, indent=2) + "\n")
    return names
