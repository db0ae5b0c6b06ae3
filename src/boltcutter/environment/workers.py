"""DataLoader workers that ignore the signals handled by the training process.

A launcher or scheduler that stops a run signals every process of its group. A worker killed by that signal would
abort the training process before it has saved a checkpoint, because torch raises ``DataLoader worker is killed by
signal`` there.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from boltcutter.environment import stop_signals as signals

# Iterators that start workers: those of torch, and of torchdata if it is imported.
ITERATORS = {
    "torch.utils.data.dataloader": "_MultiProcessingDataLoaderIter",
    "torchdata.stateful_dataloader.stateful_dataloader": "_StatefulMultiProcessingDataLoaderIter",
}
InitFunction = Callable[[int], None]


def protect_workers() -> None:
    """Patch the DataLoader iterators of this process to start workers that ignore the signals handled here.

    Workers are started with these signals blocked, so that a signal that arrives before the worker's first instruction
    does not kill it either.
    """
    for module, name in ITERATORS.items():
        iterator = getattr(sys.modules.get(module), name, None)
        if iterator is not None and not hasattr(iterator.__init__, "__wrapped__"):
            iterator.__init__ = _protected(iterator.__init__)


def _protected(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def initialize_protected(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        if not signals.handlers_installed():
            initialize(self, loader, *args, **kwargs)
            return
        context = loader.multiprocessing_context or multiprocessing.get_context()
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # its start unblocks signals, so start it before they are blocked
        init_function = loader.worker_init_fn
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
        try:
            loader.worker_init_fn = functools.partial(_initialize_worker, init_function)
            initialize(self, loader, *args, **kwargs)
            for worker in self._workers:
                # torch and multiprocessing terminate a worker that does not exit in time by SIGTERM, now ignored.
                worker._popen.terminate = worker._popen.kill
        finally:
            loader.worker_init_fn = init_function
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return initialize_protected


def _initialize_worker(init_function: InitFunction | None, worker_id: int) -> None:
    """Ignore signals by a handler; unlike ``SIG_IGN`` or a mask, it is not inherited by programs that a worker starts.

    A signal that arrives after the training process has exited ends the worker.
    """
    parent = os.getppid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(128 + number)

    for number in signals.SIGNALS:
        signal.signal(number, ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.SIGNALS)
    if init_function is not None:
        init_function(worker_id)
