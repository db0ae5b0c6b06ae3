"""The card of an export: what the file expects and returns, how good it is, and where it comes from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from boltcutter.checkpoint.atomic import write_text
from boltcutter.environment import user_key
from boltcutter.export import runner
from boltcutter.export.program import PAST, PRESENT, Program
from boltcutter.export.settings import Format
from boltcutter.export.verify import Result
from boltcutter.formatting import to_json
from boltcutter.project import Project
from boltcutter.run.folder import read_record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREPROCESSING = "preprocessing.json"


def write_card(
    folder: Path, name: str, form: Format, program: Program, data: Any, *, run: Path, checkpoint: str, project: Project
) -> None:
    """Write ``card.json``, and ``preprocessing.json`` with the statistics of the data module."""
    statistics: Mapping[str, Any] = getattr(data, "statistics", {})
    write_text(folder / PREPROCESSING, to_json(statistics) + "\n")
    record = read_record(run)
    files = sorted(path for path in folder.iterdir() if path.name != runner.CARD)
    card = {
        "format": name,
        "program": form.file if form.is_runnable else None,
        "kind": program.kind or None,
        "takes": program.takes,
        "leaves": len(program.leaves),
        "structure": getattr(data, "input_structure", None),
        "inputs": [
            {
                **_describe(name, tensor, [axes.get(at, size) for at, size in enumerate(tensor.shape)], program),
                "leaf": leaf,
            }
            for name, tensor, axes, leaf in zip(
                program.inputs, program.example, program.dimensions, program.used, strict=True
            )
        ],
        "outputs": _outputs(program),
        "cache": [
            {"input": PAST + name, "output": PRESENT + name, "shape": ["batch", tensor.size(1), "past", tensor.size(3)]}
            for name, tensor in program.cache.items()
        ],
        "classes": _classes(data),
        "run": {"id": record.get("id"), "name": record.get("name"), "checkpoint": checkpoint},
        "commit": (record.get("git") or {}).get("commit"),
        "test": record.get("test") or {},
        "license": find_license(project),
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": runner.sha256(path)} for path in files},
    }
    card["signature"] = user_key.sign(card["files"])
    write_text(folder / runner.CARD, to_json(card, indent=2) + "\n")


def add_result(folder: Path, result: Result) -> None:
    """Add the measured performance to the card."""
    card = runner.read_card(folder)
    write_text(folder / runner.CARD, to_json({**card, "verified": asdict(result)}, indent=2) + "\n")


def find_license(project: Project) -> str | None:
    """License of the project, as ``pyproject.toml`` names it; None if it names none."""
    file = project.root / "pyproject.toml"
    table = tomllib.loads(file.read_text()) if file.is_file() else {}
    found = table.get("project", {}).get("license")
    return found.get("text") or found.get("file") if isinstance(found, dict) else found


def _classes(data: Any) -> list[str]:
    """Class names, if the data module lists them; in a third-party one ``classes`` may be their number."""
    names = getattr(data, "classes", ())
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def _describe(name: str, tensor: torch.Tensor, shape: list[int | str], program: Program) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "shape": shape, "dtype": str(tensor.dtype).removeprefix("torch.")}
    return {**found, "max_length": program.max_length} if program.max_length else found


def _outputs(program: Program) -> list[dict[str, Any]]:
    """Outputs with their shapes, in which dynamic dimensions have the names that they have in those of the inputs."""
    captured = program.capture()
    shapes = {
        node.name: value.shape for node in captured.graph.nodes if hasattr(value := node.meta.get("val"), "shape")
    }
    inputs, outputs = captured.graph_signature.user_inputs, captured.graph_signature.user_outputs
    names = {
        str(shapes[name][axis]): label
        for name, axes in zip(inputs, program.dimensions, strict=False)  # without those of a cache
        for axis, label in axes.items()
    }
    with torch.inference_mode():
        examples = program(*program.example)
    return [
        _describe(name, tensor, [names.get(str(size)) or as_size(size) for size in shapes[node]], program)
        for name, tensor, node in zip(program.outputs, examples, outputs, strict=False)
    ]


def as_size(size: Any) -> int | str:
    """The size of a dimension, or an expression of dynamic ones."""
    return int(size) if str(size).isdecimal() else str(size)
