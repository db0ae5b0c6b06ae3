"""Distributed data parallel with what Lightning's lacks: compressed gradients, and processes that scripts can start."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import strategies
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from boltcutter.strategy import mpi
from boltcutter.strategy.shared_memory import SharedMemory, average_hook

COMPRESSED: dict[str, Callable[..., Any]] = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # an interrupt comes from the keyboard to all
CAUGHT = (*FORWARDED, signal.SIGINT)
LOGS = ("lightning.pytorch", "lightning.fabric")
PATIENCE = 15.0  # seconds in which a process may tell which other failed, before it is ended
ALL_AT_ONCE = 1 << 16  # MiB of gradients in a bucket
AGAIN = 0.2  # seconds after which a signal comes again to a process that does not listen yet


class DDPStrategy(strategies.DDPStrategy):
    """A process for each device, gradients averaged in buckets while others are still being computed.

    With accumulated batches they are sent once, with the last.

    Args:
        compress: Send gradients in two bytes a number; averages are rounded to what these can tell.
        shared_memory: Ranks that are all on one machine agree through memory that they share, and CPUs average their
            gradients there; else through the process group.
        start_method: ``popen`` starts the script again for each device. ``fork`` and ``spawn`` start copies of this
            process, as a notebook needs it; ``fork`` only before CUDA is used, which scripts do.
        options: As for Lightning's ``DDPStrategy`` and torch's ``DistributedDataParallel``.
            ``process_group_backend=mpi4py`` has MPI carry all that ranks say to one another.
    """

    def __init__(
        self,
        compress: Literal["bf16", "fp16"] | None = None,
        *,
        shared_memory: bool = True,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        self.compress, self.shared_memory = compress, shared_memory
        self._memory: SharedMemory | None = None
        _know_backends(options.get("process_group_backend") or "")
        super().__init__(start_method=start_method, **options)

    def setup(self, trainer: L.Trainer) -> None:
        """Wrap the model.

        Raises:
            WorkerError: Torch would break off in the first backward pass.
        """
        parts = trainer.accumulate_grad_batches
        if parts > 1 and self._ddp_kwargs.get("static_graph"):
            raise WorkerError(
                f"trainer.strategy.static_graph=true, trainer.accumulate_grad_batches={parts}: torch cannot do both; "
                "leave static_graph out"
            )
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, unsynchronized_buffers(model))  # type: ignore[no-untyped-call]
        if self.shared_memory and self.root_device.type == "cpu" and self.num_nodes == 1:
            # Nothing is sent while a processor computes, so ranks wait for each other once, and not for each bucket.
            self._ddp_kwargs.setdefault("bucket_cap_mb", ALL_AT_ONCE)
        return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        if self.compress:
            send, model = COMPRESSED[self.compress], cast(Any, self.model)
            # By another name, since torch refuses these by theirs where there is no NCCL, though gloo does the same.
            model.register_comm_hook(None, lambda group, bucket: send(group, bucket))
        if self.shared_memory and self.world_size > 1 and self._timeout and dist.get_backend() in ("gloo", "nccl"):
            self._memory = SharedMemory.create(self.global_rank, self.world_size, self._timeout)
            averages = self.root_device.type == "cpu" and not self.compress and not has_sparse_gradients(self.model)
            if self._memory and averages:
                cast(Any, self.model).register_comm_hook(
                    self._memory, lambda memory, bucket: average_hook(memory, bucket)
                )

    def all_reduce_max(self, number: int) -> int | None:
        """The largest of what all ranks give, if they can tell without the process group; else None.

        Raises:
            RuntimeError: Another rank has left, is late, or does something else.
        """
        return self._memory.all_reduce_max(number) if self._memory else None

    def teardown(self) -> None:
        """Leave the others."""
        if self._memory:
            self._memory.close()
            self._memory = None
        super().teardown()

    def _configure_launcher(self) -> None:
        check_fork(self._start_method, self.parallel_devices or [])
        super()._configure_launcher()
        if isinstance(self._launcher, _MultiProcessingLauncher):
            self._launcher = Launcher(self, self._start_method)
        elif type(self._launcher) is _SubprocessScriptLauncher:
            assert self.cluster_environment
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)


def unsynchronized_buffers(model: nn.Module) -> list[str]:
    """Buffers that need not go from the first rank to the others at each step.

    Those are statistics of norms, which training does not read, and what no checkpoint keeps, since it never changes.
    """
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if isinstance(module, _NormBase) or name in module._non_persistent_buffers_set
    ]


def check_fork(start_method: str, devices: Sequence[torch.device]) -> None:
    """Refuse to fork a process that uses CUDA, which no copy of it can use then.

    Raises:
        ValueError: It does, and the copies are to train on GPUs.
    """
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if start_method == "fork" and any(d.type == "cuda" for d in devices) and used:
        raise ValueError(
            "trainer.strategy.start_method=fork: this process has used CUDA, so that copies of it cannot; take popen, "
            "or spawn in a notebook"
        )


def _know_backends(text: str) -> None:
    """See that torch knows what carries messages, as ``gloo`` or ``cpu:gloo,cuda:nccl``.

    Raises:
        ValueError: It does not.
    """
    for name in [part.rpartition(":")[2] for part in text.split(",") if part]:
        if name == mpi.NAME:
            mpi.register()
        elif name not in dist.Backend.backend_list or (name == "mpi" and not dist.is_mpi_available()):
            raise ValueError(
                f"trainer.strategy.process_group_backend={text}: torch has no {name} here; try gloo, nccl or mpi4py"
            )


class WorkerExitError(SystemExit):
    """A process that was started from here left before its work was done, as after a signal.

    Args:
        code: Its exit status.
        status: What it would have been without a launcher that waits for a mark.
        reason: In words.
    """

    def __init__(self, code: int, status: int, reason: str) -> None:
        super().__init__(code)
        self.status, self.reason = status, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerExitError, (self.code, self.status, self.reason)

    def __str__(self) -> str:
        return self.reason


class WorkerError(RuntimeError):
    """What cannot work, or a process that was started from here and told why it failed."""

    hide_traceback = True


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the script again for each device but the first, and ends all when one has failed.

    Lightning's ends them at once, before this process can say which one it was.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the others, and run ``function`` here."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            Observer(os.getpid(), self.procs).start()
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)


class Observer(_ChildProcessObserver):
    """Gives a process time to find out for itself that another has failed."""

    def _terminate_all(self) -> None:
        time.sleep(PATIENCE)
        super()._terminate_all()


class Launcher(_MultiProcessingLauncher):
    """Starts copies of this process; signals reach them, and what they say on leaving reaches this one.

    Signals are held back while processes are being started, which takes seconds with ``spawn``: one that is not there
    yet would never get it, and one that does not listen yet would end and leave the others waiting for it.
    """

    def __init__(self, *args: Any) -> None:
        self._started: list[Any] = []
        self._forwarded = 0  # number of the signal that came last
        self._before: dict[int, Any] = {}  # what signals did in this process
        super().__init__(*args)

    @property
    def procs(self) -> list[Any]:
        """The processes, once all of them have been started."""
        return self._started

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self._started = processes
        if processes:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function`` in each process, and give what the first one returns.

        Raises:
            WorkerExitError: They left for a signal.
            WorkerError: One failed with an error that explains itself, or none could be started.
        """
        try:
            check_fork(self._start_method, getattr(self._strategy, "parallel_devices", None) or [])
        except ValueError as error:
            raise WorkerError(str(error)) from None
        with self._forwarding():
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except ProcessRaisedException as error:
                where, _, text = str(error).rstrip().splitlines()[-1].partition(": ")
                if where.startswith(f"{__name__.partition('.')[0]}."):
                    raise WorkerError(text) from None
                raise
            except ProcessExitedException as error:
                raise WorkerError(f"{' '.join(str(error).split())}; logs/ may tell more") from None

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._forwarded = 0
        self._before = {number: signal.getsignal(number) or signal.SIG_DFL for number in CAUGHT}
        for forwarded in FORWARDED:
            signal.signal(forwarded, self._forward)
        signal.signal(signal.SIGINT, lambda number, frame: None)
        resource_tracker.ensure_running()  # it would let signals through again
        signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
        if callable(self._before.get(self._forwarded)):  # they had ended before it reached them
            signal.raise_signal(self._forwarded)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._forwarded = number
        self.kill(number)

    def _catch(self) -> None:
        """Let signals come, and come again until somebody in this process listens, if anybody was to."""
        for number, handler in self._before.items():
            signal.signal(number, _until_somebody_listens(handler))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)

    def _wrapping_function(self, process_idx: int, trainer: Any, *rest: Any) -> None:
        self._catch()
        queue = rest[3]
        rank_zero_only.rank = process_idx  # type: ignore[attr-defined]  # a fork believes itself to be the first
        code: int = 1
        try:
            super()._wrapping_function(process_idx, trainer, *rest)
            code = 0
        except SystemExit as error:
            left = error.code if isinstance(error.code, int) else 0
            code = getattr(error, "status", left)
            if process_idx == 0:
                queue.put(WorkerExitError(left, code, getattr(error, "reason", f"exit {left}")))
        except KeyboardInterrupt:  # which torch takes for an end like any other
            code = 128 + signal.SIGINT
            if process_idx == 0:
                queue.put(WorkerExitError(code, code, "interrupted"))
        finally:
            if process_idx == 0 and trainer is not None:
                for logger in trainer.loggers:
                    getattr(logger, "close", lambda code: None)(code)
            if dist.is_initialized() and not code:
                dist.barrier()
                dist.destroy_process_group()

    def get_extra_results(self, trainer: L.Trainer) -> dict[str, Any]:
        """Metrics, and how far training has come: what is logged later belongs to its last step."""
        return {**super().get_extra_results(trainer), "fit_loop": trainer.fit_loop.state_dict()}

    def update_main_process_results(self, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        """Take them over."""
        super().update_main_process_results(trainer, extra)
        trainer.fit_loop.load_state_dict(extra["fit_loop"])

    def _recover_results_in_main_process(self, worker_output: Any, trainer: L.Trainer) -> None:
        if isinstance(worker_output, WorkerExitError):
            raise worker_output
        if worker_output.weights_path is not None:
            path = Path(worker_output.weights_path)
            trainer.lightning_module.load_state_dict(torch.load(path, weights_only=True), strict=False)
            path.unlink()
            with suppress(OSError):
                os.rmdir(path.parent)
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)

    def __getstate__(self) -> dict[str, Any]:
        before = {number: _until_somebody_listens(handler) for number, handler in self._before.items()}
        levels = {name: logging.getLogger(name).level for name in LOGS}
        settings = torch.get_float32_matmul_precision(), list(warnings.filters), levels
        return {**vars(self), "_started": [], "_before": before, "_settings": settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set in a spawned process what a forked one inherits."""
        matmul, filters, levels = state.pop("_settings")
        vars(self).update(state)
        torch.set_float32_matmul_precision(matmul)
        warnings.filters[:] = filters  # type: ignore[index]
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _until_somebody_listens(handler: Any) -> Any:
    """What a signal does in a new process whose parent had ``handler`` for it; nobody replaces Python's own."""
    return _again if callable(handler) and handler is not signal.default_int_handler else handler


def _again(number: int, frame: FrameType | None) -> None:
    later = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
    later.daemon = True
    later.start()


def has_sparse_gradients(model: nn.Module | None) -> bool:
    """Whether an embedding of the model has sparse gradients, which gloo averages but shared memory does not."""
    layers = model.modules() if model else ()
    return any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse for layer in layers)
