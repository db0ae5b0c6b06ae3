"""A worker of Ray Tune: runs the process of a trial, and passes on its reports."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune

from boltcutter_search.trial import Report, Sampled, Trial

INTERRUPTED = "interrupted"  # file that tells trials to save, as the search continues later
GATHERING = 1.0  # seconds in which reports are gathered that no scheduler decides on: each result costs Ray about 10 ms


class TrialProcess(tune.Trainable):
    """Runs the process of a trial in a worker of Ray."""

    def setup(
        self,
        config: dict[str, Any],
        make_trial: Callable[[Sampled, Mapping[str, str]], Trial],
        files: str,
        decides: bool,
    ) -> None:
        """Prepare a trial.

        Unless a scheduler ``decides``, it trains on while Ray handles its reports, those of a second at once.
        """
        self._make, self._files, self._decides = make_trial, Path(files), decides
        self._started = self._is_paused = False
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare another trial in the same worker."""
        self.cleanup()  # Tune calls it only before it removes a worker
        values = dict(new_config)
        number, self._replays = values.pop("number"), values.pop("replays")
        variables = {name: value for name in ("CUDA_VISIBLE_DEVICES",) if (value := os.environ.get(name)) is not None}
        self._trial = self._make(Sampled(number, values), variables)
        self._earlier = list(enumerate(self._trial.reports, 1))  # which a scheduler sees again
        return True

    def step(self) -> dict[str, Any]:
        """Train until the next validation or the end."""
        if self._earlier:
            count, report = self._earlier.pop(0)
            return self._result(count, [report])
        if self._replays:
            return self._end("complete")
        if not self._started:
            self._started = True
            if not self._trial.start():
                return self._end("complete")
        self._is_paused = False
        self._trial.answer("continue")
        while (received := self._trial.receive()) is None:
            state, error = self._trial.finish()
            if state == "running" and self._trial.restart():
                continue
            return self._end("failed" if state == "running" else state, error)
        reports = [received] if self._decides else self._gather(received)
        return self._result(len(self._trial.reports), reports)

    def _gather(self, report: Report | None) -> list[Report]:
        """Let the trial go on, and return its next reports as well."""
        reports, end = [], time.monotonic() + GATHERING
        while report:
            reports.append(report)
            self._trial.answer("continue")
            remaining = end - time.monotonic()
            if remaining <= 0 or not select.select([self._trial], [], [], remaining)[0]:
                break
            report = self._trial.receive()  # None at the end, also in the next step
        return reports

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Note a pause, if no further step follows: the trial saves in its own folder, from which it is resumed."""
        self._is_paused = True
        return {}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Nothing to load: the next step resumes the trial."""

    def cleanup(self) -> None:
        """Stop training for good, or let it save if the search was interrupted or the scheduler pauses the trial."""
        if not self._started:
            return
        self._started = False
        if (self._files / INTERRUPTED).exists() or self._is_paused:
            self._trial.end()
        else:
            self._trial.answer("stop")
            with suppress(OSError):
                while self._trial.receive():
                    self._trial.answer("stop")
            self._trial.finish()

    def _result(self, count: int, reports: Sequence[Report]) -> dict[str, Any]:
        # Tune flattens mappings, and joins their keys by slashes, which names of metrics contain.
        found = json.dumps([(report.step, report.metrics) for report in reports])
        return {**reports[-1].metrics, "reports": found, "training_iteration": count}

    def _end(self, state: str, error: str = "") -> dict[str, Any]:
        reports = self._trial.reports
        self._started = False
        last = self._result(len(reports), reports[-1:]) if reports else {}
        return {**last, "done": True, "state": state, "error": error}
