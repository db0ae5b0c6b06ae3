"""The study of a search: all trials and their reports, in a journal that survives crashes.

A process whose lease of the search another one has taken over writes nothing more: ``lease.LeaseLostError`` is raised.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from boltcutter import run_files
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.data.streams import Purpose, seed32, stream
from boltcutter.environment import lease
from boltcutter.run.metrics import Mode
from boltcutter.search import trial as trials
from boltcutter.search.results import Result
from boltcutter.search.space import Space
from boltcutter.search.trial import Sampled

optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.getLogger("optuna").setLevel(logging.ERROR)

LOG = run_files.STUDY
STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}
MIN_TRIALS = 10  # for importances, below which the best tenth is less than one trial
SURPLUS = "surplus"  # of a trial that two workers asked for when there was one left
STOPPED = "stopped"  # number of validations after which the pruner stopped a trial
UNCLAIMED = 2.0  # seconds after which a trial without a worker belongs to a process that was killed


class Study:
    """All trials of a search, which several processes may share.

    Trials of an earlier process continue in one of the ``workers``. The sampler is called with a seed.
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
        drop_torn_line(folder / LOG)
        self._ids: dict[int, int] = {}  # in the storage, by number
        self._ended = self._counted = 0  # trials before the first that may change, and how many of them count
        try:
            self._storage = JournalStorage(JournalFileBackend(str(folder / LOG)))
            self._study = optuna.create_study(
                storage=self._storage,
                study_name="search",
                directions=["maximize" if mode == "max" else "minimize" for _, mode in metrics],
                pruner=pruner or optuna.pruners.NopPruner(),
                load_if_exists=True,
            )
            self.ended()
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
            raise ConfigError(
                f"{folder / LOG} is damaged ({one_line(repr(error), 100)}); restore it from a copy"
            ) from error

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
        lease.check_lease()
        if (started := self._count()) >= total:
            return None
        self._seed_sampler(started)
        number = self._study.ask().number
        if self._count(number) >= total:  # of another worker
            self._set(number, SURPLUS, True)
            self._study.tell(number, state=TrialState.FAIL)
            return None
        return self._sample(number)

    def interrupted(self) -> list[Sampled]:
        """Trials that this worker started and did not finish, or a worker that there is no longer."""
        found = []
        for trial in self._trials():
            if trial.state == TrialState.RUNNING and self._is_own(trial):
                values = trial.user_attrs.get("values")
                found.append(self._sample(trial.number) if values is None else Sampled(trial.number, values))
        return found

    def _is_own(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get("worker")
        if worker is None:
            is_old = trial.datetime_start and time.time() > trial.datetime_start.timestamp() + UNCLAIMED
            return self.worker == 0 and bool(is_old)
        return bool(worker % self.workers == self.worker)

    def _sample(self, number: int) -> Sampled:
        """Sample the values of a trial that was started, also by a process that was killed before it did."""
        self._set(number, "worker", self.worker)
        self._seed_sampler(number)
        frozen = self._trial(number)
        values = self.space.sample(optuna.Trial(self._study, frozen._trial_id))
        values |= frozen.user_attrs.get("fixed") or {}
        self._set(number, "values", values)
        return Sampled(number, values)

    def _seed_sampler(self, number: int) -> None:
        key = stream(Purpose.SEARCH, self.seed, worker=self.worker, position=number)
        self._study.sampler = self._sampler(seed=seed32(key))

    def ended(self) -> list[Sampled]:
        """Trials that are complete or were stopped early."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return [Sampled(t.number, t.user_attrs["values"]) for t in self._trials() if t.state in states]

    def report(self, number: int, count: int, metrics: Mapping[str, float]) -> bool:
        """Store a validation; returns whether the pruner stops the trial."""
        lease.check_lease()
        name = self.metrics[0][0]
        if len(self.metrics) > 1 or name not in metrics:
            return False
        trial = self._trial(number)
        known = trial.intermediate_values
        if count >= trial.user_attrs.get(STOPPED, math.inf):
            return True  # it was interrupted before it stopped
        if count not in known:
            self._storage.set_trial_intermediate_value(trial._trial_id, count, metrics[name])
        elif count < max(known):
            return False  # it was resumed from an earlier checkpoint
        stops = self._study.pruner.prune(self._study, self._storage.get_trial(trial._trial_id))
        if stops:
            self._set(number, STOPPED, count)
        return stops

    def set_values(self, number: int, values: Mapping[str, Any]) -> None:
        """Replace the values of a trial, as population-based training does."""
        self._set(number, "values", dict(values))

    def tell(self, number: int, state: str, reports: Sequence[trials.Report], error: str = "") -> Result:
        """Store the end of a trial, and return it."""
        lease.check_lease()
        chosen = self._chosen(reports)
        scores = {name: chosen[name] for name, _ in self.metrics if not math.isnan(chosen.get(name, math.nan))}
        if state == "complete" and len(scores) < len(self.metrics):
            missing = next(name for name, _ in self.metrics if name not in scores)
            state, error = "failed", f"{missing} was never logged, or is NaN"
        attributes = {
            "objectives": scores,
            "metrics": chosen,
            "steps": [report.step for report in reports],
            "seconds": trials.seconds(self.trial_folder(number)),
            **({"error": error} if error else {}),
        }
        for key, value in attributes.items():
            self._set(number, key, value)
        codes = {text: code for code, text in STATES.items()}
        values = [scores[name] for name, _ in self.metrics] if state == "complete" else None
        self._study.tell(number, values, codes[state], skip_if_finished=True)
        return self._result(self._trial(number))

    def _chosen(self, reports: Sequence[trials.Report]) -> dict[str, float]:
        """All metrics of the best validation by a single metric, whose checkpoint is kept; of several, of the last."""
        name, mode = self.metrics[0]
        numbers = [report for report in reports if not math.isnan(report.metrics.get(name, math.nan))]
        if len(self.metrics) > 1 or not numbers:
            return reports[-1].metrics if reports else {}
        return (max if mode == "max" else min)(numbers, key=lambda report: report.metrics[name]).metrics

    def results(self) -> list[Result]:
        """All trials that were started."""
        return [self._result(trial) for trial in self._trials()]

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

    def importances(self) -> list[tuple[str, dict[str, float]]]:
        """How much each sampled value matters for each metric: its name, and shares of one if trials differ enough.

        They are PED-ANOVA's: how strongly the distribution of a value among the best tenth of the trials differs from
        that among all complete ones.

        Source: Watanabe et al., PED-ANOVA: Efficiently Quantifying Hyperparameter Importance in Arbitrary Subspaces,
        2023.
        """
        complete = [trial for trial in self._trials() if trial.state == TrialState.COMPLETE]
        importances: list[tuple[str, dict[str, float]]] = []
        for index, (name, mode) in enumerate(self.metrics):
            sign = -1 if mode == "max" else 1  # the evaluator takes smaller values as better

            def cost(trial: FrozenTrial, index: int = index, sign: int = sign) -> float:
                return float(sign * trial.values[index])

            shares: dict[str, float] = {}
            costs = {cost(trial) for trial in complete}
            if len(complete) >= MIN_TRIALS and len(costs) > 1 and any(trial.params for trial in complete):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that smaller values are better
                    shares = optuna.importance.get_param_importances(self._study, target=cost)
            importances.append((name, {key: float(share) for key, share in shares.items()}))
        return importances

    def trial_folder(self, number: int) -> Path:
        """Folder of the run of a trial."""
        return self.folder / "trials" / f"{number:04d}"

    def _trials(self) -> list[FrozenTrial]:
        return [trial for trial in self._study.get_trials(deepcopy=False) if counts(trial)]

    def _count(self, below: float = math.inf) -> int:
        """Number of these trials, or of those with a number below a limit; those that have ended are read once."""
        number, found = self._ended, self._counted
        while number < below:
            try:
                trial = self._trial(number)
            except KeyError:
                break  # there are no more
            number, found = number + 1, found + counts(trial)
            if trial.state.is_finished() and trial.number == self._ended:
                self._ended, self._counted = number, found
        return found

    def _trial(self, number: int) -> FrozenTrial:
        """One trial, without a look at the others, so that its cost does not grow with their number."""
        if number not in self._ids:
            study = self._study._study_id
            self._ids[number] = self._storage.get_trial_id_from_study_id_trial_number(study, number)
        return self._storage.get_trial(self._ids[number])

    def _set(self, number: int, key: str, value: Any) -> None:
        # Not by ``optuna.Trial``, which would let the sampler sample the trial once more.
        trial = self._trial(number)
        if trial.state == TrialState.RUNNING:
            self._storage.set_trial_user_attr(trial._trial_id, key, value)


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial was started, and is not surplus."""
    return trial.state != TrialState.WAITING and not trial.user_attrs.get(SURPLUS)


def drop_torn_line(path: Path) -> None:
    """Remove a last line that a full disk cut off, as the next line would be appended to it."""
    if not path.is_file():
        return
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()  # another worker may be writing
    try:
        with open(path, "rb+") as file:
            content = file.read()
            if not content.endswith(b"\n"):
                file.truncate(content.rfind(b"\n") + 1)
    finally:
        lock.release()
