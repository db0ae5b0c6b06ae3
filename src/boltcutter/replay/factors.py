"""What differs between the records of two runs, and which of it may change a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from boltcutter.config.settings import Settings
from boltcutter.run.compare import has_no_effect, setting_differences
from boltcutter.run.differences import record_differences
from boltcutter.run.inputs import PYTHON_PATH

LABELS = {"code": "code", "library": "packages", "package": "packages", "python": "packages"}
LABELS |= {"variable": "environment", "file": "data", "data": "data"}
THREADS = "threads"
WITHOUT_EFFECT = ("memory_gib", "cores")  # of the hardware
TEXTS = (".md", ".rst", ".txt")  # files that no training runs
CHOICES = "choices."  # the names of options, whose values are settings of their own


@dataclass
class Factor:
    """A difference of two records that one replay can take from the other run.

    Args:
        kind: ``setting``, ``code``, ``packages``, ``threads``, ``hardware``, ``environment`` or ``data``.
        lines: The difference, as ``compare`` prints it.
        keys: Of the settings, or names of the environment variables.
        matters: Whether it may change a step.
        removes: Whether the first difference is gone when A has it from B; None: it was not tried.
        left: The first difference that is left then; empty if A is equal to B.
    """

    kind: str
    lines: list[str]
    keys: list[str] = field(default_factory=list)
    matters: bool = True
    removes: bool | None = None
    left: str = ""

    def __str__(self) -> str:
        more = f" and {len(self.lines) - 1} more" if len(self.lines) > 1 else ""
        return f"{' '.join(self.lines[0].split())}{more}"


def find_factors(
    cfgs: tuple[Settings, Settings],
    folders: tuple[Path, Path],
    records: tuple[Mapping[str, Any], ...],
    root: Path,
) -> list[Factor]:
    """What differs between two runs; what cannot change a step is last.

    Args:
        cfgs: Their configurations.
        folders: Of both runs.
        records: What their ``record.json`` have.
        root: Of the project.
    """
    found = [*_settings(cfgs)]
    others: dict[str, Factor] = {}
    for line in record_differences(folders, tuple(records), root):
        label, _, text = line.partition(" ")
        name = text.split()[0]
        kind = LABELS.get(label, THREADS if name == THREADS else "hardware")
        key, keys = kind if kind != "hardware" else line, list[str]()
        if label == "python" and name != "version":  # a sitecustomize is found by PYTHONPATH
            kind, key, keys = "environment", PYTHON_PATH, [PYTHON_PATH]
        elif kind == "environment":
            key, keys = line, [name]
        matters = not (kind == "hardware" and name in WITHOUT_EFFECT) and not (kind == "code" and _only_texts(line))
        if key in others:
            others[key].lines.insert(0 if key == PYTHON_PATH else len(others[key].lines), line)
            others[key].matters |= matters
        else:
            others[key] = Factor(kind, [line], keys, matters)
    found += others.values()
    data = [record.get("data") for record in records]
    if data[0] != data[1]:
        line = f"data      fingerprint {data[0]} → {data[1]}"
        if "data" in others:  # the same data, seen in another way
            others["data"].lines.append(line)
        else:
            found.append(Factor("data", [line]))
    return sorted(found, key=lambda factor: not factor.matters)


def _settings(cfgs: tuple[Settings, Settings]) -> Iterator[Factor]:
    """Each setting that differs; those of an option whose class differs together."""
    lines = {line.partition("=")[0]: line for line in setting_differences(cfgs[0].written, cfgs[1].written)}
    classes = [key.removesuffix("._target_") for key in lines if key.endswith("._target_")]
    groups: dict[str, list[str]] = {}
    for key in lines:
        owner = next((name for name in classes if key.removeprefix(CHOICES) == name or key.startswith(f"{name}.")), key)
        groups.setdefault(owner, []).append(key)
    for owner, keys in groups.items():
        first = sorted(keys, key=lambda key: (not key.endswith("._target_"), key.startswith(CHOICES)))
        matters = not all(has_no_effect(lines[key]) or key.startswith(CHOICES) for key in keys)
        yield Factor("setting", [f"setting   {lines[key]}" for key in first], [owner], matters)


def _only_texts(line: str) -> bool:
    """Whether all files that a line of ``record_differences`` names are documentation or tests."""
    _, colon, files = line.partition(": ")
    if not colon or " more" in files:
        return False
    paths = [PurePosixPath(name) for name in files.split(", ")]
    return all(path.suffix in TEXTS or path.parts[0] in ("docs", "tests") for path in paths)
