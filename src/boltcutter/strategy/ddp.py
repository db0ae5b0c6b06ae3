"""Lightning's DDP with gradient compression, shared memory on one host, and scripts that fork or spawn ranks."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import strategies
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from boltcutter.protocols import ClosesWithExitCode, PlannedExit
from boltcutter.strategy.buckets import FixedBucketsDDP
from boltcutter.strategy.errors import StrategyError
from boltcutter.strategy.reducer import UnusedParameters, has_sparse_gradients, unsynchronized_buffers
from boltcutter.strategy.shared_memory import SharedMemory, average_hook

COMPRESSION_HOOKS: dict[str, Callable[..., Any]] = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # not SIGINT: a terminal sends it to all
HANDLED = (*FORWARDED, signal.SIGINT)
LOGGERS = ("lightning.pytorch", "lightning.fabric")
EXIT_TIMEOUT = 15.0  # seconds that a process has to report which other one failed, before it is terminated
SINGLE_BUCKET = 1 << 16  # MiB; larger than the gradients of any model that fits
RETRY_DELAY = 0.2  # seconds after which a signal is sent again to a process without handlers


class DDPStrategy(strategies.DDPStrategy):
    """One process per device; gradients are averaged in buckets, on GPUs during the backward pass.

    With gradient accumulation they are sent once per optimizer step.

    Args:
        compress: Data type in which gradients are sent; averages are rounded to its precision.
        shared_memory: If all ranks run on one host, average gradients of CPU training in shared memory, and agree on
            signals there. Gradients on a GPU are always averaged by the process group.
        start_method: ``popen`` runs the script again for each device. ``fork`` and ``spawn`` start processes from this
            one, as a notebook requires; ``fork`` works only before CUDA is initialized.
        options: Arguments of Lightning's ``DDPStrategy`` and torch's ``DistributedDataParallel``.
            ``process_group_backend=mpi4py`` uses MPI for all communication; it is imported only then.
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
        self._unused: UnusedParameters | None = None
        _register_backends(options.get("process_group_backend") or "")
        super().__init__(start_method=start_method, **options)

    def setup(self, trainer: L.Trainer) -> None:
        """Wrap the model.

        Raises:
            StrategyError: A static graph is combined with gradient accumulation, which torch does not support.
        """
        accumulated = trainer.accumulate_grad_batches
        if accumulated > 1 and self._ddp_kwargs.get("static_graph"):
            raise StrategyError(
                f"trainer.strategy.static_graph=true, trainer.accumulate_grad_batches={accumulated}: torch does not "
                "support both; remove static_graph"
            )
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, unsynchronized_buffers(model))  # type: ignore[no-untyped-call]
        if self.shared_memory and self.root_device.type == "cpu" and self.num_nodes == 1:
            # On CPUs communication does not overlap with computation, so a single bucket needs one wait, not several.
            self._ddp_kwargs.setdefault("bucket_cap_mb", SINGLE_BUCKET)
        devices = self.determine_ddp_device_ids()
        stream: Any = torch.cuda.Stream  # of its own, as Lightning and CUDA graphs need
        with torch.cuda.stream(stream()) if devices else nullcontext():
            overlaps = self.root_device.type != "cpu"
            wrapped = FixedBucketsDDP(model, overlaps=overlaps, device_ids=devices, **self._ddp_kwargs)
        self._unused = UnusedParameters(
            wrapped, lambda found: self.reduce_boolean_decision(found, all=False), self._register_ddp_hooks
        )
        return wrapped

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients, and average them also if the loss does not use all parameters."""
        self.pre_backward(closure_loss)
        plugin, module, unused = self.precision_plugin, self.lightning_module, self._unused
        assert module is not None
        closure_loss = plugin.pre_backward(closure_loss, module)
        if unused:
            unused.before_backward(closure_loss)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if unused:
            unused.after_backward()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        if self.compress:
            compression_hook, model = COMPRESSION_HOOKS[self.compress], cast(Any, self.model)
            # In a lambda, since torch rejects these hooks by name without NCCL, although they work with gloo.
            model.register_comm_hook(None, lambda group, bucket: compression_hook(group, bucket))
        if self.shared_memory and self.world_size > 1 and self._timeout and dist.get_backend() in ("gloo", "nccl"):
            self._memory = self._memory or SharedMemory.create(self.global_rank, self.world_size, self._timeout)
            on_cpu = self.root_device.type == "cpu"  # averaging GPU gradients there would copy them to the host
            if self._memory and on_cpu and not self.compress and not has_sparse_gradients(self.model):
                if self._unused:
                    self._unused.can_recover = True
                cast(Any, self.model).register_comm_hook(
                    self._memory, lambda memory, bucket: average_hook(memory, bucket)
                )

    def all_reduce_max(self, number: int) -> int | None:
        """The maximum of a number over all ranks, through shared memory; None if it is not available.

        Args:
            number: Signed 64-bit integer.

        Raises:
            RuntimeError: Another rank has failed, has timed out, or calls another operation.
        """
        return self._memory.all_reduce_max(number) if self._memory else None

    def teardown(self) -> None:
        """Release the shared memory."""
        if self._memory:
            self._memory.close()
            self._memory = None
        super().teardown()

    def _configure_launcher(self) -> None:
        check_fork(self._start_method, self.parallel_devices or [])
        super()._configure_launcher()
        if isinstance(self._launcher, _MultiProcessingLauncher):
            self._launcher = MultiProcessingLauncher(self, self._start_method)
        elif type(self._launcher) is _SubprocessScriptLauncher:
            assert self.cluster_environment
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)


def check_fork(start_method: str, devices: Sequence[torch.device]) -> None:
    """Check that no process with an initialized CUDA context is forked, as CUDA does not work in the child.

    Args:
        start_method: Start method of the ranks.
        devices: Devices of the ranks.

    Raises:
        ValueError: CUDA is initialized, and the ranks are to be forked and train on GPUs.
    """
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if start_method == "fork" and any(d.type == "cuda" for d in devices) and used:
        raise ValueError(
            "trainer.strategy.start_method=fork: CUDA is initialized in this process, and does not work in a fork of "
            "it; use popen, or spawn in a notebook"
        )


def _register_backends(text: str) -> None:
    """Check that torch has the backends, given as ``gloo`` or ``cpu:gloo,cuda:nccl``; register mpi4py if it is used.

    Raises:
        ValueError: A backend is not available.
    """
    for name in [part.rpartition(":")[2] for part in text.split(",") if part]:
        if name == "mpi4py":
            from boltcutter.strategy import mpi

            mpi.register()
        elif name not in dist.Backend.backend_list or (name == "mpi" and not dist.is_mpi_available()):
            raise ValueError(
                f"trainer.strategy.process_group_backend={text}: torch has no {name} here; try gloo, nccl or mpi4py"
            )


class WorkerExitError(SystemExit):
    """A forked or spawned rank exited before training was finished, such as after a signal.

    Args:
        code: Its exit status.
        status: Its exit status without a launcher that requeues the run.
        reason: The reason, for the message.
    """

    is_collective = True

    def __init__(self, code: int, status: int, reason: str) -> None:
        super().__init__(code)
        self.status, self.reason = status, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerExitError, (self.code, self.status, self.reason)

    def __str__(self) -> str:
        return self.reason


class ScriptLauncher(_SubprocessScriptLauncher):
    """Run the script again for each device but the first, and terminate all processes when one has failed.

    Lightning's launcher terminates them immediately, before this process can report which one failed.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks, and run ``function`` in this process."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            ChildProcessObserver(os.getpid(), self.procs).start()
        return function(*args, **kwargs)


class ChildProcessObserver(_ChildProcessObserver):
    """Give processes time to detect by themselves that another one has failed."""

    def _terminate_all(self) -> None:
        time.sleep(EXIT_TIMEOUT)
        super()._terminate_all()


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Fork or spawn the ranks; forward signals to them, and exit with their status and message.

    Signals are blocked while processes are being started, which takes seconds with ``spawn``: a process that does not
    exist yet would miss them, and one without handlers would be killed while the other ranks wait for it.
    """

    def __init__(self, *args: Any) -> None:
        self._started: list[Any] = []
        self._forwarded = 0  # number of the last signal
        self._previous_handlers: dict[int, Any] = {}  # of this process
        super().__init__(*args)

    @property
    def procs(self) -> list[Any]:
        """The processes, once all of them have been started."""
        return self._started

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self._started = processes
        if processes:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function`` on each rank, and return the result of rank 0.

        Raises:
            WorkerExitError: The ranks exited because of a signal.
            StrategyError: A rank failed with an error of this package, or could not be started.
        """
        try:
            check_fork(self._start_method, getattr(self._strategy, "parallel_devices", None) or [])
        except ValueError as error:
            raise StrategyError(str(error)) from None
        with self._forwarding():
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except ProcessRaisedException as error:
                where, _, text = str(error).rstrip().splitlines()[-1].partition(": ")
                if where.startswith(f"{__name__.partition('.')[0]}."):
                    raise StrategyError(text) from None
                raise
            except ProcessExitedException as error:
                raise StrategyError(f"{' '.join(str(error).split())}; see logs/ for more") from None

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._forwarded = 0
        self._previous_handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in HANDLED}
        for forwarded in FORWARDED:
            if self._previous_handlers[forwarded] is not signal.SIG_IGN:  # as nohup sets SIGHUP
                signal.signal(forwarded, self._forward)
        signal.signal(signal.SIGINT, lambda number, frame: None)
        resource_tracker.ensure_running()  # its start unblocks signals, so start it before they are blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            yield
        finally:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        if callable(self._previous_handlers.get(self._forwarded)):  # the ranks finished before it reached them
            signal.raise_signal(self._forwarded)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._forwarded = number
        self.kill(number)

    def _unblock_signals(self) -> None:
        """Unblock signals in a rank; those that the parent handled are retried until the rank has handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, _initial_handler(handler))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def _wrapping_function(self, process_idx: int, trainer: Any, *rest: Any) -> None:
        # In place of torch's SIGINT: Linux may send it once for each thread of a killed parent, and a second SIGINT
        # ends a rank before it has saved.
        _prctl_pr_set_pdeathsig(signal.SIGTERM)
        self._unblock_signals()
        queue = rest[3]
        rank_zero_only.rank = process_idx  # type: ignore[attr-defined]  # a fork inherits rank 0
        code: int = 1
        try:
            super()._wrapping_function(process_idx, trainer, *rest)
            code = 0
        except SystemExit as error:
            exit_code = error.code if isinstance(error.code, int) else 0
            code, reason = exit_code, f"exit {exit_code}"
            if isinstance(error, PlannedExit):
                code, reason = error.status, error.reason
            if process_idx == 0:
                queue.put(WorkerExitError(exit_code, code, reason))
        except KeyboardInterrupt:  # which torch would treat as a normal exit
            code = 128 + signal.SIGINT
            if process_idx == 0:
                queue.put(WorkerExitError(code, code, "interrupted"))
        finally:
            if process_idx == 0 and trainer is not None:
                for logger in trainer.loggers:
                    if isinstance(logger, ClosesWithExitCode):
                        logger.close(code)
            if dist.is_initialized() and not code:
                dist.barrier()
                dist.destroy_process_group()

    def get_extra_results(self, trainer: L.Trainer) -> dict[str, Any]:
        """Metrics, and the progress of training, so that later logging has the right step."""
        return {**super().get_extra_results(trainer), "fit_loop": trainer.fit_loop.state_dict()}

    def update_main_process_results(self, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        """Restore them in the main process."""
        super().update_main_process_results(trainer, extra)
        trainer.fit_loop.load_state_dict(extra["fit_loop"])

    def _recover_results_in_main_process(self, worker_output: Any, trainer: L.Trainer) -> None:
        if isinstance(worker_output, WorkerExitError):
            raise worker_output
        if worker_output.weights_path is not None:
            path = Path(worker_output.weights_path)
            trainer.lightning_module.load_state_dict(torch.load(path, "cpu", weights_only=True), strict=False)
            path.unlink()
            with suppress(OSError):
                os.rmdir(path.parent)
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)

    def __getstate__(self) -> dict[str, Any]:
        handlers = {number: _initial_handler(handler) for number, handler in self._previous_handlers.items()}
        levels = {name: logging.getLogger(name).level for name in LOGGERS}
        settings = torch.get_float32_matmul_precision(), list(warnings.filters), levels
        return {**vars(self), "_started": [], "_previous_handlers": handlers, "_settings": settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in a spawned process the settings that a forked one inherits."""
        matmul, filters, levels = state.pop("_settings")
        vars(self).update(state)
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = matmul != "highest"
        warnings.filters[:] = filters  # type: ignore[index]
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _initial_handler(handler: Any) -> Any:
    """The handler of a signal in a new rank, given that of the parent: retry if the rank will install its own."""
    return _retry if callable(handler) and handler is not signal.default_int_handler else handler


def _retry(number: int, frame: FrameType | None) -> None:
    timer = threading.Timer(RETRY_DELAY, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
