"""Report the machine, the options that work on it, and the memory of each strategy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch

from boltcutter.assembly.assemble import assemble, complete_config
from boltcutter.assembly.overrides import load_evaluation_config, read_overrides
from boltcutter.checks.combination import check_kind
from boltcutter.checks.resources import available_memory
from boltcutter.config.errors import ConfigError, as_config_error, one_line
from boltcutter.config.instantiate import build
from boltcutter.config.locate import locate
from boltcutter.config.values import split_overrides
from boltcutter.environment.platform_facts import launched_layout
from boltcutter.environment.threads import available_cores, count_free_cores
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.planning import device_test
from boltcutter.planning.choose import (
    UNITS,
    StrategyEstimate,
    estimate_strategies,
    fits_in_memory,
    format_bytes,
    recommend,
)
from boltcutter.planning.estimate import read_batch
from boltcutter.project import Project
from boltcutter.run import lineage

# Programs that an option needs, and how to get them.
PROGRAMS = {
    "trainer=mpi": ("mpirun", "apt-get install openmpi-bin"),
    "launch=slurm": ("sbatch", "go to a login node of the cluster"),
    "task.compile=true": (os.environ.get("CXX", "g++"), "apt-get install g++"),
}
Lines = Iterator[tuple[str, str]]
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "transformer-engine")


def doctor_command(project: Project, overrides: list[str]) -> list[dict[str, str]] | None:
    """Print a report on the machine, on what works on it, and on the memory of the selected model.

    Args:
        project: Project whose configuration is used.
        overrides: Overrides of training, ``run=<folder>`` for the configuration of an earlier run, and
            ``devices=8 memory=80GiB`` for hypothetical devices; or ``--test``, to train on the devices instead.

    Returns:
        The rows of ``--test``.
    """
    if "--test" in overrides:
        return device_test.run_device_test(overrides)
    filter_warnings()
    special, rest = split_overrides(overrides, "devices", "memory", "run")
    count, memory = _devices(special), _memory(special)
    cfg = complete_config(
        load_evaluation_config(project, special, rest)[0] if "run" in special else read_overrides(project, rest)
    )
    size = cfg.data.get("batch_size")
    batch: Any = None
    if size:
        data = build(cfg.data, "data")
        check_kind(cfg, locate(cfg.task["_target_"]), data)
        with as_config_error():
            batch = read_batch(data)
    _print("this machine", machine())
    _print("what works on this machine", works(project))
    if batch is None:
        _print("memory", iter([("not estimated", f"data={cfg.choices['data']} has no known batch_size")]))
        return None
    options = project.groups().get("trainer", ())
    rows = [row for row in estimate_strategies(cfg, batch, count) if row.option in options]
    per_step = f"{size} samples per step, {count} × {format_bytes(memory)}"
    shown = f"model={cfg.choices['model']}" if "model" in cfg.choices else f"task={cfg.choices['task']}"
    title = f"memory of {shown}, data={cfg.choices['data']}, {cfg.trainer['precision']}: {per_step}"
    _print(title, estimate(rows, memory))
    return None


def machine() -> Lines:
    """Report CPU, devices, interconnect, threads, backends and versions."""
    host = lineage.hardware()
    memory = f"{host['memory_gib']} GiB, {format_bytes(available_memory())} free"
    yield "CPU", f"{host['cpu']}, {host['cores']} cores, {memory}"
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        name = f"{device.name}, {format_bytes(device.total_memory)}, compute capability {device.major}.{device.minor}"
        yield f"device {number}", name
    if torch.backends.mps.is_available():
        yield "device", "Apple GPU (MPS), which shares the memory of the CPU"
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        yield "devices", "no GPU"
    if torch.cuda.device_count() > 1 and (links := _links()):
        yield "interconnect", links
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    cores = f"{available_cores()} cores available, about {count_free_cores():.0f} of them free"
    yield "threads", f"torch {torch.get_num_threads()}, OMP_NUM_THREADS {threads}, {cores}"
    yield "backends", ", ".join(f"{name} {'yes' if works else 'no'}" for name, works in backends().items())
    cudnn: Any = torch.backends.cudnn
    cuda = f", CUDA {torch.version.cuda}, cuDNN {cudnn.version()}" if torch.version.cuda else ""
    yield "versions", f"Python {platform.python_version()}, torch {torch.__version__}, Lightning {L.__version__}{cuda}"
    if place := launched_layout():
        yield "platform", f"{place[0]}, {place[1]} nodes"


def backends() -> dict[str, bool]:
    """Return which backends for collectives are available, and XLA."""
    dist: Any = torch.distributed
    available = dist.is_available()
    return {
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available() and torch.cuda.is_available(),
        "mpi": (available and dist.is_mpi_available()) or bool(find_spec("mpi4py") and shutil.which("mpirun")),
        "horovod": bool(find_spec("horovod")),
        "xla": bool(find_spec("torch_xla") or (find_spec("torchax") and find_spec("jax"))),
    }


def works(project: Project) -> Lines:
    """Report for each trainer option, precision and launcher: yes, or what is missing."""
    known = project.groups()
    options = [f"trainer={option}" for option in known.get("trainer", ())]
    options += [f"trainer.precision={precision}" for precision in PRECISIONS]
    options += [f"launch={option}" for option in known.get("launch", ())]
    for override in [*options, "task.compile=true"]:
        yield override, _find_problem(project, override) or "yes"


def estimate(found: Sequence[StrategyEstimate], memory: int) -> Lines:
    """Report the memory of each strategy, and the one for devices of ``memory`` bytes."""
    yield "", "".join(f"{name:>13}" for name in ("weights", "gradients", "optimizer", "activations", "peak"))
    for row in found:
        if isinstance(row.memory, str):
            yield row.overrides, f"no: {row.memory}"
            continue
        need = row.memory
        sizes = (need.weights, need.gradients, need.optimizer, need.activations, need.peak)
        shown = "".join(f"{format_bytes(size):>13}" for size in sizes)
        yield row.overrides, shown if fits_in_memory(need, memory) else f"{shown}  too large"
    yield "recommended", recommend(found, memory)


def _devices(special: dict[str, str]) -> int:
    text = special.get("devices", str(max(1, torch.cuda.device_count())))
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise ConfigError(f"devices={text} is not a number of devices; try devices=8")
    return int(text)


def _memory(special: dict[str, str]) -> int:
    """Return the memory of each device in bytes: the override, or that of the smallest device."""
    if "memory" in special:
        parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT])(?:iB|B)?", special["memory"], re.I)
        if not parts or not float(parts[1]):
            raise ConfigError(f"memory={special['memory']} is not an amount of memory; try memory=80GiB")
        return int(float(parts[1]) * UNITS[parts[2].upper()])
    found = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return min(found, default=available_memory())


def _find_problem(project: Project, override: str) -> str | None:
    """Return why a run with ``override`` could not start on this machine; None if it could."""
    program, remedy = PROGRAMS.get(override, (None, ""))
    if program and not shutil.which(program):
        return f"no: {program} is not installed; {remedy}"
    if override.startswith("launch="):
        return None
    try:
        cfg = complete_config(read_overrides(project, [override]))
        cfg = cfg.changed({"folder": str(Path(cfg.runs) / "doctor")})
        assemble(cfg, with_callbacks=False)
    except ConfigError as error:
        return f"no: {one_line(error)}"
    return None


def _links() -> str | None:
    """Return the topology of GPUs as nvidia-smi prints it; None without GPUs."""
    if not shutil.which("nvidia-smi"):
        return None
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    return re.sub(r"\x1b\[[0-9]*m", "", done.stdout).strip() or None


def _print(title: str, lines: Lines) -> None:
    rows = list(lines)
    width = max(len(name) for name, _ in rows)
    print(title)
    for name, text in rows:
        first, *more = text.split("\n")
        print(f"  {name:{width}}  {first}", *(f"    {line}" for line in more), sep="\n")
    print()
