"""An MPI backend for torch.distributed, through mpi4py; torch's own wheels have none.

Imported only if it is chosen as ``process_group_backend``.
"""

# torch's stubs declare overloads, of which it calls only those implemented here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined, unused-ignore]
from torch.futures import Future

from boltcutter.strategy.errors import StrategyError

NAME = "mpi4py"
SETTING = f"trainer.strategy.process_group_backend={NAME}"
SPIN = 1e-3  # seconds of busy waiting
PAUSE = 5e-4  # seconds between two polls after that
CHECK_INTERVAL = 0.5  # seconds between checks that no rank has failed
SHUTDOWN_TIMEOUT = 8.0  # seconds that a rank waits for the others when it shuts down
LAUNCHER_VARIABLES = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}  # mpirun sets at least one of them
REDUCTION_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # MPI has no 16-bit floats


def completed_work(result: Any) -> Work:
    """The handle of a collective that is already completed."""
    devices: set[torch.device] = set()
    apply_to_collection(result, Tensor, lambda tensor: devices.add(tensor.device))
    future: Future[Any] = Future(devices=[device for device in devices if device.type != "cpu"])
    future.set_result(result)
    work: Work = _create_work_from_future(future)
    return work


class MPIProcessGroup(dist.ProcessGroup):
    """A process group that communicates through an MPI communicator.

    Collectives are synchronous. Each begins with a barrier with a timeout, so that ranks detect one that has failed.
    Tensors on a device are copied to the host.
    """

    can_finalize = False  # whether all ranks have shut down, so that MPI can be finalized
    active: ClassVar[list[MPIProcessGroup]] = []  # groups of all ranks that are not shut down

    def __init__(self, comm: Any, store: Any, timeout: timedelta, *, world: bool) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())  # type: ignore[call-arg, unused-ignore]
        self.comm, self.store, self.timeout = comm, store, timeout.total_seconds()
        self.shutdown_comm = comm.Dup() if world else None
        if world:
            MPIProcessGroup.active.append(self)

    def _synchronize(self) -> None:
        """Wait for all ranks."""
        request, end = self.comm.Ibarrier(), time.monotonic() + self.timeout
        while not _wait(request, CHECK_INTERVAL):
            if self.store.check(["left"]):
                raise RuntimeError(f"{NAME}: Connection closed by peer")
            if time.monotonic() > end:
                raise RuntimeError(f"{NAME}: Timed out waiting {self.timeout:.0f} s for another rank")

    def shutdown(self) -> None:
        """Shut down together with the other ranks; if they do not, notify ranks that wait for this one."""
        if self.shutdown_comm is None or self not in MPIProcessGroup.active:
            return
        MPIProcessGroup.active.remove(self)
        request = self.shutdown_comm.Ibarrier()
        if not _wait(request, 2 * CHECK_INTERVAL):
            with suppress(RuntimeError):  # rank 0, which serves the store, may have exited
                self.store.set("left", "1")
        MPIProcessGroup.can_finalize = _wait(request, SHUTDOWN_TIMEOUT)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce tensors in place on all ranks, by the operation in ``opts``, or else their sum."""
        reduce_op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        from mpi4py import MPI

        known = {"SUM": MPI.SUM, "AVG": MPI.SUM, "MIN": MPI.MIN, "MAX": MPI.MAX, "PRODUCT": MPI.PROD}
        operation = next(known[name] for name in known if reduce_op == getattr(dist.ReduceOp, name))
        for tensor in tensors:
            self._synchronize()
            host = _to_host(tensor)
            self.comm.Allreduce(MPI.IN_PLACE, host.numpy(), op=operation)
            _copy_back(tensor, host / self.size() if reduce_op == dist.ReduceOp.AVG else host)
        return completed_work(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """Broadcast tensors from one rank to all ranks."""
        for tensor in tensors:
            self._synchronize()
            host = _to_host(tensor)
            self.comm.Bcast(host.numpy(), root=opts.rootRank)
            _copy_back(tensor, host)
        return completed_work(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Gather the tensors of all ranks on all ranks."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            for part, host in zip(parts, self._gather_all(tensor), strict=True):
                _copy_back(part, host)
        return completed_work(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Gather the tensors of all ranks into a single tensor."""
        _copy_back(output, self._gather_all(tensor).view(output.shape))
        return completed_work([output])

    _allgather_base = all_gather_single  # its name before torch 2.13

    def _gather_all(self, tensor: Tensor) -> Tensor:
        self._synchronize()
        host = _to_host(tensor)
        gathered = host.new_empty((self.size(), *host.shape))
        self.comm.Allgather(host.numpy(), gathered.numpy())
        return gathered

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks."""
        self._synchronize()
        return completed_work([torch.zeros(1)])

    def _get_backend(self, device: torch.device) -> Any:
        """What torch asks for a GPU that is bound to the group: tensors of any device are copied to the host."""
        return SimpleNamespace(supports_splitting=False)

    def getBackendName(self) -> str:
        """Name of the backend."""
        return NAME

    @property
    def pg_name(self) -> str:
        """Name of the process group."""
        return NAME


def _wait(request: Any, seconds: float) -> bool:
    """Wait for a request; False if it times out."""
    began = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        if waited > SPIN:
            time.sleep(PAUSE)
    return True


def _to_host(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy if it is not contiguous, not on the host, or of a type that MPI does not support."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype in REDUCTION_DTYPES:
        return host.to(REDUCTION_DTYPES[host.dtype])
    return host.view(torch.uint8) if host.dtype == torch.bool else host


def _copy_back(tensor: Tensor, host: Tensor) -> None:
    if tensor.data_ptr() != host.data_ptr():
        tensor.detach().copy_(host)


def _create_group(options: Any, _: Any) -> MPIProcessGroup:
    """Create a process group of all ranks or some, as called by torch."""
    from mpi4py import MPI

    world, ranks, size = MPI.COMM_WORLD, options.global_ranks_in_group, options.group_size
    started = size == 1 or not LAUNCHER_VARIABLES.isdisjoint(os.environ)
    if started and not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if not started or (not ranks and world.Get_size() != size):
        raise StrategyError(f"{SETTING}: MPI did not start these {size} processes; run mpirun -np {size} python …")
    comm = world.Create_group(world.Get_group().Incl(ranks)) if ranks else world.Dup()
    return MPIProcessGroup(comm, options.store, options.timeout, world=not ranks)


@cache
def register() -> None:
    """Import mpi4py, and register the backend with torch.

    Raises:
        ImportError: mpi4py or the MPI library is not installed.
    """
    try:
        import mpi4py

        # Finalizing MPI automatically would deadlock: a failed process would wait for ranks that wait for it.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI  # noqa: F401 - also loads the MPI library
    except ModuleNotFoundError:
        raise ImportError(f"{SETTING}: mpi4py is not installed; pip install 'boltcutter[mpi]'") from None
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ImportError(f"{SETTING}: no MPI library ({reason}); on Debian: apt-get install openmpi-bin") from None
    dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=["cpu", "cuda"])
    atexit.register(_finalize)


def _finalize() -> None:
    """Finalize MPI, unless that would wait for a rank that has failed."""
    for group in list(MPIProcessGroup.active):
        group.shutdown()
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized() and MPIProcessGroup.can_finalize:
        MPI.Finalize()
