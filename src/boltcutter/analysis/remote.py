"""Runs on object storage: what is read of them is downloaded where it has changed."""

from __future__ import annotations

from pathlib import Path

from boltcutter.analysis.facts import DEPTH, FILES
from boltcutter.environment import lease
from boltcutter.run.remote.store import run_store
from boltcutter.run.remote.transfer import download, storage_errors

INDEX = "index-of-runs.json"  # beside the local folder


def mirror(url: str) -> Path:
    """Download the records, metrics and labels of all runs at a URL, as far as they have changed, to a local folder."""
    folder = run_store().locate(url)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with storage_errors(f"runs={url}", url):
        _, removed = download(url.rstrip("/"), folder, folder.with_name(INDEX), is_read)
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    return folder


def is_read(name: str) -> bool:
    """Whether an object is a file of a run that is listed, by its name below the folder of all runs."""
    *folders, file = name.split("/")
    is_inside = "\\" not in name and all(part and not part.startswith(".") for part in folders)
    return is_inside and len(folders) <= DEPTH + 2 and "code" not in folders and file in (*FILES, lease.FILE)
