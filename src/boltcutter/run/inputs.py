"""What a run depends on besides settings and code: environment variables and files that the user's code reads."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from boltcutter.config.redaction import MASK, find_secrets, hide_passwords, is_secret_file, looks_secret
from boltcutter.data.files import sampled_hash
from boltcutter.environment.reads import Reads, kind_of
from boltcutter.project import private_variables
from boltcutter.run.lineage import SNAPSHOT

MAX_VALUE = 1000  # characters of a variable
MAX_FILES = 200  # which are recorded one by one
HASH_SECONDS = 0.02  # for the content of all files
UNUSED = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib/")  # of the system
KINDS = {"variable": "environment variable", "python": "Python's", "file": "file"}
PYTHON_PATH = "PYTHONPATH"
HASH_SEED = "PYTHONHASHSEED"  # the order of sets, which Python reads for the user's code
CUSTOM = ("sitecustomize", "usercustomize")  # modules that Python imports at each start


def describe_inputs(reads: Reads, folder: Path) -> dict[str, Any]:
    """What was read, as entries of a record.

    Args:
        reads: What the user's code has read.
        folder: Of the run, whose own files are left out.
    """
    root = Path.cwd()
    found = dict.fromkeys([*reads.files, *_open_files(), *_modules(root)])
    paths = [path for path in found if _is_input(path, folder)]
    return {"environment": describe_environment(reads), "files": _describe_files(paths, root)}


def describe_environment(reads: Reads) -> dict[str, Any]:
    """Environment variables that were read, and by which Python finds modules."""
    found = reads.variables | ({HASH_SEED: seed} if (seed := os.environ.get(HASH_SEED)) else {})
    variables = {name: describe_variable(name, value) for name, value in sorted(found.items())}
    python = {PYTHON_PATH: describe_variable(PYTHON_PATH, os.environ.get(PYTHON_PATH))}
    for name in CUSTOM:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and (content := _content(Path(file))) is not None:
            python[name] = f"{file} {content}"
    return {"variables": variables, "python": python}


def describe_variable(name: str, value: str | None) -> str | None:
    """The value of a variable as it may be recorded: masked if it is, or may be, a secret."""
    if value is None:
        return None
    is_secret = looks_secret(name) or name in private_variables or any(True for _ in find_secrets({name: value}))
    return MASK if value and is_secret else hide_passwords(value)[:MAX_VALUE]


def recorded_variables(record: Mapping[str, Any]) -> dict[str, str | None]:
    """Variables of a record whose value it has: not those that are secrets, or too long."""
    found = _dict(_dict(record.get("environment")).get("variables"))
    return {name: value for name, value in found.items() if _is_whole(value)}


def recorded_path(record: Mapping[str, Any]) -> str | None:
    """``PYTHONPATH`` of a record, empty if it was not set; None if the record has no value of it."""
    found = _dict(_dict(record.get("environment")).get("python"))
    value = found.get(PYTHON_PATH)
    return (value or "") if PYTHON_PATH in found and _is_whole(value) else None


def _is_whole(value: Any) -> bool:
    return value is None or (isinstance(value, str) and MASK not in value and len(value) < MAX_VALUE)


def input_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """What differs in the inputs of two records: kind, name, and both values; nothing if a record has none.

    A variable or file that only one of them has read is left out of neither.
    """
    here, there = (_dict(record.get("environment")) for record in (first, second))
    if here and there:
        for part, kind in (("variables", "variable"), ("python", "python")):
            ours, theirs = _dict(here.get(part)), _dict(there.get(part))
            for name in sorted(ours.keys() | theirs.keys()):
                values = [
                    _variable(found, name) if part == "variables" else found.get(name) for found in (ours, theirs)
                ]
                if values[0] != values[1]:
                    yield kind, name, *values
    files = [record.get("files") for record in (first, second)]
    if isinstance(files[0], dict) and isinstance(files[1], dict):
        yield from _file_differences(files[0], files[1])


def changed_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines on what both have read, and that is not as it was."""
    return [
        f"{KINDS[kind]} {name} is {current or 'unset'}, was {was or 'unset'}"
        for kind, name, was, current in input_differences(before, now)
        if "not read" not in (was, current)
    ]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _variable(found: Mapping[str, Any], name: str) -> Any:
    if found.get(name) is None:
        return "unset" if name in found or name == HASH_SEED else "not read"
    return repr(found[name])


def _file_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for name, (ours, theirs) in _paired(*map(_each, (first, second))).items():
        if ours is None or theirs is None:
            yield "file", name, "not read" if ours is None else "read", "not read" if theirs is None else "read"
        elif ours.get("size") != theirs.get("size"):
            yield "file", name, f"{ours.get('size'):,} bytes", f"{theirs.get('size'):,} bytes"
        elif ours.get("content") and theirs.get("content"):
            if ours["content"] != theirs["content"]:
                yield "file", name, f"content {ours['content']}", f"content {theirs['content']}"
        elif ours.get("time") != theirs.get("time"):
            yield "file", name, f"of {ours.get('time')}", f"of {theirs.get('time')}"
    if first.get("all") != second.get("all") and {first.get("count"), second.get("count")} != {None}:
        yield "file", "all", f"{first.get('count')} files", f"{second.get('count')} files of other names or sizes"


def _each(found: Mapping[str, Any]) -> dict[str, Any]:
    """The files that a record has one by one; others may have written it."""
    each = _dict(found.get("each")).items()
    return {name: facts for name, facts in each if isinstance(facts, dict) and isinstance(facts.get("size"), int)}


def _paired(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Files by path, and those that are elsewhere now by their names."""
    found = {name: (first.get(name), second.get(name)) for name in sorted(first.keys() | second.keys())}
    named = dict[str, list[str]]()
    for name in found:
        named.setdefault(os.path.basename(name), []).append(name)
    for same in named.values():
        gone = [name for name in same if found[name][1] is None]
        moved = [name for name in same if found[name][0] is None]
        if len(same) == 2 and len(gone) == len(moved) == 1:
            found[gone[0]] = found[gone[0]][0], found.pop(moved[0])[1]
    return found


def _describe_files(paths: list[str], root: Path) -> dict[str, Any]:
    """Size, time and, of those for which there is time, a hash of some blocks of each file."""
    begin, each, total = time.perf_counter(), dict[str, Any](), hashlib.sha256()
    sizes = []
    for path in paths:
        with suppress(OSError):
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode):
                name = os.path.relpath(path, root) if Path(path).is_relative_to(root) else path
                sizes.append((os.path.basename(path), found.st_size))
                if len(each) < MAX_FILES:
                    each[name] = {"size": found.st_size, "time": _time(found.st_mtime)}
                    if time.perf_counter() - begin < HASH_SECONDS:
                        each[name]["content"] = _content(Path(path))
    if len(sizes) <= MAX_FILES:
        return {"each": each}
    total.update(repr(sorted(sizes)).encode())
    return {"each": each, "count": len(sizes), "all": total.hexdigest()[:16]}


def _content(path: Path) -> str | None:
    with suppress(OSError):
        return sampled_hash(path, with_time=False).hex()[:16]
    return None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def _is_input(path: str, folder: Path) -> bool:
    return not (is_secret_file(path) or path.startswith(UNUSED) or Path(path).is_relative_to(folder.absolute()))


def _modules(root: Path) -> Iterator[str]:
    """Files of the user's modules that are not in the project's repository, so that no commit has their content."""
    places = [place for place in (root, *root.parents) if (place / ".git").exists() or (place / SNAPSHOT).exists()]
    known = tuple(f"{place}{os.sep}" for place in (sys.prefix, *places))
    for name, module in [*sys.modules.items()]:
        file = (getattr(module, "__dict__", None) or {}).get("__file__")
        if isinstance(file, str) and not file.startswith(known) and name not in CUSTOM and kind_of(file) == "user":
            yield os.path.abspath(file)


def _open_files() -> Iterator[str]:
    """Files that are open for reading, or mapped into memory, which C code may have opened."""
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{number}")
                with open(f"/proc/self/fdinfo/{number}") as file:
                    flags = next((line.split()[1] for line in file if line.startswith("flags")), "1")
                if path.startswith("/") and int(flags, 8) & os.O_ACCMODE == os.O_RDONLY:
                    yield path
    with suppress(OSError), open("/proc/self/maps") as file:
        mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/" in line}
        prefixes = (sys.prefix, sys.base_prefix)
        yield from (path for path in sorted(mapped) if not path.startswith(prefixes) and ".so" not in path)
