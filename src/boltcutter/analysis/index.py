"""A cache of what run folders say, so that thousands of runs are listed in a second.

``<runs>/.boltcutter/index-<user id>.json`` has an entry for each folder, which is used only if modification time, size
and inode of the files are those of the entry. It is written atomically and signed by this user: without it, or with one
that is damaged, of another version or of somebody else, all folders are read again. Most settings are the same in most
runs, so of each run only those that differ from the first run with the same keys are stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from boltcutter import files
from boltcutter.analysis.facts import Facts, Place, read_facts, scan
from boltcutter.checkpoint.atomic import write_text
from boltcutter.environment import user_key
from boltcutter.run import trust

FOLDER, FILE, VERSION = ".boltcutter", f"index-{os.getuid()}.json", 4
MIN_CHANGED = 0.01  # of all runs, below which reading them again is faster than writing the index


def read_indexed(root: str) -> list[tuple[Place, Facts]]:
    """Read all runs below a folder, from the index where that is current."""
    path = Path(root, FOLDER, FILE)
    known, places = _load(path), scan(root)
    found, changed = refresh(places, known)
    changed = max(changed, len(known) - (len(places) - changed))  # or removed
    if changed > MIN_CHANGED * len(found):
        with suppress(OSError):  # a folder that this user cannot write
            path.parent.mkdir(exist_ok=True)
            if not files.foreign_link(path.parent, below=root):
                write_text(path, _dump(found))
    return found


def refresh(places: Sequence[Place], known: Mapping[str, Facts]) -> tuple[list[tuple[Place, Facts]], int]:
    """The facts of places: those that are known where the files have not changed; and the number of others."""
    found, changed = list[tuple[Place, Facts]](), 0
    for place in places:
        facts = known.get(place.folder)
        if facts is None or facts["stamp"] != place.stamp:
            facts, changed = read_facts(place) | {"stamp": place.stamp}, changed + 1
        found.append((place, facts))
    return found, changed


def _load(path: Path) -> dict[str, Facts]:
    """The entries of the index by folder; none if it cannot be used."""
    known: dict[str, Facts] = {}
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        header, _, body = trust.read_bytes(path).partition(b"\n")
        if not user_key.is_signed(_digest(body), header.decode()):
            return {}
        index = json.loads(body)
        bases, names = index["bases"], index["names"]
        for folder, facts, base, changed, references, metrics, values in index["runs"]:
            facts["settings"] = {**bases[base], **changed}
            facts["references"] = names[references]
            facts["metrics"] = dict(zip(names[metrics], values, strict=True))
            known[folder] = facts
    return known


def _dump(found: Sequence[tuple[Place, Facts]]) -> str:
    keys, bases = dict[tuple[str, ...], int](), list[dict[str, Any]]()
    names, runs = dict[tuple[str, ...], int](), []
    for place, facts in found:
        settings, metrics = facts.get("settings", {}), facts.get("metrics", {})
        number = keys.setdefault(tuple(settings), len(bases))
        if number == len(bases):
            bases.append(settings)
        base = bases[number]
        changed = {
            key: value
            for key, value in settings.items()
            if value != base[key] or (type(value) is not str and repr(value) != repr(base[key]))  # as True equals 1
        }
        lists = [names.setdefault(tuple(each), len(names)) for each in (facts.get("references", ()), metrics)]
        rest = {name: value for name, value in facts.items() if name not in ("settings", "references", "metrics")}
        runs.append([place.folder, rest, number, changed, *lists, [*metrics.values()]])
    body = json.dumps({"bases": bases, "names": [*names], "runs": runs}, separators=(",", ":"))
    return f"{user_key.sign(_digest(body.encode()))}\n{body}"


def _digest(body: bytes) -> str:
    return f"runs {VERSION} {hashlib.sha256(body).hexdigest()}"
