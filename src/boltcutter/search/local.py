"""Run trials on this machine, without Ray."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter.search.results import Result
from boltcutter.search.trial import Report, Sampled, Trial

POLL = 0.5  # seconds between two looks at signals, processes and the time limit
ELAPSED = "elapsed.txt"  # seconds of all continuations so far
INTERVAL = 5.0  # seconds between two writes of it
ENDING_POLL = 0.05  # the same, while a process ends


class Trials(Protocol):
    """Which trials there are to run, and where their reports go."""

    def interrupted(self) -> list[Sampled]:
        """Trials that were started and did not end."""

    def ask(self, total: int) -> Sampled | None:
        """The next trial to start; None if there is none now."""

    def report(self, number: int, count: int, metrics: Mapping[str, float]) -> bool:
        """Store a validation; returns whether the trial stops."""

    def tell(self, number: int, state: str, reports: Sequence[Report], error: str = "") -> Result:
        """Store the end of a trial."""


class Listener(Protocol):
    """What is shown of trials."""

    def ended(self, result: Result) -> None:
        """Show a trial that ended."""


def run_trials(
    study: Trials,
    make_trial: Callable[[Sampled, Mapping[str, str]], Trial],
    *,
    total: int,
    parallel: int,
    gpus: float,
    should_stop: Callable[[], bool],
    progress: Listener,
) -> None:
    """Run all trials that are interrupted or missing; each is an ordinary training in a process of its own.

    Once ``should_stop`` returns true, running trials save, and are resumed later.
    """
    waiting, variables = study.interrupted(), [device_variables(slot, gpus) for slot in range(parallel)]
    running: dict[int, Trial] = {}  # by slot, each of which has GPUs of its own
    with selectors.DefaultSelector() as selector:

        def add(slot: int, trial: Trial, is_alive: bool) -> bool:
            if is_alive:
                running[slot] = trial
                selector.register(trial, selectors.EVENT_READ)
            return is_alive

        try:
            while True:
                while len(running) < parallel and not should_stop():
                    sampled = waiting.pop(0) if waiting else study.ask(total)
                    if sampled is None:
                        break
                    slot = next(slot for slot in range(parallel) if slot not in running)
                    trial = make_trial(sampled, variables[slot])
                    was_stopped = False
                    for count, report in enumerate(trial.reports, 1):  # it may have been killed before it stored them
                        was_stopped = study.report(trial.number, count, report.metrics)
                    if not add(slot, trial, trial.start()):  # it ended after the search was interrupted
                        progress.ended(study.tell(trial.number, "pruned" if was_stopped else "complete", trial.reports))
                if not running or should_stop():
                    return
                is_ending = len(selector.get_map()) < len(running)
                for key, _ in selector.select(ENDING_POLL if is_ending else POLL):
                    answer(study, key.fileobj, selector)
                for slot, trial in list(running.items()):
                    if trial.is_alive():  # a process that it left behind may still hold the connection
                        continue
                    del running[slot]
                    if trial in selector.get_map():
                        selector.unregister(trial)
                    state, error = trial.finish()
                    if state == "running":
                        if should_stop() or add(slot, trial, trial.restart()):
                            continue
                        state = "failed"
                    progress.ended(study.tell(trial.number, state, trial.reports, error))
        finally:
            for trial in running.values():
                trial.interrupt()
            for trial in running.values():
                trial.end()


def answer(study: Trials, trial: Any, selector: selectors.BaseSelector) -> None:
    """Receive the message of a trial, and answer it, or stop to wait for it if it ends."""
    report = trial.receive()
    if report is None:
        selector.unregister(trial)
    else:
        stops = study.report(trial.number, len(trial.reports), report.metrics)
        trial.answer("stop" if stops else "continue")


def device_variables(slot: int, gpus: float) -> dict[str, str]:
    """Environment variables that give the trial in a slot, of those at the same time, its GPUs or part of one."""
    if not gpus:
        return {}
    import torch

    visible, available = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    if gpus > available:
        what = f"{available} GPU{'' if available == 1 else 's'}" if available else "no GPU"
        raise ConfigError(f"search.gpus={gpus:g}: this machine has {what}; try search.gpus={available}")
    first = slot * int(gpus) if gpus >= 1 else slot // int(1 / gpus)
    indices = range(first, first + max(int(gpus), 1))
    names = visible.split(",") if visible else [str(index) for index in range(available)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index % len(names)] for index in indices)}


class TimeLimit:
    """The time limit of a search, over all of its continuations: a killed search loses at most ``INTERVAL`` seconds."""

    def __init__(self, folder: Path, seconds: float | None) -> None:
        self._file, self._seconds, self._begin, self._spent = folder / ELAPSED, seconds, time.monotonic(), 0.0
        with suppress(OSError, ValueError):
            self._spent = float(self._file.read_text())
        self._saved = self._spent

    def is_over(self) -> bool:
        """Whether the time is over; also saves how much of it was used."""
        if self._seconds is None:
            return False
        spent = self._spent + time.monotonic() - self._begin
        if spent > self._saved + INTERVAL or spent >= self._seconds > self._saved:
            write_text(self._file, f"{spent:.1f}\n")
            self._saved = spent
        return spent >= self._seconds
