"""The study of a search: all trials and their reports, in a journal that survives crashes."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from boltcutter.search import trial as trials
from boltcutter.search.results import Result
from boltcutter.search.settings import Mode
from boltcutter.search.space import Space
from boltcutter.search.trial import Sampled

optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.getLogger("optuna").setLevel(logging.ERROR)

STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}
SURPLUS = "surplus"  # of a trial that two workers asked for when there was one left


class Study:
    """All trials of a search, which several processes may share.

    Args:
        folder: Folder of the search.
        space: What is sampled.
        metrics: Metrics and modes.
        sampler: Called with a seed; None: random values.
        pruner: A pruner of Optuna.
        seed: Seed of the sampled values.
        worker: Index of this process among those that share the study.
        workers: Number of processes that share it; trials of an earlier process continue in one of these.
    """

    def __init__(
        self,
        folder: Path,
        space: Space,
        metrics: Sequence[tuple[str, Mode]],
        *,
        sampler: Callable[..., Any] | None = None,
        pruner: Any = None,
        seed: int = 0,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self.folder, self.space, self.metrics, self.seed = folder, space, list(metrics), seed
        self.worker, self.workers = worker, workers
        self._sampler: Callable[..., Any] = sampler or optuna.samplers.RandomSampler
        storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
        self._study = optuna.create_study(
            storage=storage,
            study_name="search",
            directions=["maximize" if mode == "max" else "minimize" for _, mode in metrics],
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        )

    def enqueue(self, fixed: Sequence[Mapping[str, Any]]) -> None:
        """Give the values of the first trials, apart from those that are given already."""
        keys = {parameter.key for parameter in self.space.parameters}
        known = sum("fixed" in trial.user_attrs for trial in self._study.get_trials(deepcopy=False))
        for values in fixed[known:]:
            sampled = {key: value for key, value in values.items() if key in keys}
            self._study.enqueue_trial(sampled, user_attrs={"fixed": dict(values)})

    def ask(self, total: int) -> Sampled | None:
        """Start a new trial; None if there are ``total`` of them.

        The sampler has a seed of its own for each trial, so that a search that is continued samples what an
        uninterrupted one would have.
        """
        known = self._study.get_trials(deepcopy=False)
        if sum(trial.state != TrialState.WAITING for trial in known) >= total:
            return None
        key = f"{self.seed}/{self.worker}/{len(known)}"
        self._study.sampler = self._sampler(seed=zlib.crc32(key.encode()))
        trial = self._study.ask()
        if trial.number >= total:
            trial.set_user_attr(SURPLUS, True)
            self._study.tell(trial, state=TrialState.FAIL)
            return None
        fixed = dict(trial.user_attrs.get("fixed") or {})
        values = self.space.sample(trial) | fixed
        trial.set_user_attr("values", values)
        trial.set_user_attr("worker", self.worker)
        return Sampled(trial.number, values)

    def interrupted(self) -> list[Sampled]:
        """Trials that this worker started and did not finish, or a worker that there is no longer."""
        return [
            Sampled(trial.number, trial.user_attrs["values"])
            for trial in self._trials()
            if trial.state == TrialState.RUNNING
            and "worker" in trial.user_attrs
            and trial.user_attrs["worker"] % self.workers == self.worker
        ]

    def ended(self) -> list[Sampled]:
        """Trials that are complete or were stopped early."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return [Sampled(t.number, t.user_attrs["values"]) for t in self._trials() if t.state in states]

    def report(self, number: int, count: int, metrics: Mapping[str, float]) -> bool:
        """Store a validation; returns whether the pruner stops the trial.

        Args:
            number: Number of the trial.
            count: Number of validations of the trial so far.
            metrics: All metrics; those of the search may be missing.
        """
        name = self.metrics[0][0]
        known = self._study.get_trials(deepcopy=False)[number].intermediate_values
        if len(self.metrics) > 1 or name not in metrics or count in known:
            return False
        trial = self._live(number)
        trial.report(metrics[name], count)
        return bool(trial.should_prune())

    def set_values(self, number: int, values: Mapping[str, Any]) -> None:
        """Replace the values of a trial, as population-based training does."""
        self._live(number).set_user_attr("values", dict(values))

    def tell(self, number: int, state: str, reports: Sequence[trials.Report], error: str = "") -> Result:
        """Store the end of a trial, and return it.

        Args:
            number: Number of the trial.
            state: ``complete``, ``pruned`` or ``failed``.
            reports: All of its validations.
            error: Why it failed.
        """
        trial = self._live(number)
        scores = self._scores(reports)
        if state == "complete" and len(scores) < len(self.metrics):
            missing = next(name for name, _ in self.metrics if name not in scores)
            state, error = "failed", f"never logged {missing}"
        trial.set_user_attr("objectives", scores)
        trial.set_user_attr("metrics", reports[-1].metrics if reports else {})
        trial.set_user_attr("steps", [report.step for report in reports])
        trial.set_user_attr("seconds", trials.seconds(self.trial_folder(number)))
        if error:
            trial.set_user_attr("error", error)
        codes = {text: code for code, text in STATES.items()}
        values = [scores[name] for name, _ in self.metrics] if state == "complete" else None
        self._study.tell(number, values, codes[state], skip_if_finished=True)
        return self.result(number)

    def _scores(self, reports: Sequence[trials.Report]) -> dict[str, float]:
        """The best value of a single metric, whose checkpoint is kept; of several, those of the last validation."""
        if len(self.metrics) > 1:
            last = reports[-1].metrics if reports else {}
            return {name: last[name] for name, _ in self.metrics if name in last}
        name, mode = self.metrics[0]
        values = [report.metrics[name] for report in reports if name in report.metrics]
        finite = [value for value in values if value == value]
        return {name: (max if mode == "max" else min)(finite)} if finite else {}

    def results(self) -> list[Result]:
        """All trials that were started."""
        return [self._result(trial) for trial in self._trials()]

    def result(self, number: int) -> Result:
        """One trial."""
        return self._result(self._study.get_trials(deepcopy=False)[number])

    def _result(self, trial: FrozenTrial) -> Result:
        name, attrs, folder = self.metrics[0][0], trial.user_attrs, self.trial_folder(trial.number)
        curve = list(zip(attrs.get("steps", ()), trial.intermediate_values.values(), strict=False))
        if not curve:
            curve = [(r.step, r.metrics[name]) for r in trials.read_reports(folder, name)]
        return Result(
            number=trial.number,
            state=STATES[trial.state],
            values=attrs.get("values", {}),
            objectives=attrs.get("objectives", {}),
            curve=curve,
            metrics=attrs.get("metrics", {}),
            seconds=attrs.get("seconds", 0.0),
            folder=folder,
            error=attrs.get("error", ""),
        )

    def trial_folder(self, number: int) -> Path:
        """Folder of the run of a trial."""
        return self.folder / "trials" / f"{number:04d}"

    def _trials(self) -> list[FrozenTrial]:
        known = self._study.get_trials(deepcopy=False)
        return [t for t in known if t.state != TrialState.WAITING and not t.user_attrs.get(SURPLUS)]

    def _live(self, number: int) -> optuna.Trial:
        return optuna.Trial(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)
