"""Report the validations of a trial to the search that started it."""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from boltcutter.callback.preemption import Preemption
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.environment.process import is_rank_zero
from boltcutter.environment.startup import TRIAL_FD


def trial_reporter(cfg: Settings) -> list[Callback]:
    """The callback that reports to a search; empty if no search started this process."""
    descriptor = os.environ.get(TRIAL_FD)
    if descriptor is None:
        return []
    if not is_rank_zero():
        return [TrialReporter(None)]
    connection = socket.socket(fileno=int(descriptor))
    if _is_closed(connection):  # the search was killed while this process started
        os.kill(os.getpid(), signal.SIGTERM)
    return [TrialReporter(connection)]


class TrialReporter(Callback):
    """Sends all metrics after each validation as a line of JSON, and does what the search answers.

    The answers are ``continue``, ``stop``, which ends training like early stopping, and ``save``, which writes a
    checkpoint before the next batch, reports its path and waits for another answer. If the search has ended, the trial
    saves a checkpoint and exits, as on SIGTERM.

    Args:
        connection: Socket that is connected to the search; None on all ranks but the first.
    """

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection
        self._lines = connection.makefile("r") if connection else None
        self._saves = False  # before the next batch

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the metrics."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._follow(trainer, {"step": trainer.global_step, "metrics": metrics})

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save a checkpoint if the search asked for one."""
        if not self._saves or batch_idx % trainer.accumulate_grad_batches:
            return
        self._saves = False
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        preemption = next((c for c in callbacks if isinstance(c, Preemption)), None)
        if preemption is None:
            raise ConfigError("callback.preemption=null: the trials of a population save by it; remove the override")
        self._follow(trainer, {"saved": preemption.save(trainer, pl_module)})

    def _follow(self, trainer: L.Trainer, message: dict[str, Any]) -> None:
        """Send a message and follow the answer, on all ranks."""
        answer = trainer.strategy.broadcast(self._ask(message) if trainer.is_global_zero else "")
        self._saves = answer == "save"
        trainer.should_stop = trainer.should_stop or answer == "stop"

    def _ask(self, message: dict[str, Any]) -> str:
        if self._connection is None or self._lines is None:
            return "continue"
        try:
            self._connection.sendall(f"{json.dumps(message)}\n".encode())
            answer = self._lines.readline().strip()
        except OSError:
            answer = ""
        if not answer:  # the search has ended
            self._lines.close()
            self._connection.close()
            self._connection = self._lines = None
            os.kill(os.getpid(), signal.SIGTERM)
        return answer or "continue"


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
