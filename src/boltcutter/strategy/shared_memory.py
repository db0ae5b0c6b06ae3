"""Ranks of one machine add up numbers in memory that they share, where sockets and threads would take longer."""

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
from torch import Tensor

PLACE = Path("/dev/shm")
ORDERED = ("x86_64", "AMD64")  # processors that show one another what they write in the order in which they do
LINE = 64  # bytes, so that what one rank writes is in no other's way
CELLS = LINE // 8  # whole numbers of 64 bits
PURPOSES, NUMBERS = 1, 3  # where they are, after the count
ASKED = -1  # a purpose
CHUNK = 1 << 20  # bytes that each rank puts down at a time
SPIN = 2e-3  # seconds in which a rank that waits does nothing else
PAUSE = 1e-4  # between two looks after that
LOOK = 0.2  # seconds after which it sees whether another has left


class SharedMemory:
    """What all ranks of a run have mapped: for each a counter, some numbers and a piece of a tensor; and their sum.

    A rank counts up when it has put something down, and waits for the others to have counted as far; since it may then
    be one count ahead, its numbers have two places that take turns. As long as it lives it holds a lock on a byte of
    the file, which the system gives free when it ends in whatever way.

    Args:
        file: Open, long enough, and of the same content for all; it is closed in the end.
        rank: Of this process.
        world: How many share it.
        timeout: How long a rank waits for the others.
    """

    def __init__(self, file: Any, rank: int, world: int, timeout: timedelta) -> None:
        self.file, self.rank, self.world, self.timeout = file, rank, world, timeout.total_seconds()
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        mapped = mmap.mmap(file.fileno(), size(world))
        self._cells = memoryview(mapped)[: world * LINE].cast("q")
        self._pieces = torch.frombuffer(mapped, dtype=torch.uint8, offset=world * LINE).view(world + 1, CHUNK)
        self._others = [other * CELLS for other in range(world) if other != rank]
        self._mine = rank * CELLS
        self._met = 0

    @classmethod
    def among(cls, rank: int, world: int, timeout: timedelta) -> SharedMemory | None:
        """One for all ranks of the process group; None if they cannot share memory, as those of several machines.

        Raises:
            RuntimeError: Another rank has left.
        """
        file, path = None, ""
        if rank == 0 and platform.machine() in ORDERED and PLACE.is_dir():
            file, path = _reserve(size(world))
        told, known = [path], [False] * world
        try:
            dist.broadcast_object_list(told)
            try:
                if rank and told[0]:
                    file = open(told[0], "r+b")  # noqa: SIM115  # for as long as the memory is shared
            except OSError:
                file = None
            dist.all_gather_object(known, file is not None)
        finally:  # all have it open, or never will
            if path:
                os.unlink(path)
        if not all(known):
            return file.close() if file else None
        made = cls(file, rank, world, timeout)
        dist.barrier()  # none looks for the lock of one that has yet to take it
        return made

    def average(self, tensor: Tensor) -> None:
        """Set a contiguous vector to its mean over ranks, in place; all get the same bits.

        Raises:
            RuntimeError: Another rank has left, is late, or does something else.
        """
        length = CHUNK // tensor.element_size()
        pieces = self._pieces.view(tensor.dtype)
        for part in torch.split(tensor, length):
            count = len(part)
            torch.div(part, self.world, out=pieces[self.rank, :count])  # first, as torch does: sums may grow too large
            self._meet(count)
            begin, end = (count * share // self.world for share in (self.rank, self.rank + 1))
            total = pieces[self.world, begin:end]
            torch.add(pieces[0, begin:end], pieces[1, begin:end], out=total)
            for other in range(2, self.world):
                total.add_(pieces[other, begin:end])
            self._meet(count)
            part.copy_(pieces[self.world, :count])

    def all_reduce_max(self, number: int) -> int:
        """The largest of what all ranks give, each at most 64 bits with its sign.

        Raises:
            RuntimeError: Another rank has left, is late, or does something else.
        """
        place = NUMBERS + self._met % 2
        self._cells[self._mine + place] = number
        self._meet(ASKED)
        return max(number, *(self._cells[other + place] for other in self._others))

    def _meet(self, purpose: int) -> None:
        """Wait until all ranks are here, for the same purpose: so many numbers, or a question."""
        self._met += 1
        cells, met, place = self._cells, self._met, PURPOSES + self._met % 2
        cells[self._mine + place] = purpose
        cells[self._mine] = met
        for other in self._others:
            if cells[other] < met:
                self._wait(other, met)
            if cells[other + place] != purpose:
                raise RuntimeError(f"shared memory: rank {other // CELLS} is elsewhere in the program")

    def _wait(self, other: int, met: int) -> None:
        cells = self._cells
        began = looked = time.monotonic()
        while cells[other] < met:
            now = time.monotonic()
            if now - began < SPIN:
                os.sched_yield()
                continue
            time.sleep(PAUSE)
            if now - looked < LOOK:
                continue
            looked = now
            if self._left(other // CELLS) and cells[other] < met:  # it may have come, and left since
                raise RuntimeError("shared memory: Connection closed by peer")
            if now - began > self.timeout:
                raise RuntimeError(f"shared memory: Timed out waiting {self.timeout:.0f} s for another rank")

    def _left(self, other: int) -> bool:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Leave: others that wait learn of it."""
        self.file.close()


def average(memory: SharedMemory, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average gradients where DistributedDataParallel asks for it, at once."""
    memory.average(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def size(world: int) -> int:
    """Bytes of the file for so many ranks."""
    return world * LINE + (world + 1) * CHUNK


def _reserve(length: int) -> tuple[Any, str]:
    """A new file of that many bytes of memory and its path; none where there is not as much."""
    try:
        number, path = tempfile.mkstemp(prefix="boltcutter-", dir=PLACE)
    except OSError:
        return None, ""
    file = os.fdopen(number, "r+b")
    try:
        os.posix_fallocate(number, 0, length)  # to touch what is not there would end the process
    except OSError:
        file.close()
        os.unlink(path)
        return None, ""
    return file, path
