"""What failed while running, told with its remedy: memory that ran out, a rank that is gone."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.I)
NO_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|Wait timeout|"
    r"Socket closed|failed to pass monitoredBarrier|NCCL error|ncclRemoteError|Timed out after",
    re.I,
)
NOT_LOGGED = re.compile(r"conditioned on metric|could not find the monitored key")
UNUSED = re.compile(r"parameters that were not used in producing", re.I)
ANSWER_SECONDS = 3.0  # in which the ranks that are there say so


class OutOfMemoryError(RuntimeError):
    """A batch was too large for the device."""

    hide_traceback = True  # needs no traceback


class RankLostError(RuntimeError):
    """Another rank ended or stopped."""

    hide_traceback = True


class UnusedParametersError(RuntimeError):
    """DDP waits for gradients that the loss does not give."""

    hide_traceback = True


class MetricNotLoggedError(RuntimeError):
    """A callback or a scheduler waits for a metric that there is not."""

    hide_traceback = True


@contextmanager
def explain_errors(trainer: L.Trainer) -> Iterator[None]:
    """Tell what to do where the error itself does not.

    Raises:
        OutOfMemoryError: In place of what an allocator raised.
        RankLostError: In place of what a collective raised.
        UnusedParametersError: In place of what DDP raised.
        MetricNotLoggedError: In place of what Lightning raised.
    """
    try:
        yield
    except (RuntimeError, MemoryError, MisconfigurationException) as error:
        text = str(error)
        if NOT_LOGGED.search(text):
            raise MetricNotLoggedError(" ".join(text.split())) from error
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_MEMORY.search(text):
            raise OutOfMemoryError(out_of_memory_message(trainer)) from error
        if UNUSED.search(text):
            raise UnusedParametersError(unused_parameters_message(trainer.lightning_module)) from error
        together = dist.is_available() and dist.is_initialized()
        if dist.is_available() and not together and isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            raise RankLostError(rendezvous_message(trainer.world_size, text)) from error
        if together and NO_PEER.search(text):
            reason = " ".join(text.split("] ")[-1].split())[:120].rstrip(".")
            raise RankLostError(f"{missing_ranks_message(trainer.world_size)} ({reason})") from error
        raise


def unused_parameters_message(module: L.LightningModule) -> str:
    """Which parameters got no gradient, and what to say to DDP."""
    names = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    listed = f" ({', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''})" if names else ""
    return (
        f"the loss of {type(module).__name__}.training_step does not use all parameters{listed}, and DDP waits for the "
        "gradient of each; say +trainer.strategy.find_unused_parameters=true, or set requires_grad=False for them"
    )


def out_of_memory_message(trainer: L.Trainer) -> str:
    """What a batch was, and what to try instead."""
    size = getattr(trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
    device = trainer.strategy.root_device
    if not size:
        return f"{device} is out of memory: give the data module smaller batches"
    ranks = (getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)
    parts = trainer.accumulate_grad_batches
    half = f"data.batch_size={max(1, size // 2 // ranks) * ranks} trainer.accumulate_grad_batches={2 * parts}"
    share = f" ({size // ranks} on each of {ranks} ranks)" if ranks > 1 else ""
    return (
        f"{device} is out of memory with data.batch_size={size}{share}: try {half}, which makes the same step of "
        "smaller parts, or `python scripts/bench.py batch` with your words for the largest batch that fits"
    )


def rendezvous_message(world_size: int, text: str) -> str:
    """Where ranks were to meet, and did not in time."""
    place = ", ".join(f"{name}={os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    reason = text.splitlines()[0].rstrip(".")[:160]
    return f"{place}: {world_size} ranks did not meet there ({reason}); start them all, or correct the address"


def missing_ranks_message(world_size: int) -> str:
    """Which ranks do not answer at the store that all of them know; each rank that asks says that it is there."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        store.set_timeout(timedelta(seconds=5))
        with suppress_native_stderr():
            store.set(f"here/{dist.get_rank()}", "1")
        time.sleep(ANSWER_SECONDS)
        with suppress_native_stderr():
            missing = [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]
    except RuntimeError:
        missing = [0]  # the first one serves the store
    if not missing:
        return f"rank {dist.get_rank()} lost its connection to another rank"
    named = "rank " + str(missing[0]) if len(missing) == 1 else "ranks " + ", ".join(map(str, missing))
    return f"{named} of {world_size} ended or does not answer; its own message, if it had one, is in logs/"


@contextmanager
def suppress_native_stderr() -> Iterator[None]:
    """Keep off the terminal what torch's C++ code prints: its own call stack, for an exception that is handled."""
    sys.stderr.flush()
    before, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nothing)
