"""Run trials on this machine, without Ray."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping

from boltcutter.search.progress import Progress
from boltcutter.search.study import Study
from boltcutter.search.trial import Sampled, Trial

POLL = 0.5  # seconds between two looks at signals and the time limit


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
    running: dict[int, Trial] = {}  # by slot, which has GPUs of its own
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                while len(running) < parallel and not should_stop():
                    sampled = waiting.pop(0) if waiting else study.ask(total)
                    if sampled is None:
                        break
                    slot = next(slot for slot in range(parallel) if slot not in running)
                    trial = make_trial(sampled, device_variables(slot, gpus))
                    progress.began(sampled.number, sampled.values)
                    for count, report in enumerate(trial.reports, 1):
                        study.report(trial.number, count, report.metrics)  # unless it was before
                    if trial.start():
                        running[slot] = trial
                        selector.register(trial, selectors.EVENT_READ, slot)
                    else:
                        progress.ended(study.tell(trial.number, "complete", trial.reports))
                if not running or should_stop():
                    return
                for key, _ in selector.select(POLL):
                    slot = key.data
                    if _advance(running[slot], study):
                        continue
                    selector.unregister(running[slot])
                    trial = running.pop(slot)
                    state, error = trial.finish()
                    if state == "running" and not should_stop():
                        if trial.restart():
                            running[slot] = trial
                            selector.register(trial, selectors.EVENT_READ, slot)
                            continue
                        state = "failed"
                    if state != "running":
                        progress.ended(study.tell(trial.number, state, trial.reports, error))
                progress.refresh({trial.number: trial.reports for trial in running.values()})
        finally:
            for trial in running.values():
                trial.interrupt()
            for trial in running.values():
                trial.end()


def _advance(trial: Trial, study: Study) -> bool:
    """Handle a message of a trial; False if it has ended."""
    report = trial.receive()
    if report is None:
        return False
    stops = study.report(trial.number, len(trial.reports), report.metrics)
    trial.answer("stop" if stops else "continue")
    return True


def device_variables(slot: int, gpus: float) -> dict[str, str]:
    """Environment variables that give a trial its own GPUs.

    Args:
        slot: Index of the trial among those that run at the same time.
        gpus: GPUs of each trial, or a fraction of one.
    """
    if not gpus:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = int(slot * gpus)
    indices = range(first, first + max(int(gpus), 1))
    names = visible.split(",") if visible else [str(index) for index in range(indices.stop)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index % len(names)] for index in indices)}


def deadline(seconds: float | None) -> Callable[[], bool]:
    """A function that tells whether a time limit is over."""
    end = None if seconds is None else time.monotonic() + seconds
    return lambda: end is not None and time.monotonic() >= end
