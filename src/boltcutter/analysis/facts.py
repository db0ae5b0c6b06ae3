"""What the files of a run folder say, as plain values that an index can hold.

Folders may come from others: files are read by ``trust.read_bytes`` only, nothing in them is executed or contacted, and
entries of other types are left out. Records are replaced atomically, so a training is read without a lock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from boltcutter import run_files
from boltcutter.config.errors import one_line
from boltcutter.config.values import REFERENCE, flatten
from boltcutter.run import trust
from boltcutter.run.metrics import last_values

FILES = (run_files.RECORD, run_files.SEARCH, run_files.LABELS, run_files.METRICS, run_files.TRIALS)
MAX_TEXT = 1000  # characters of a setting whose references are resolved, as these may multiply
DEPTH = 4  # of folders between that of all runs and those of runs

Stamp = list[list[int] | None]  # of the record, the search and other files: modification time, size and inode
Facts = dict[str, Any]


class Place(NamedTuple):
    """The folder of a run, what changes with its files, and the folder of the search that it belongs to."""

    folder: str
    stamp: Stamp
    search: str | None = None


def scan(root: str) -> list[Place]:
    """Find the folders of runs and searches below a folder, which may be one itself."""
    found = list[Place]()
    _scan(root, DEPTH, None, found)
    for folder in trust.read_own_lines(Path(root, run_files.FOLDERS)):
        _scan(folder, 1, None, found)
    return found


def _scan(folder: str, depth: int, search: str | None, found: list[Place]) -> None:
    stamp = stamp_of(folder)
    if stamp:
        found.append(Place(folder, stamp, search))
    is_search = bool(stamp) and stamp[0] is None
    if (stamp and not is_search) or depth < 0:
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    except PermissionError:  # perhaps a run of somebody else, which is listed as unreadable
        found.append(Place(folder, [file_stamp(folder), None], search))
        return
    except OSError:
        return
    inside = folder if is_search else search
    for name in names:
        _scan(f"{folder}/{name}", 1 if is_search else depth - 1, inside, found)


def stamp_of(folder: str) -> Stamp:
    """What changes with the files of a run or search, whose contents are read after it; empty for another folder."""
    if record := file_stamp(f"{folder}/{run_files.RECORD}"):
        return [record, None, file_stamp(f"{folder}/{run_files.LABELS}"), file_stamp(f"{folder}/{run_files.METRICS}")]
    if search := file_stamp(f"{folder}/{run_files.SEARCH}"):
        return [None, search, file_stamp(f"{folder}/{run_files.LABELS}"), file_stamp(f"{folder}/{run_files.TRIALS}")]
    return []


def file_stamp(path: str) -> list[int] | None:
    """Modification time, size and inode of a file; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size, found.st_ino]


def read_facts(place: Place) -> Facts:
    """Read a run or a search; of one that cannot be read, the reason."""
    folder, is_search = Path(place.folder), place.stamp[0] is None
    file = run_files.SEARCH if is_search else run_files.RECORD
    changed = (place.stamp[is_search] or [0])[0] / 1e9
    try:
        record = trust.read_json(folder / file)
        facts = _of_search(folder, record) if is_search else _of_run(folder, record)
    except (OSError, ValueError, RecursionError) as error:
        facts = {"status": "unreadable", "reason": f"{file}: {one_line(error, 200)}"}
    facts["started"] = facts.get("started") or changed
    return facts | _labels(folder, facts.get("tags", []))


def _of_run(folder: Path, record: Mapping[str, Any]) -> Facts:
    attempts = [attempt for attempt in _list(record.get("attempts")) if isinstance(attempt, dict)]
    last: Mapping[str, Any] = attempts[-1] if attempts else {}
    settings, references = _settings(_dict(record.get("config")))
    settings["name"] = name = str(record.get("name") or settings.get("name") or folder.parent.name)
    seconds = [value for attempt in attempts if (value := _number(attempt.get("seconds"))) is not None]
    reason = str(last.get("reason") or "")
    metrics = _numbers(_dict(record.get("metrics")))
    after = record.get("best_after")
    if reason == "running" or not metrics:
        metrics |= _numbers(last_values(folder))
    elif isinstance(after, int):
        best = _numbers(last_values(folder, after - 1))
        metrics |= {name: value for name, value in best.items() if name in metrics}
    return {
        "name": name,
        "reason": reason,
        "started": _time(attempts[0].get("start")) if attempts else None,
        "seconds": sum(seconds) if seconds and math.isfinite(sum(seconds)) else None,
        "devices": _devices(last, _dict(record.get("hardware"))),
        "tags": [str(tag) for tag in _list(record.get("tags"))],
        "job": str(_dict(record.get("launch")).get("id") or ""),
        "is_job": bool(record.get("launch")) or not record.get("config"),
        "settings": settings,
        "references": references,
        "metrics": metrics | _numbers(_dict(record.get("test"))),
    }


def _of_search(folder: Path, record: Mapping[str, Any]) -> Facts:
    settings, _ = _settings({"search": _dict(record.get("settings"))})
    fixed = [values for values in _list(record.get("fixed")) if isinstance(values, dict)]
    common = [key for key in ("data.fold", "seed") if fixed and all(key in values for values in fixed)]
    is_sampled = bool(_dict(_dict(record.get("settings")).get("space")))
    repeated = "" if is_sampled or not common else common[0].removeprefix("data.")  # fold or seed
    pairs = [pair for pair in _list(record.get("metrics")) if isinstance(pair, list) and len(pair) == 2]
    return {
        "name": folder.parent.name,
        "reason": str(record.get("reason") or ("completed" if (folder / run_files.TRIALS).is_file() else "running")),
        "started": _time(record.get("created")),
        "settings": settings,
        "objectives": [[str(name), str(mode)] for name, mode in pairs],
        "trials": repeated or "trial",
        "repeats": bool(common),
    }


def _settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings by dotted key with references to other keys resolved, and the keys that are only such a reference.

    References to whole sections and paths in the run's own folder are left out. Environment variables are not read, as
    they could hold secrets.
    """
    flat = dict(flatten(config))
    found, references = dict[str, Any](), list[str]()
    for key, value in flat.items():
        text = value
        if isinstance(value, str) and "${" in value:
            if value.startswith(("${folder}", "${checkpoints}")):
                continue
            for _ in range(10):  # a reference may lead to another
                if not (isinstance(text, str) and "${" in text and len(text) < MAX_TEXT):
                    break
                if target := REFERENCE.fullmatch(text):
                    text = flat.get(target[1], flat)  # the mapping: there is no such key, or it is a section
                else:
                    text = REFERENCE.sub(lambda match: str(flat.get(match[1], match[0])), text)
            if text is flat:
                continue
            if REFERENCE.fullmatch(value):
                references.append(key)
        found[key] = text
    found.pop("folder", None)
    return found, references


def _labels(folder: Path, tags: list[str]) -> Facts:
    labels = read_labels(folder)
    kept = [tag for tag in tags if tag not in labels["untagged"]]
    return {"tags": list(dict.fromkeys([*kept, *labels["tags"]])), "note": labels["note"]}


def read_labels(folder: Path) -> dict[str, Any]:
    """The tags that a user has added, the tags of the record that were removed, and the note."""
    labels: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        labels = trust.read_json(folder / run_files.LABELS)
    lists = {name: [str(tag) for tag in _list(labels.get(name))] for name in ("tags", "untagged")}
    return {**lists, "note": str(labels.get("note") or "")}


def _devices(attempt: Mapping[str, Any], hardware: Mapping[str, Any]) -> str:
    """Number and kind of devices, such as ``8 × NVIDIA H100``."""
    kind, gpus = attempt.get("device"), _list(hardware.get("gpus"))
    if not kind:
        return ""
    return f"{attempt.get('devices') or 1} × {gpus[0] if kind == 'cuda' and gpus else str(kind).upper()}"


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found = {str(name): _number(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> float | None:
    with suppress(TypeError, ValueError, OverflowError):
        return float(value)
    return None


def _time(text: Any) -> float | None:
    with suppress(TypeError, ValueError, OverflowError):
        found = datetime.fromisoformat(text).timestamp()
        return found if math.isfinite(found) else None
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
