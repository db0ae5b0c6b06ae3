"""All-reduce over shared memory for ranks on one host, which is faster than gloo's sockets and threads.

For CPU tensors only: gradients on a GPU are averaged by the process group.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boltcutter.protocols import gather_objects

FOLDER = Path("/dev/shm")  # noqa: S108 - shared memory
ORDERED_ARCHITECTURES = ("x86_64", "AMD64")  # total store order: other cores see stores in program order
LINE = 64  # bytes of a cache line; each rank has its own, to avoid false sharing
CELLS = LINE // 8  # 64-bit integers in a line: the counter, two tags and two numbers
TAGS, NUMBERS = 1, 3  # their offsets in a line
MAX = -1  # tag of all_reduce_max; that of average is the number of elements
CHUNK = 1 << 20  # bytes that each rank writes at a time
SPIN = 2e-3  # seconds of busy waiting
PAUSE = 1e-4  # seconds between two polls after that
CHECK_INTERVAL = 0.2  # seconds between checks that the awaited rank is running


class SharedMemory:
    """Memory mapped by all ranks: for each rank a line of counters and a chunk of a tensor, and a chunk for the sum.

    To synchronize, a rank increments its counter and waits until the counters of all other ranks are as high. As it may
    then be one step ahead of them, its tags and numbers are double-buffered. A rank holds a lock on one byte of the
    file, which the operating system releases however the process ends.

    Args:
        file: Open file of ``file_size(world_size)`` zero bytes, the same for all ranks; closed by ``close``.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Maximum time to wait for the other ranks.
    """

    def __init__(self, file: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        self.file, self.rank, self.world_size, self.timeout = file, rank, world_size, timeout.total_seconds()
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        mapped = mmap.mmap(file.fileno(), file_size(world_size))
        self._cells = memoryview(mapped)[: world_size * LINE].cast("q")
        chunks = torch.frombuffer(mapped, dtype=torch.uint8, offset=world_size * LINE)
        self._chunks = chunks.view(world_size + 1, CHUNK)  # one for each rank, and the sum
        self._others = [other * CELLS for other in range(world_size) if other != rank]
        self._own = rank * CELLS
        self._step = 0

    @classmethod
    def create(cls, rank: int, world_size: int, timeout: timedelta) -> SharedMemory | None:
        """Create it, collectively on all ranks of the process group; None if they cannot share memory.

        Raises:
            RuntimeError: Another rank has failed.
        """
        file, path = None, ""
        if rank == 0 and platform.machine() in ORDERED_ARCHITECTURES and FOLDER.is_dir():
            file, path = _create_file(file_size(world_size))
        paths = [path]
        try:
            dist.broadcast_object_list(paths)
            try:
                if rank and paths[0]:
                    file = open(paths[0], "r+b")  # noqa: SIM115  # for as long as the memory is shared
            except OSError:
                file = None
            is_open = gather_objects(file is not None)
        finally:  # every rank has opened it, or has failed to
            if path:
                os.unlink(path)
        if not all(is_open):
            return file.close() if file else None
        memory = cls(file, rank, world_size, timeout)
        dist.barrier()  # all ranks hold their locks before any rank checks them
        return memory

    def average(self, tensor: Tensor) -> None:
        """Average a vector over ranks, in place; the result is bitwise identical on all ranks.

        Args:
            tensor: Contiguous CPU tensor of shape (N,).

        Raises:
            RuntimeError: Another rank has failed, has timed out, or calls another operation.
        """
        length = CHUNK // tensor.element_size()
        chunks = self._chunks.view(tensor.dtype)
        for part in torch.split(tensor, length):
            count = len(part)
            torch.div(part, self.world_size, out=chunks[self.rank, :count])  # before the sum, which might overflow
            self._synchronize(count)
            begin, end = (count * index // self.world_size for index in (self.rank, self.rank + 1))
            total = chunks[self.world_size, begin:end]  # each rank sums one section
            torch.add(chunks[0, begin:end], chunks[1, begin:end], out=total)
            for other in range(2, self.world_size):
                total.add_(chunks[other, begin:end])
            self._synchronize(count)
            part.copy_(chunks[self.world_size, :count])

    def average_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a gradient bucket synchronously; a communication hook of ``DistributedDataParallel``."""
        self.average(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    @staticmethod
    def supports(model: nn.Module | None) -> bool:
        """Whether it can average the gradients of a model: not the sparse ones of embeddings, which gloo averages."""
        layers = model.modules() if model else ()
        return not any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse for layer in layers)

    def all_reduce_max(self, number: int) -> int:
        """The maximum of a signed 64-bit integer over all ranks.

        Raises:
            RuntimeError: Another rank has failed, has timed out, or calls another operation.
        """
        offset = NUMBERS + self._step % 2
        self._cells[self._own + offset] = number
        self._synchronize(MAX)
        return max(number, *(self._cells[other + offset] for other in self._others))

    def _synchronize(self, tag: int) -> None:
        """Wait for all ranks; the tag verifies that they call the same operation."""
        self._step += 1
        cells, step, offset = self._cells, self._step, TAGS + self._step % 2
        cells[self._own + offset] = tag
        cells[self._own] = step
        for other in self._others:
            if cells[other] < step:
                self._wait(other, step)
            if cells[other + offset] != tag:
                raise RuntimeError(f"shared memory: rank {other // CELLS} calls another operation")

    def _wait(self, other: int, step: int) -> None:
        cells = self._cells
        began = checked = time.monotonic()
        while cells[other] < step:
            now = time.monotonic()
            if now - began < SPIN:
                os.sched_yield()
                continue
            time.sleep(PAUSE)
            if now - checked < CHECK_INTERVAL:
                continue
            checked = now
            if self._has_exited(other // CELLS) and cells[other] < step:  # it may have arrived before it exited
                raise RuntimeError("shared memory: Connection closed by peer")
            if now - began > self.timeout:
                raise RuntimeError(f"shared memory: Timed out waiting {self.timeout:.0f} s for another rank")

    def _has_exited(self, other: int) -> bool:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the file, which releases the lock and so notifies ranks that wait for this one."""
        self.file.close()


def file_size(world_size: int) -> int:
    """Size of the file in bytes."""
    return world_size * LINE + (world_size + 1) * CHUNK


def _create_file(length: int) -> tuple[Any, str]:
    """Create a file of this many bytes of memory; None, and an empty path, if there is not enough."""
    try:
        number, path = tempfile.mkstemp(prefix="boltcutter-", dir=FOLDER)
    except OSError:
        return None, ""
    file = os.fdopen(number, "r+b")
    try:
        os.posix_fallocate(number, 0, length)  # writing to unallocated pages would kill the process by SIGBUS
    except OSError:
        file.close()
        os.unlink(path)
        return None, ""
    return file, path
