"""``boltcutter bench``: how fast this machine trains, beside hand-written loops, in four minutes, without network."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from boltcutter.config.errors import ConfigError
from boltcutter.environment.threads import available_cores
from boltcutter.formatting import format_duration
from boltcutter.planning.device_test import CheckError, Devices, NotTriedError
from boltcutter.project import Project

SECONDS = 240.0
NOISE = ["data=synthetic", "data.in_memory=true", "task=classification"]
CONVNET = [*NOISE, "model=convnet"]
RESNET = [*NOISE, "model=resnet", "model.depth=50", "model.stem=large"]
GPT = ["data=text", "model=gpt", "task=language"]
SMALL = {  # of a CPU
    "convnet": [*CONVNET, "data.num_samples=10000"],
    "resnet50": [*RESNET, "data.num_samples=200", "data.shape=[3,64,64]", "data.batch_size=4"],
    "gpt": [*GPT, "data.shape=[64]", "data.batch_size=8"],
}
LARGE = {  # of a GPU
    "convnet": [*CONVNET, "data.num_samples=60000", "task.compile=true"],
    "resnet50": [
        *(*RESNET, "data.num_samples=5000", "data.shape=[3,224,224]", "data.num_classes=1000", "data.batch_size=128"),
        *("trainer.precision=bf16-mixed", "task.compile=true"),
    ],
    "gpt": [
        *(*GPT, "model.num_layers=12", "model.num_heads=12", "model.hidden_size=768", "data.shape=[1024]"),
        *("data.batch_size=16", "trainer.precision=bf16-mixed", "task.compile=true"),
    ],
}
RUN = ["optimizer=adamw", "callback=default", "callback.best=null", "callback.last=null", "logger=null"]
RUN += [
    "report=false",
    "test=false",
    "final_validation=false",
    "trainer.limit_val_batches=0",
    "trainer.max_epochs=1000",
]
RUN += ["scheduler=constant", "trainer.num_sanity_val_steps=0"]
HEAD = ("model", "ms per step", "relative to a hand-written loop", "MFU", "waiting for input", "of it beside the steps")


def bench_command(project: Project, overrides: list[str]) -> dict[str, Any]:
    """Measure step times of three models beside hand-written loops, and run the checks of ``doctor --test``.

    Args:
        project: Not used: the models are the built-in ones.
        overrides: ``seconds=240``, for all of it; ``work=convnet,resnet50,gpt``.

    Returns:
        The machine, what was measured by model, and the rows of the checks.

    Raises:
        ConfigError: An argument is unknown, or has no such value.
    """
    began = time.monotonic()
    seconds, names = read_arguments(overrides)
    with TemporaryDirectory(prefix="boltcutter-bench-") as folder:
        share = 0.6 * seconds / len(names)
        devices = Devices(Path(folder), total_time=seconds, check_time=share)
        works = {}
        for name in names:
            works[name] = measure(devices, name, share)
            print(f"measured {name}", flush=True)
        devices.check_time = 0.3 * seconds
        checks = [row._asdict() for row in devices.rows()]
    found = {"machine": describe_machine(devices), "seconds": time.monotonic() - began, "models": works}
    found["checks"] = checks
    print(format_result(found))
    return found


def read_arguments(overrides: list[str]) -> tuple[float, list[str]]:
    """Return the time for all, and the names of the models."""
    given = dict(text.partition("=")[::2] for text in overrides)
    if unknown := [name for name in given if name not in ("seconds", "work")]:
        raise ConfigError(f"{unknown[0]}: bench takes seconds= and work=; remove it")
    names = given.get("work", ",".join(SMALL)).split(",")
    if wrong := [name for name in names if name not in SMALL]:
        raise ConfigError(f"work={wrong[0]}: no such model; choose from {', '.join(SMALL)}")
    try:
        seconds = float(given.get("seconds", SECONDS))
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"seconds={given['seconds']}: must be a positive number; try {SECONDS:.0f}")
    return seconds, names


def measure(devices: Devices, name: str, seconds: float) -> dict[str, Any]:
    """Train a model in a process of its own; return what its ``Turns`` have measured, or the error."""
    file = devices.folder / f"{name}.json"
    turns = f"+callback.turns={{_target_: boltcutter.planning.turns.Turns, file: {file}, seconds: {seconds * 0.4:g}}}"
    overrides = [*(LARGE if devices.gpus else SMALL)[name], *RUN, turns, f"folder={devices.folder / name}"]
    overrides += [f"trainer.accelerator={'gpu' if devices.gpus else 'cpu'}", "trainer.devices=1"]
    try:
        devices.run("boltcutter", "train", *overrides)
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    except (CheckError, NotTriedError, OSError, ValueError) as error:
        return {"error": str(error)}


def describe_machine(devices: Devices) -> str:
    """Device, cores and versions, in a line."""
    device = torch.cuda.get_device_name() if devices.gpus else "CPU"
    return f"{device}, {available_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def format_result(found: Mapping[str, Any]) -> str:
    """A table in Markdown, as in ``docs/benchmarks.md``, and the verdict of the checks."""
    lines = [f"`boltcutter bench` on {found['machine']}, in {format_duration(found['seconds'])}:", ""]
    lines += [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for name, row in found["models"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} |{' |' * (len(HEAD) - 2)}")
            continue
        cells = [name, f"{row['ms_per_step']:.3g}", f"{row['ratio']:.2f} ({row['turns']} turns)"]
        cells += ["" if row[key] is None else f"{row[key]:.0%}" for key in ("mfu", "input_wait", "overlap")]
        lines.append(f"| {' | '.join(cells)} |")
    counts = {result: sum(row["result"] == result for row in found["checks"]) for result in ("works", "fails")}
    lines += ["", f"`boltcutter doctor --test`: {counts['works']} checks work, {counts['fails']} fail"]
    lines += [
        f"- {row['check']}: {row['result']}: {row['detail']}" for row in found["checks"] if row["result"] != "works"
    ]
    return "\n".join(lines)
