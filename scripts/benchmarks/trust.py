"""CPU seconds that the checks of untrusted files add.

Each file is opened in a process of its own that has imported the library, with the checks and with ``trust=true``,
which leaves them out. The run is one of somebody else: its record is not signed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch

from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.checkpoint.load import load_checkpoint
from boltcutter.checkpoint.weights import load_weights
from boltcutter.config.compose import compose
from boltcutter.environment import user_key
from boltcutter.formatting import to_json
from boltcutter.model.linear import Linear
from boltcutter.project import Project
from boltcutter.run import trust

REPEATS = 5


def make(folder: Path, *overrides: str, links: bool = False, signs: bool = False, **changes: Any) -> Path:
    """Make the folder of a run, as training records it."""
    project = Project.find(__file__)
    config = compose(project, [*overrides, f"folder={folder}"]).written | changes
    (folder / "logs").mkdir(parents=True)
    if links:
        (folder.parent / "disk").mkdir()
        (folder / "checkpoints").symlink_to(folder.parent / "disk")
    record: dict[str, Any] = {"id": folder.name, "name": "a", "attempts": [], "config": config}
    record["signature"] = user_key.sign(config) if signs else None
    (folder / "record.json").write_text(to_json(record, default=str))
    return folder


def open_run(folder: Path) -> Callable[[], object]:
    """A function that reads the configuration of a run, as evaluate, predict, export and serve do."""
    return lambda: load_evaluation_config(Project.find(__file__), {"run": str(folder)}, [])


def seconds(call: Callable[[], object], *, trusts: bool) -> float:
    """CPU seconds of the fastest of several calls, each the first one in its process."""
    found = []
    for _ in range(REPEATS):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            trust.apply_overrides([f"trust={str(trusts).lower()}"])
            begin = time.process_time()
            try:
                call()
                os.write(write, json.dumps(time.process_time() - begin).encode())
            finally:
                os._exit(0)
        os.close(write)
        found.append(float(os.read(read, 100) or "nan"))  # it was refused
        os.close(read)
        os.waitpid(pid, 0)
    return min(found)


def main(project: Project, overrides: list[str]) -> None:
    """Print a row for each kind of file."""
    with TemporaryDirectory() as scratch:
        measure(Path(scratch))


def measure(root: Path) -> None:
    """Measure with files in a folder."""
    references = [f"${{name}} ${{seed}} {number}" for number in range(17)]
    model, state = Linear((1, 28, 28), 10), Linear((1, 28, 28), 10).state_dict()
    safetensors.torch.save_file(state, root / "a.safetensors")
    torch.save(state, root / "a.pt")
    torch.save({"state_dict": {f"w{number}": torch.zeros(1 << 18) for number in range(100)}}, root / "a.ckpt")
    cases = {
        "a run of a colleague, built-in classes": open_run(make(root / "a" / "a")),
        "an own run that was moved": open_run(make(root / "b" / "b", signs=True)),
        "checkpoints linked to a larger disk": open_run(make(root / "c" / "c", links=True)),
        "17 texts with two references": open_run(make(root / "d" / "d", tags=references)),
        "a tag with a URL": open_run(make(root / "e" / "e", tags=["http://example.com/a"])),
        "a run whose logger is a server": open_run(make(root / "f" / "f", "logger=mlflow")),
        "init_from, .safetensors": lambda: load_weights(model, root / "a.safetensors"),
        "init_from, .pt": lambda: load_weights(model, root / "a.pt"),
        "a checkpoint of 105 MB": lambda: load_checkpoint(root / "a.ckpt"),
    }
    for name, call in cases.items():
        checked, trusted = (seconds(call, trusts=value) for value in (False, True))
        print(f"{name:40} {checked:6.3f} s, {trusted:.3f} s with trust=true", flush=True)
