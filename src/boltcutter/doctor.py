"""What this machine can do, what is missing for the rest, and how a model would be spread over many devices."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from packaging.requirements import Requirement

from boltcutter import build, lineage, run
from boltcutter.assemble import as_config_error, assemble, check_config
from boltcutter.checks import check_kind
from boltcutter.choose import UNITS, StrategyEstimate, estimate_strategies, fits_in_memory, format_bytes, recommend
from boltcutter.config import ConfigError, DictConfig, one_line
from boltcutter.environment.platform import launched_layout
from boltcutter.environment.warnings import filter_warnings
from boltcutter.estimate import SampleSpec, sample_spec
from boltcutter.locate import locate
from boltcutter.project import Project

# Programs without which an option can be chosen but not used, and where they come from.
PROGRAMS = {
    "trainer=mpi": ("mpirun", "apt-get install openmpi-bin"),
    "launch=slurm": ("sbatch", "go to a login node of the cluster"),
    "task.compile=true": (os.environ.get("CXX", "g++"), "apt-get install g++"),
}
Lines = Iterator[tuple[str, str]]
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "transformer-engine")


def main(project: Project, words: list[str]) -> None:
    """Tell of the machine, of what works on it, and of the memory that the chosen model takes.

    Args:
        project: Whose configuration is used.
        words: Those of training, ``run=<folder>`` for an earlier run's, and ``devices=8 memory=80GiB`` for devices that
            need not be there.

    Raises:
        ConfigError: There are mistakes.
    """
    filter_warnings()
    special, rest = run.split_overrides(words, "devices", "memory", "run")
    count, memory = _devices(special), _memory(special)
    cfg = check_config(
        run.load_evaluation_config(project, special, rest)[0] if "run" in special else run.read_overrides(project, rest)
    )
    batch = (cfg.data or {}).get("batch_size")
    sample = sample_of(cfg) if batch else None
    _print("this machine", machine())
    _print("what works here", works(project))
    if sample is None:
        _print("memory", iter([("not estimated", f"data={cfg.choices.data} has no batch_size that is known here")]))
        return
    options = project.groups().get("trainer", ())
    found = [row for row in estimate_strategies(cfg, sample, count) if row.option in options]
    of = f"{batch} samples a step, {count} × {format_bytes(memory)}"
    shown = f"model={cfg.choices.model}" if "model" in cfg.choices else f"task={cfg.choices.task}"
    title = f"memory of {shown}, data={cfg.choices.data}, {cfg.trainer.precision}: {of}"
    _print(title, estimate(found, memory))


def machine() -> Lines:
    """Devices and their links, backends, versions, threads."""
    here = lineage.hardware()
    memory = f"{here['memory_gib']} GiB, {format_bytes(free())} of it free"
    yield "processor", f"{here['cpu']}, {here['cores']} cores, {memory}"
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        name = f"{device.name}, {format_bytes(device.total_memory)}, compute capability {device.major}.{device.minor}"
        yield f"device {number}", name
    if torch.backends.mps.is_available():
        yield "device", "Apple's GPU, which shares the processor's memory"
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        yield "devices", "no GPU"
    if links := _links():
        yield "links", links
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "threads", f"torch computes with {torch.get_num_threads()}, OMP_NUM_THREADS {threads}, {cores} cores allowed"
    yield "backends", ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in backends().items())
    cudnn: Any = torch.backends.cudnn
    cuda = f", CUDA {torch.version.cuda}, cuDNN {cudnn.version()}" if torch.version.cuda else ""
    yield "versions", f"Python {platform.python_version()}, torch {torch.__version__}, Lightning {L.__version__}{cuda}"
    if place := launched_layout():
        yield "platform", f"{place[0]}, {place[1]} nodes"


def backends() -> dict[str, bool]:
    """By what ranks can speak with one another, and XLA."""
    dist: Any = torch.distributed
    there = dist.is_available()
    return {
        "gloo": there and dist.is_gloo_available(),
        "nccl": there and dist.is_nccl_available() and torch.cuda.is_available(),
        "mpi": (there and dist.is_mpi_available()) or (_has("mpi4py") and bool(shutil.which("mpirun"))),
        "horovod": _has("horovod"),
        "xla": _has("torch_xla") or (_has("torchax") and _has("jax")),
    }


def works(project: Project) -> Lines:
    """Each strategy, precision, launcher and extra: yes, or what is missing."""
    known = project.groups()
    chosen = [f"trainer={option}" for option in known.get("trainer", ())]
    chosen += [f"trainer.precision={precision}" for precision in PRECISIONS]
    chosen += [f"launch={option}" for option in known.get("launch", ())]
    for words in [*chosen, "task.compile=true"]:
        yield words, _fault(project, words) or "yes"
    for extra, missing in extras().items():
        remedy = f"no: needs {', '.join(missing)}; pip install -c constraints.txt -e '.[{extra}]'"
        yield f"extra {extra}", remedy if missing else "yes"


def extras() -> dict[str, list[str]]:
    """Each of the project's extras, and which of its packages are not installed."""
    project = __name__.partition(".")[0]
    found: dict[str, list[str]] = {}
    with suppress(metadata.PackageNotFoundError):
        needed = [Requirement(text) for text in metadata.requires(project) or ()]
        for extra in metadata.metadata(project).get_all("Provides-Extra") or ():
            own = [one for one in needed if one.marker and one.marker.evaluate({"extra": extra})]
            found[extra] = sorted({one.name for one in own if one.name != project and not _installed(one.name)})
    return found


def sample_of(cfg: DictConfig) -> SampleSpec:
    """What the data gives, as the task wants it.

    Raises:
        ConfigError: Something is wrong with it.
    """
    data = build.build(cfg.data, "data")
    task: Any = locate(cfg.task["_target_"])
    check_kind(cfg, task, data)
    with as_config_error():
        return sample_spec(data)


def estimate(found: Sequence[StrategyEstimate], memory: int) -> Lines:
    """A line for each strategy, and which to take.

    Args:
        found: Of all strategies, the simplest first.
        memory: Of each device, in bytes.
    """
    yield "", "".join(f"{name:>13}" for name in ("weights", "gradients", "optimizer", "activations", "most at once"))
    for row in found:
        if isinstance(row.memory, str):
            yield row.words, f"no: {row.memory}"
            continue
        kept = row.memory
        sizes = (kept.weights, kept.gradients, kept.optimizer, kept.activations, kept.peak)
        shown = "".join(f"{format_bytes(size):>13}" for size in sizes)
        yield row.words, shown if fits_in_memory(kept, memory) else f"{shown}  too much"
    yield "take", recommend(found, memory)


def free() -> int:
    """Bytes of the processor's memory that nobody uses."""
    with suppress(OSError):
        found = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        if found:
            return int(found[1]) * 2**10
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _devices(special: dict[str, str]) -> int:
    text = special.get("devices", str(max(1, torch.cuda.device_count())))
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise ConfigError(f"devices={text} is not a number of devices; try devices=8")
    return int(text)


def _memory(special: dict[str, str]) -> int:
    """Bytes of each device: those that are said, or those of the smallest that is here."""
    if "memory" in special:
        parts = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT])(?:iB|B)?", special["memory"], re.I)
        if not parts or not float(parts[1]):
            raise ConfigError(f"memory={special['memory']} is not an amount of memory; try memory=80GiB")
        return int(float(parts[1]) * UNITS[parts[2].upper()])
    found = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return min(found, default=free())


def _fault(project: Project, words: str) -> str | None:
    """Why a run with ``words`` could not begin here; None where it could."""
    program, remedy = PROGRAMS.get(words, (None, ""))
    if program and not shutil.which(program):
        return f"no: {program} is not here; {remedy}"
    if words.startswith("launch="):
        return None
    try:
        cfg = check_config(run.read_overrides(project, [words]))
        cfg.folder = str(Path(cfg.runs) / "doctor")
        assemble(cfg, with_callbacks=False)
    except ConfigError as error:
        return f"no: {one_line(error)}"
    return None


def _links() -> str | None:
    """How GPUs are joined, as NVIDIA's own program draws it."""
    if not shutil.which("nvidia-smi"):
        return None
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    return re.sub(r"\x1b\[\d*m", "", done.stdout).strip() or None


def _has(module: str) -> bool:
    return find_spec(module) is not None


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _print(title: str, lines: Lines) -> None:
    shown = list(lines)
    width = max(len(name) for name, _ in shown)
    print(f"{title}")
    for name, text in shown:
        first, *more = text.split("\n")
        print(f"  {name:{width}}  {first}", *(f"    {line}" for line in more), sep="\n")
    print()
