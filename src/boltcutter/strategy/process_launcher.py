"""Ranks that are forked or spawned from this process, as a notebook requires."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.utilities import rank_zero_only
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from boltcutter.protocols import ClosesWithExitCode, PlannedExit
from boltcutter.strategy.errors import StrategyError

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # not SIGINT: a terminal sends it to all
HANDLED = (*FORWARDED, signal.SIGINT)
LOGGERS = ("lightning.pytorch", "lightning.fabric")
RETRY_DELAY = 0.2  # seconds after which a signal is sent again to a process without handlers


def check_fork(start_method: str, devices: Sequence[torch.device]) -> None:
    """Check that no process with an initialized CUDA context is forked, as CUDA does not work in the child."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if start_method == "fork" and any(d.type == "cuda" for d in devices) and used:
        raise ValueError(
            "trainer.strategy.start_method=fork: CUDA is initialized in this process, and does not work in a fork of "
            "it; use popen, or spawn in a notebook"
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


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Fork or spawn the ranks; forward signals to them, and exit with their status and message.

    Signals are blocked while processes are being started, which takes seconds with ``spawn``: a process that does not
    exist yet would miss them, and one without handlers would be killed while the other ranks wait for it.
    """

    def __init__(self, strategy: Any, start_method: Any) -> None:
        check_fork(start_method, getattr(strategy, "parallel_devices", None) or [])
        self._started: list[Any] = []
        self._forwarded = 0  # number of the last signal
        self._previous_handlers: dict[int, Any] = {}  # of this process
        super().__init__(strategy, start_method)

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
                if where.startswith("boltcutter"):
                    raise StrategyError(text, where.rpartition(".")[2]) from None
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
        except Exception as error:
            if trainer is not None:
                # torch sends SIGTERM to the other ranks as soon as one has exited, and kills them 30 seconds later.
                signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
                _interrupt(trainer, error)  # Lightning does so around the launcher only, where no callback has trained
            raise
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
