"""Run the pairs of a try as jobs of a launcher, several at the same time.

Jobs go on if the command is interrupted; the same command finds them by their folders.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from boltcutter import run_files
from boltcutter.config.errors import ConfigError
from boltcutter.launch.job import UnreachableError
from boltcutter.launch.jobs import find_launcher, refresh
from boltcutter.search.local import Listener
from boltcutter.search.trial import MAX_RESTARTS, Trial, is_completed, last_error
from boltcutter.tries.pairs import Pairs, read_run

POLL_SECONDS = 2.0  # between two looks at signals and jobs
NO_COPY = "launch.snapshot=false"  # the code of both sides is a copy already


def run_launched(
    pairs: Pairs,
    overrides: Sequence[str],
    *,
    parallel: int,
    should_stop: Callable[[], bool],
    is_decided: Callable[[], bool],
    progress: Listener,
) -> None:
    """Submit runs, and wait until there is a verdict, which cancels the others, or a signal, which does not.

    Args:
        pairs: The runs.
        overrides: Of the launcher, such as ``launch=slurm``.
        parallel: Most jobs at the same time.
        should_stop: Whether a signal has arrived, or there is a verdict.
        is_decided: Whether there is a verdict.
        progress: Is called with each run that has ended.
    """
    running, restarts = dict[int, Trial](), dict[int, int]()
    while True:
        while len(running) < parallel and not should_stop() and (sampled := pairs.ask(0)):
            trial = running[sampled.number] = pairs.make_trial(sampled, {})
            if state_of(trial.folder) == "new":
                submit(trial, overrides)
        if not running or should_stop():
            break
        time.sleep(POLL_SECONDS)
        for number, trial in list(running.items()):
            state = state_of(trial.folder)
            restarts.setdefault(number, 0)
            if state == "killed" and restarts[number] < MAX_RESTARTS:
                restarts[number] += 1
                submit(trial, overrides)
            elif state != "running":
                del running[number]
                error = "" if state == "complete" else last_error(trial.folder, trial.log)
                progress.ended(pairs.tell(number, "complete" if state == "complete" else "failed", [], error))
    if is_decided():
        for trial in running.values():
            cancel(trial.folder)
    elif running:
        print(f"{len(running)} jobs go on; boltcutter launch cancel run=<folder> ends one", file=sys.stderr)


def state_of(folder: Path) -> str:
    """``new``, ``running`` (also while pending), ``complete``, ``failed``, or ``killed``: it can be resumed."""
    if not (folder / run_files.RECORD).is_file():
        return "new"
    state = "ended"
    if launched := find_launcher(folder):
        try:
            state = launched[0].status(launched[1]).state
            refresh(launched[0], folder)
        except UnreachableError:
            state = "pending"
    if is_completed(folder):
        return "complete"
    if state in ("pending", "running"):
        return "running"
    run = read_run(folder)
    return "failed" if run is not None and run.status == "failed" else "killed"


def submit(trial: Trial, overrides: Sequence[str]) -> None:
    """Submit a run, or one that was killed once more, by ``boltcutter launch`` with the code of its side.

    Raises:
        ConfigError: The job is refused.
    """
    is_known = (trial.folder / run_files.RECORD).is_file()
    where = [f"resume={trial.folder}"] if is_known else [*trial.overrides, f"folder={trial.folder}"]
    done = subprocess.run(
        [sys.executable, "-m", "boltcutter", "launch", *where, *overrides, NO_COPY],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,  # Ctrl-C is for this command, which ends after a submission that has begun
        env={**os.environ, **trial.project.environment, **trial.environment},
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"launch ended with {done.returncode}"]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        raise ConfigError(*(errors or lines[-1:]))


def cancel(folder: Path) -> None:
    """Cancel the job of a run that no verdict needs any more."""
    with suppress(ValueError, ConfigError):  # it has ended, or its scheduler does not respond
        if launched := find_launcher(folder):
            launched[0].cancel(launched[1])
