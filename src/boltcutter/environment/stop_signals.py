"""Signals that request preemption: the handler sets a flag, which training checks where it is safe to stop.

A handler does nothing more than that: a collective inside one deadlocks when ranks are at different points of the
program, and a checkpoint written inside one can contain half of an optimizer step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from boltcutter.environment.process import c_handler, is_rank_zero
from boltcutter.environment.this_process import this_process

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LEASE_LOST = 255  # used like a signal number: another process took over the run; later signals do not override it
REQUEUE = "BOLTCUTTER_REQUEUE"  # path of the marker file that asks the launcher to requeue; then the exit status is 0


class PreemptionError(SystemExit):
    """Exit with status 128 + the signal number, or with 0 if a launcher requeues the run.

    Args:
        number: Signal number.
        saved: What was saved, such as the path of the checkpoint, for the message.
        is_collective: Whether all ranks exit at the same point, so that they can wait for one another.

    Attributes:
        status: Exit status without a launcher that requeues the run.
        requeued: Whether a launcher requeues the run.
        reason: The message.
    """

    def __init__(self, number: int, saved: str, *, is_collective: bool = True) -> None:
        self.status, self.is_collective = 128 + number, is_collective
        self.requeued = bool(os.environ.get(REQUEUE))
        super().__init__(0 if self.requeued else self.status)
        self.reason = f"preempted by {signal.Signals(number).name}, {saved}"

    def __str__(self) -> str:
        return self.reason


def install_handlers(*immediate: int) -> None:
    """Install handlers that set the flag.

    Args:
        immediate: Signals that raise ``PreemptionError`` immediately, because there is nothing to save yet.
    """
    this_process.immediate_signals = immediate
    _install(handle_signal)


def end_process(number: int, frame: FrameType | None = None) -> None:
    """End the process immediately, without cleanup; for start-up, before there is anything to clean up."""
    status = 0 if os.environ.get(REQUEUE) else 128 + number
    if is_rank_zero():
        name = signal.Signals(number).name
        with suppress(OSError):  # the reader may have exited
            # Not by print, which is not reentrant and may be what the signal interrupted.
            os.write(2, f"error: ended by {name} during start-up; nothing was trained\n".encode())
        try:
            _write_marker(number)
        except OSError:
            status = 128 + number
    os._exit(status)


def end_process_on_signals() -> None:
    """Install handlers that end the process immediately, for use while modules are imported."""
    _install(end_process)


def restore_handlers() -> None:
    """Restore the previous handlers, and clear what they have set."""
    for number, handler in this_process.previous_handlers.items():
        if not _is_of_user(number):
            signal.signal(number, handler)
    this_process.previous_handlers.clear()
    this_process.immediate_signals, this_process.received_signal = (), 0


def handlers_installed() -> bool:
    """Whether the handlers of this module are installed."""
    return bool(this_process.previous_handlers)


def received_signal() -> int:
    """The number of the last signal received; 0 for none."""
    return this_process.received_signal


def handle_signal(number: int, frame: FrameType | None = None) -> None:
    """Set the flag to a signal number or ``LEASE_LOST``; a second keyboard interrupt exits immediately."""
    before = this_process.received_signal
    repeated = number == before == signal.SIGINT
    this_process.received_signal = max(number, before) if LEASE_LOST in (number, before) else number
    if repeated or number in this_process.immediate_signals:
        exit(number, "at once, nothing saved" if repeated else "before training, nothing saved", is_collective=False)


def exit(number: int, saved: str, *, is_collective: bool = True) -> NoReturn:
    """Exit because of a signal, ignoring further signals.

    Raises:
        PreemptionError: Always, with these arguments.
    """
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    if is_rank_zero():
        _write_marker(number)
    raise PreemptionError(number, saved, is_collective=is_collective)


def _install(handler: Callable[[int, FrameType | None], None]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # a thread of a notebook or another library: Python delivers signals to the main thread only
    if not this_process.fork_hook_registered:
        os.register_at_fork(after_in_child=_reset_in_child)
        this_process.fork_hook_registered = True
    for number in SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:  # by nohup
            continue
        if _is_of_user(number):
            continue
        previous = signal.signal(number, handler)
        if previous not in (handle_signal, end_process):
            this_process.previous_handlers.setdefault(number, signal.SIG_DFL if previous is None else previous)
    this_process.c_handler = c_handler(signal.SIGTERM)


def _is_of_user(number: int) -> bool:
    """Whether the user has installed a handler of SIGUSR1 or SIGUSR2, such as one that prints where training is.

    It is kept, as Lightning does, unless a launcher sends these signals before it requeues the run.
    """
    if number not in (signal.SIGUSR1, signal.SIGUSR2) or os.environ.get(REQUEUE):
        return False
    current = signal.getsignal(number)
    if is_own(current):  # also of a launcher, in a rank that it has forked
        return c_handler(number) != this_process.c_handler  # it is that of faulthandler, of which Python does not know
    return callable(current) or (current is signal.SIG_DFL and c_handler(number) != 0)


def is_own(handler: object) -> bool:
    """Whether a handler is of this library, rather than the user's."""
    return str(getattr(handler, "__module__", "")).startswith(f"{__name__.partition('.')[0]}.")


def go_on(number: int, frame: FrameType | None = None) -> None:
    """A handler that does nothing: the process that watches the run prints the stacks."""


def _reset_in_child() -> None:
    """Restore the default behaviour in forked processes, so that a process pool can terminate its workers."""
    if this_process.previous_handlers:
        signal.set_wakeup_fd(-1)
        restore_handlers()


def _write_marker(number: int) -> None:
    marker = os.environ.get(REQUEUE)
    if marker:
        Path(marker).write_text(signal.Signals(number).name)
