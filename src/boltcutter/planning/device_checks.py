"""Checks of devices that ``boltcutter doctor --test`` runs in processes of their own: computation and communication."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from boltcutter.data.streams import Purpose, stream

SIZE = 16 << 20  # float32 values that are reduced: 64 MiB
REPETITIONS = 5


def check_step(device: str) -> str:
    """Compare the gradients of a network on a device with those of the CPU."""
    found: list[list[torch.Tensor]] = []
    for place in ("cpu", device):
        torch.manual_seed(stream(Purpose.CHECK, 0) >> 1)
        network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
        inputs, targets = torch.randn(32, 3, 16, 16).to(place), torch.arange(32).remainder(10).to(place)
        nn.functional.cross_entropy(network.to(place)(inputs), targets).backward()  # type: ignore[no-untyped-call]
        found.append([p.grad.cpu() for p in network.parameters() if p.grad is not None])
    difference = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    if not difference < 1e-2:  # TF32 has 10 bits of mantissa
        raise RuntimeError(f"gradients differ from those of the CPU by {difference:.1e}")
    return "forward and backward" if device == "cpu" else f"gradients differ from those of the CPU by {difference:.1e}"


def check_all_reduce(world_size: str) -> str:
    """Measure the bandwidth of an all-reduce over all devices, or over processes on the CPU."""
    with TemporaryDirectory() as folder:
        spawn(_all_reduce, (int(world_size), folder), nprocs=int(world_size))  # type: ignore[no-untyped-call]
        return (Path(folder) / "result").read_text()


def _all_reduce(rank: int, world_size: int, folder: str) -> None:
    backend, device = ("nccl", f"cuda:{rank}") if torch.cuda.is_available() else ("gloo", "cpu")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    values = torch.ones(SIZE, device=device)
    dist.all_reduce(values)
    if not bool((values == world_size).all()):
        raise RuntimeError(f"{backend}: the sum over {world_size} ranks is wrong")
    seconds = []
    for _ in range(REPETITIONS):
        values.fill_(1.0)
        dist.barrier()
        _synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(values)
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    sent = 2 * (world_size - 1) / world_size * 4 * SIZE  # bytes per rank, by a ring
    if rank == 0:
        text = f"{backend}, {world_size} ranks: {sent / min(seconds) / 1e9:.2f} GB/s"
        (Path(folder) / "result").write_text(text)
    dist.destroy_process_group()


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    checks: dict[str, Any] = {"step": check_step, "all-reduce": check_all_reduce}
    print(checks[sys.argv[1]](sys.argv[2]))
