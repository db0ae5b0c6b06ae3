"""Collectives that MPI carries, through mpi4py: a backend for torch.distributed, whose own wheels have none."""

# Of the overloads in its stubs torch calls one.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

NAME = "mpi4py"
SETTING = f"trainer.strategy.process_group_backend={NAME}"
MPI: Any = None  # the library, once it is asked for
SPIN = 1e-3  # seconds in which ranks that wait do nothing else
PAUSE = 5e-4  # between two looks after that
LOOK = 0.5  # seconds after which they see whether another has left
LEAVE = 8.0  # seconds that a rank which leaves gives the others
STARTED = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}  # one is set by whoever starts processes of MPI
SUMMED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # MPI adds no halves


class MPIError(RuntimeError):
    """MPI does not know of the processes that train."""

    hide_traceback = True


class Done(Work):
    """A collective that is over when it is handed out."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        """It is over."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    is_success = is_completed

    def get_future(self) -> Future[Any]:
        """That has its result."""
        return self._future


class Group(dist.ProcessGroup):
    """Ranks that talk through an MPI communicator.

    A collective begins when all ranks are there, so that one which waits learns of another that has left; it is over
    when the call returns. Tensors of a device pass through the host.

    Args:
        comm: The communicator.
        store: That all ranks know.
        timeout: How long a rank waits for the others.
        world: Whether these are all ranks, which leave together.
    """

    together = False  # whether MPI can be ended: all ranks have come to that
    there: ClassVar[list[Group]] = []  # those of all ranks that nobody has shut down

    def __init__(self, comm: Any, store: Any, timeout: timedelta, *, world: bool) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())  # type: ignore[call-arg]
        self.comm, self.store, self.timeout = comm, store, timeout.total_seconds()
        self.leaving = comm.Dup() if world else None
        if world:
            Group.there.append(self)

    def _meet(self) -> None:
        """Wait until all ranks are here.

        Raises:
            RuntimeError: One has left, or is late.
        """
        here, end = self.comm.Ibarrier(), time.monotonic() + self.timeout
        while not _over(here, LOOK):
            if self.store.check(["left"]):
                raise RuntimeError(f"{NAME}: Connection closed by peer")
            if time.monotonic() > end:
                raise RuntimeError(f"{NAME}: Timed out waiting {self.timeout:.0f} s for another rank")

    def shutdown(self) -> None:
        """Leave with the others; if they do not come, tell those that wait for this rank."""
        if self.leaving is None or self not in Group.there:
            return
        Group.there.remove(self)
        here = self.leaving.Ibarrier()
        if not _over(here, 2 * LOOK):
            with suppress(RuntimeError):  # the first rank, which serves the store, may be gone
                self.store.set("left", "1")
        Group.together = _over(here, LEAVE)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Add them up, or what ``opts`` ask for, in place."""
        how = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        for tensor in tensors:
            self._meet()
            held = _host(tensor)
            self.comm.Allreduce(MPI.IN_PLACE, held.numpy(), op=_operation(how))
            _give(tensor, held / self.size() if how == dist.ReduceOp.AVG else held)
        return Done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """As ``allreduce``, for one rank."""
        for tensor in tensors:
            self._meet()
            held = _host(tensor)
            summed = torch.empty_like(held)
            self.comm.Reduce(held.numpy(), summed.numpy(), op=_operation(opts.reduceOp), root=opts.rootRank)
            if self.rank() == opts.rootRank:
                _give(tensor, summed / self.size() if opts.reduceOp == dist.ReduceOp.AVG else summed)
        return Done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """Give all ranks what one has."""
        for tensor in tensors:
            self._meet()
            held = _host(tensor)
            self.comm.Bcast(held.numpy(), root=opts.rootRank)
            _give(tensor, held)
        return Done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Give all ranks what each has."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            for part, held in zip(parts, self._gathered(tensor), strict=True):
                _give(part, held)
        return Done(outputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """As ``allgather``, into one tensor."""
        _give(output, self._gathered(tensor).view(output.shape))
        return Done([output])

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def _gathered(self, tensor: Tensor) -> Tensor:
        self._meet()
        held = _host(tensor)
        every = held.new_empty((self.size(), *held.shape))
        self.comm.Allgather(held.numpy(), every.numpy())
        return every

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """Give one rank what each has; the others gather for themselves, too."""
        for place, tensor in enumerate(inputs):
            every = self._gathered(tensor)
            for part, held in zip(outputs[place] if outputs else (), every, strict=False):
                _give(part, held)
        return Done(outputs)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks."""
        self._meet()
        return Done([torch.zeros(1)])

    def getBackendName(self) -> str:
        """As torch calls it."""
        return NAME

    @property
    def pg_name(self) -> str:
        """As torch calls it."""
        return NAME


def _over(request: Any, seconds: float) -> bool:
    """Whether a request is done within that time."""
    began = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        if waited > SPIN:
            time.sleep(PAUSE)
    return True


def _operation(how: Any) -> Any:
    known = {"SUM": MPI.SUM, "AVG": MPI.SUM, "MIN": MPI.MIN, "MAX": MPI.MAX, "PRODUCT": MPI.PROD}
    return next(operation for name, operation in known.items() if how == getattr(dist.ReduceOp, name))


def _host(tensor: Tensor) -> Tensor:
    """The tensor itself where MPI can take it, else a copy: on the host, in one piece, of a kind that it knows."""
    held = tensor.detach().cpu().contiguous()
    if held.dtype in SUMMED:
        return held.to(SUMMED[held.dtype])
    return held.view(torch.uint8) if held.dtype == torch.bool else held


def _give(tensor: Tensor, held: Tensor) -> None:
    if tensor.data_ptr() != held.data_ptr():
        tensor.detach().copy_(held)


def _make(options: Any, _: Any) -> Group:
    """The group that torch asks for: all ranks, or some.

    Raises:
        MPIError: MPI has not started them.
    """
    every, ranks, size = MPI.COMM_WORLD, options.global_ranks_in_group, options.group_size
    started = size == 1 or not STARTED.isdisjoint(os.environ)
    if started and not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if not started or (not ranks and every.Get_size() != size):
        raise MPIError(f"{SETTING}: MPI did not start these {size} processes; say mpirun -np {size} python …")
    comm = every.Create_group(every.Get_group().Incl(ranks)) if ranks else every.Dup()
    return Group(comm, options.store, options.timeout, world=not ranks)


def register() -> None:
    """Make it known to torch.

    Raises:
        ImportError: mpi4py is not there, or no MPI library.
    """
    global MPI
    if MPI is not None:
        return
    try:
        import mpi4py

        # A process that failed would wait in MPI's end for the others, which wait for it.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI as library
    except ModuleNotFoundError:
        raise ImportError(f"{SETTING}: mpi4py is not installed; pip install 'boltcutter[mpi]'") from None
    except (ImportError, RuntimeError) as error:
        told = " ".join(str(error).split())
        raise ImportError(f"{SETTING}: no MPI library ({told}); on Debian: apt-get install openmpi-bin") from None
    MPI = library
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
    atexit.register(_end)


def _end() -> None:
    """End MPI where that does not wait for a rank which is gone."""
    for group in list(Group.there):
        group.shutdown()
    if MPI.Is_initialized() and not MPI.Is_finalized() and Group.together:
        MPI.Finalize()
