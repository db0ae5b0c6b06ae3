"""What differs in the records of two runs besides their settings: code, packages, hardware and inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from boltcutter.run import trust
from boltcutter.run.inputs import input_differences
from boltcutter.run.ledger import ledger_path, read_ledger
from boltcutter.run.lineage import changed_files

PATCHED = re.compile(rb"^diff --git (?:\"?a/.*?)\"? \"?b/(.*?)\"?$", re.MULTILINE)
MAX_NAMED = 5  # files in a line
HARDWARE = ("threads", "system", "cpu", "cores", "gpus", "cuda", "memory_gib")  # what changes rounding first


def record_differences(folders: tuple[Path, Path], records: tuple[Mapping[str, Any], ...], root: Path) -> Iterator[str]:
    """Describe each difference, what rather changes results first.

    Args:
        folders: Of both runs.
        records: What their ``record.json`` have.
        root: Of the project, in whose repository the files are looked up that differ between two commits.
    """
    for name, label, patch in (("git", "code", "code.patch"), ("library", "library", "library.patch")):
        here, there = (record.get(name) or {} for record in records)
        if here.get("commit") != there.get("commit"):
            files = changed_files(root, here.get("commit"), there.get("commit")) if name == "git" else None
            yield f"{label:9} commit {here.get('commit')} → {there.get('commit')}{_named(files)}"
        if here.get("changes") != there.get("changes"):
            yield f"{label:9} uncommitted changes differ{_named(_patched(folders, patch))}"
        if here.get("version") != there.get("version"):
            yield f"{label:9} version {here.get('version')} → {there.get('version')}"
    yield from _mapping("package", *(record.get("packages") or {} for record in records))
    yield from _mapping("python", *({"version": record.get("python")} for record in records))
    here, there = (record.get("hardware") or {} for record in records)
    yield from _mapping("hardware", *({name: each.get(name) for name in HARDWARE} for each in (here, there)))
    attempts = [(record.get("attempts") or [{}])[-1] for record in records]
    yield from _mapping("hardware", *({name: each.get(name) for name in ("devices", "device")} for each in attempts))
    for kind, name, ours, theirs in input_differences(*records):
        yield f"{kind:9} {name} {_shown(ours)} → {_shown(theirs)}"
    if (number := other_batch(*records)) and _has_equal_samples(*folders):
        yield f"data      batch {number} has another content"


def other_batch(first: Mapping[str, Any], second: Mapping[str, Any]) -> int | None:
    """Number of the first batch whose content is another one, of those that both records have; None if none is."""
    here, there = (record.get("batches") for record in (first, second))
    if not (isinstance(here, dict) and isinstance(there, dict)):
        return None
    common = (name for name in here.keys() & there.keys() if re.fullmatch("[0-9]{1,18}", name))
    numbers = [name for name in common if here[name] != there[name]]
    return min(map(int, numbers), default=None)


def _has_equal_samples(*folders: Path) -> bool:
    """Whether the first steps have samples of equal indices, so that contents do not differ by these."""
    ledgers = [read_ledger(ledger_path(folder)) for folder in folders]
    first = [int(ledger.rows["samples"][0]) for ledger in ledgers if ledger is not None and ledger.last]
    return len(set(first)) < 2


def _mapping(label: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            yield f"{label:9} {name} {_shown(here.get(name))} → {_shown(there.get(name))}"


def _shown(value: Any) -> Any:
    return "absent" if value is None else value


def _patched(folders: tuple[Path, Path], name: str) -> list[str]:
    """Files whose uncommitted changes differ."""
    here, there = (_by_file(_read(folder / name)) for folder in folders)
    return sorted(file for file in here.keys() | there.keys() if here.get(file) != there.get(file))


def _read(patch: Path) -> bytes:
    """The content of a patch; nothing without one, or if it is large or no ordinary file, as of somebody else."""
    with suppress(OSError, ValueError):
        return trust.read_bytes(patch)
    return b""


def _by_file(patch: bytes) -> dict[str, bytes]:
    found = [*PATCHED.finditer(patch)]
    ends = [*(match.start() for match in found[1:]), len(patch)]  # one more than there are files, of an empty patch
    return {m[1].decode(errors="replace"): patch[m.start() : end] for m, end in zip(found, ends, strict=False)}


def _named(files: list[str] | None) -> str:
    if not files:
        return ""
    more = f" and {len(files) - MAX_NAMED} more" if len(files) > MAX_NAMED else ""
    return f": {', '.join(files[:MAX_NAMED])}{more}"
