"""A worker of Ray Tune: runs the process of a trial, and passes on its reports."""

from __future__ import annotations

import json
import os
import select
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune

from boltcutter.checkpoint.load import read_metadata
from boltcutter.search.trial import Report, Sampled, Trial, trial_overrides

INTERRUPTED = "interrupted"  # file that tells trials to save, as the search continues later
CHECKPOINT = "trial.ckpt"
GATHERING = 1.0  # seconds in which reports are gathered that no scheduler decides on: each result costs Ray about 10 ms


def write_facts(files: Path, trial_id: str, config: Mapping[str, Any]) -> None:
    """Note what a trial is, as population-based training copies the configuration of one trial to another."""
    (files / trial_id).write_text(json.dumps({name: config[name] for name in ("number", "replays")}))


def read_facts(files: Path, trial_id: str) -> dict[str, Any] | None:
    """What was noted of a trial."""
    with suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads((files / trial_id).read_text())
        return found
    return None


class TrialProcess(tune.Trainable):
    """Runs the process of a trial in a worker of Ray."""

    def setup(
        self,
        config: dict[str, Any],
        make_trial: Callable[[Sampled, Mapping[str, str]], Trial],
        files: str,
        population: bool,
        decides: bool,
    ) -> None:
        """Prepare a trial.

        Unless a scheduler ``decides``, it trains on while Ray handles its reports, those of a second at once.
        """
        self._make, self._files, self._population, self._decides = make_trial, Path(files), population, decides
        self._started = self._is_paused = False
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare another trial in the same worker, or the same one with other values."""
        self.cleanup()  # Tune calls it only before it removes a worker
        if read_facts(self._files, self.trial_id) is None:
            write_facts(self._files, self.trial_id, new_config)
        self._facts = read_facts(self._files, self.trial_id) or {}
        self._values = {key: value for key, value in new_config.items() if key not in ("number", "replays")}
        variables = {name: value for name in ("CUDA_VISIBLE_DEVICES",) if (value := os.environ.get(name)) is not None}
        self._trial = self._make(Sampled(self._facts["number"], self._values), variables)
        if self._population:
            self._trial.changes = [*trial_overrides(self._values), "resume_exact=false"]
        # A scheduler sees earlier reports again, but that of a population only the last.
        self._earlier = list(enumerate(self._trial.reports, 1))[-1 if self._population else 0 :]
        return True

    def step(self) -> dict[str, Any]:
        """Train until the next validation or the end."""
        if self._earlier:
            count, report = self._earlier.pop(0)
            return self._result(count, [report])
        if self._facts["replays"]:
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

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy a checkpoint, so that another trial can continue from it, or this one after a pause."""
        self._is_paused = True  # if no further step follows
        source = self._trial.save() if self._started else None
        source = source or _newest(self._trial.folder)
        if source is not None:
            _copy(source, Path(checkpoint_dir) / CHECKPOINT)

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Continue from a copied checkpoint, of this trial or another."""
        source = Path(str(checkpoint_dir)) / CHECKPOINT
        if not source.exists():
            return
        checkpoints = self._trial.folder / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        is_own = (read_metadata(source).get("boltcutter") or {}).get("run") == self._trial.folder.name
        for earlier in checkpoints.glob("last*" if is_own else "*.ckpt*"):  # the best of another history is none of it
            shutil.rmtree(earlier) if earlier.is_dir() else earlier.unlink()
        _copy(source, checkpoints / "last.ckpt")

    def cleanup(self) -> None:
        """Stop training for good, or let it save if the search was interrupted or the scheduler pauses the trial."""
        if not self._started:
            return
        self._started = False
        if (self._files / INTERRUPTED).exists() or self._population or self._is_paused:
            self._trial.end()
        else:
            self._trial.answer("stop")
            with suppress(OSError):
                while self._trial.receive():
                    self._trial.answer("stop")
            self._trial.finish()

    def _result(self, count: int, reports: Sequence[Report]) -> dict[str, Any]:
        # Tune flattens mappings, and joins their keys by slashes, which names of metrics contain.
        found = [(report.step, report.metrics) for report in reports]
        facts = {**self._facts, "reports": found, "values": self._values}
        return {**reports[-1].metrics, "report": json.dumps(facts), "training_iteration": count}

    def _end(self, state: str, error: str = "") -> dict[str, Any]:
        reports = self._trial.reports
        self._started = False
        last = self._result(len(reports), reports[-1:]) if reports else {}
        return {**last, "done": True, "state": state, "error": error}


def _copy(source: Path, target: Path) -> None:
    """Copy a checkpoint, which is a file or a folder."""
    shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint of a run that ended."""
    return max((folder / "checkpoints").glob("last*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
