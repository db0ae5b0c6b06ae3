"""Run trials on this machine, without Ray."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter_search.progress import Progress
from boltcutter_search.study import Study
from boltcutter_search.trial import Sampled, Trial

POLL = 0.5  # seconds between two looks at signals, processes and the time limit
ELAPSED = "elapsed.txt"  # seconds of all continuations so far
INTERVAL = 5.0  # seconds between two writes of it
ENDING_POLL = 0.05  # the same, while a process ends


def run_trials(
    study: Study,
    make_trial: Callable[[Sampled, Mapping[str, str]], Trial],
    *,
    total: int,
    parallel: int,
    gpus: float,
    should_stop: Callable[[], bool],
    progress: Progress,
) -> None:
    """Run all trials that are interrupted or missing; each is an ordinary training in a process of its own.

    Args:
        study: The study, which decides on values and on early stops.
        make_trial: Makes the trial of sampled values, given environment variables.
        total: Number of trials.
        parallel: Trials at a time.
        gpus: GPUs of each trial.
        should_stop: Whether the search ends now; running trials then save and are resumed later.
        progress: Shows the state of the search.
    """
    waiting = study.interrupted()
    with selectors.DefaultSelector() as selector:
        pool = Pool(study, selector, progress)
        try:
            while True:
                while len(pool.running) < parallel and not should_stop():
                    sampled = waiting.pop(0) if waiting else study.ask(total)
                    if sampled is None:
                        break
                    slot = next(slot for slot in range(parallel) if slot not in pool.running)
                    pool.start(slot, make_trial(sampled, device_variables(slot, gpus)), sampled)
                if not pool.running or should_stop():
                    return
                pool.wait()
                for slot in pool.ended():
                    pool.finish(slot, may_restart=not should_stop())
                progress.refresh({trial.number: trial.reports for trial in pool.running.values()})
        finally:
            pool.end()


class Pool:
    """The trials that run at the same time.

    Args:
        study: The study, which decides on early stops.
        selector: Waits for messages of the trials.
        progress: Shows the state of the search.

    Attributes:
        running: Trials by slot, each of which has GPUs of its own.
    """

    def __init__(self, study: Study, selector: selectors.BaseSelector, progress: Progress) -> None:
        self._study, self._selector, self._progress = study, selector, progress
        self._ending: set[int] = set()  # slots of trials that have closed their connection
        self.running: dict[int, Trial] = {}

    def start(self, slot: int, trial: Trial, sampled: Sampled) -> None:
        """Start a trial, or store its end if it ended after the search was interrupted."""
        self._progress.began(sampled.number, sampled.values)
        was_stopped = False
        for count, report in enumerate(trial.reports, 1):  # the search may have been killed before it stored them
            was_stopped = self._study.report(trial.number, count, report.metrics)
        if trial.start():
            self._add(slot, trial)
        else:
            state = "pruned" if was_stopped else "complete"
            self._progress.ended(self._study.tell(trial.number, state, trial.reports))

    def wait(self) -> None:
        """Wait for messages of trials, and answer them."""
        for key, _ in self._selector.select(ENDING_POLL if self._ending else POLL):
            trial = self.running[key.data]
            report = trial.receive()
            if report is None:
                self._selector.unregister(trial)
                self._ending.add(key.data)
                continue
            stops = self._study.report(trial.number, len(trial.reports), report.metrics)
            trial.answer("stop" if stops else "continue")

    def ended(self) -> list[int]:
        """Slots of trials whose process has ended; a process that it left behind may still hold the connection."""
        return [slot for slot, trial in self.running.items() if not trial.is_alive()]

    def finish(self, slot: int, *, may_restart: bool) -> None:
        """Store the end of a trial, or start it again if it was killed."""
        trial = self.running.pop(slot)
        if slot not in self._ending:
            self._selector.unregister(trial)
        self._ending.discard(slot)
        state, error = trial.finish()
        if state == "running":
            if not may_restart:
                return
            if trial.restart():
                self._add(slot, trial)
                return
            state = "failed"
        self._progress.ended(self._study.tell(trial.number, state, trial.reports, error))

    def end(self) -> None:
        """Let all trials save and exit."""
        for trial in self.running.values():
            trial.interrupt()
        for trial in self.running.values():
            trial.end()

    def _add(self, slot: int, trial: Trial) -> None:
        self.running[slot] = trial
        self._selector.register(trial, selectors.EVENT_READ, slot)


def device_variables(slot: int, gpus: float) -> dict[str, str]:
    """Environment variables that give a trial its own GPUs.

    Args:
        slot: Index of the trial among those that run at the same time.
        gpus: GPUs of each trial, or a fraction of one. More trials than fit share GPUs.

    Raises:
        ConfigError: The machine has fewer GPUs than a trial needs.
    """
    if not gpus:
        return {}
    import torch

    visible, available = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    if available and gpus > available:
        raise ConfigError(f"search.gpus={gpus}: this machine has {available} GPUs; try search.gpus={available}")
    first = slot * int(gpus) if gpus >= 1 else slot // int(1 / gpus)
    indices = range(first, first + max(int(gpus), 1))
    names = visible.split(",") if visible else [str(index) for index in range(available or indices.stop)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index % len(names)] for index in indices)}


class TimeLimit:
    """The time limit of a search, over all of its continuations: a killed search loses at most ``INTERVAL`` seconds.

    Args:
        folder: Folder of the search, or of one of its workers.
        seconds: The limit; None: none.
    """

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
