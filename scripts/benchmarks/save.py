"""The time that training waits for an asynchronous save, per GiB, relative to a synchronous one."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.harness import ratio
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.project import Project

TENSOR = 1 << 24  # bytes of each tensor


def main(project: Project, overrides: list[str]) -> None:
    """Measure both; options: ``mib=512 rounds=3 device=cpu folder=runs/bench``, with ``device=cuda`` for a GPU.

    Raises:
        BenchmarkError: An option is invalid.
    """
    known = {"mib": "512", "rounds": "3", "device": "cpu", "folder": "runs/bench"}
    chosen = harness.parse_options(overrides, known)
    count, rounds = max(1, (int(chosen["mib"]) << 20) // TENSOR), int(chosen["rounds"])
    weights = {str(index): torch.rand(TENSOR // 4, device=chosen["device"]) for index in range(count)}
    seconds = {
        kind: stall(weights, rounds, asynchronous=kind == "asynchronous") for kind in ("asynchronous", "synchronous")
    }
    gib = count * TENSOR / (1 << 30)
    per_gib = {kind: [value / gib for value in values] for kind, values in seconds.items()}
    print(*(f"{kind}: {sorted(values)[len(values) // 2]:.2f} s per GiB" for kind, values in per_gib.items()), sep="\n")
    ratios = [ratio("asynchronous", per_gib["asynchronous"], "synchronous", per_gib["synchronous"], 0.5)]
    harness.report("save", Path(chosen["folder"]), ratios, per_gib)


def stall(weights: dict[str, torch.Tensor], rounds: int, *, asynchronous: bool) -> list[float]:
    """Return the seconds that each save takes for the caller, without the first, which allocates memory."""
    found, store = [], AtomicCheckpointIO(asynchronous=asynchronous)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds + 1):
            store.wait()
            began = time.perf_counter()
            store.save_checkpoint({"state_dict": weights}, Path(folder) / "last.ckpt")
            found.append(time.perf_counter() - began)
        store.teardown()
    return found[1:]
