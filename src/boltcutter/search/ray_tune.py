"""Run trials by Ray Tune, on a cluster or on this machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining, TrialScheduler
from ray.tune.search import BasicVariantGenerator, Searcher
from ray.tune.stopper import Stopper

from boltcutter.config.errors import ConfigError, one_line
from boltcutter.environment.ray_cluster import ray_cluster
from boltcutter.search.ray_trial import INTERRUPTED, TrialProcess, read_facts, write_facts
from boltcutter.search.results import Progress
from boltcutter.search.settings import Search
from boltcutter.search.space import Choice, Parameter, Space
from boltcutter.search.study import Study
from boltcutter.search.trial import MAX_RESTARTS, Report, Sampled, Trial

START_SECONDS = 120.0  # within which Ray is started again on a busy machine
FILES = "ray"  # folder of Ray Tune's own files in that of the search, removed at the end
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # trials log by themselves
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # the end of a trial has no metrics of its own
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "100000",  # the study is the journal; Tune's would grow with the number of trials
    "TUNE_MAX_PENDING_TRIALS_PG": "4",
    "RAY_AIR_NEW_OUTPUT": "0",
}


def run_trials(
    study: Study,
    make_trial: Callable[[Sampled, Mapping[str, str]], Trial],
    search: Search,
    *,
    folder: Path,
    total: int,
    cpus: float,
    gpus: float,
    should_stop: Callable[[], bool],
    progress: Progress,
) -> None:
    """Run all trials that are interrupted or missing.

    Raises:
        ConfigError: Ray cannot be reached, or the cluster has too few resources for one trial.
    """
    files = folder / FILES
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    name, mode = study.metrics[0]
    scheduler = make_scheduler(search.scheduler, study.space)
    population = isinstance(scheduler, PopulationBasedTraining)
    queue = [(sampled, True) for sampled in ([] if scheduler is None or population else study.ended())]
    queue += [(sampled, False) for sampled in study.interrupted()]
    os.environ.update(ENVIRONMENT)
    try:
        cluster = ray_cluster(
            address=search.address,
            num_cpus=None if search.address else needed_cpus(search, cpus),
            dashboard=search.dashboard,
            ports=search.ports,
            timeout=0 if search.address else START_SECONDS,
            setting="search",
        )
        with cluster:
            check_resources(cpus, gpus)
            trainable = tune.with_parameters(
                TrialProcess,
                make_trial=make_trial,
                files=str(files),
                population=population,
                decides=scheduler is not None,
            )
            if population:  # which Ray Tune combines with no searcher: all trials are sampled beforehand
                options = population_options(study, queue, total)
            else:
                options = {"search_alg": StudySearcher(study, queue, total, files), "num_samples": -1}
            tuner = tune.Tuner(
                tune.with_resources(trainable, {"cpu": cpus, "gpu": gpus}),
                param_space=options.pop("param_space", None),
                tune_config=tune.TuneConfig(
                    metric=name,
                    mode=mode,
                    scheduler=scheduler,
                    max_concurrent_trials=search.max_parallel,
                    reuse_actors=True,
                    **options,
                ),
                run_config=tune.RunConfig(
                    name="tune",
                    storage_path=str(files),
                    verbose=0,
                    stop=StopWhen(should_stop, files),
                    failure_config=tune.FailureConfig(max_failures=MAX_RESTARTS),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # trials write their own
                    callbacks=[TrialEvents(study, files, progress)],
                ),
            )
            tuner.fit()
    except ValueError as error:
        raise ConfigError(one_line(error)) from error
    finally:
        shutil.rmtree(files, ignore_errors=True)


def needed_cpus(search: Search, cpus: float) -> int:
    """CPUs that a cluster on this machine has: its own, or more if ``max_parallel`` asks for more trials at a time."""
    return max(os.cpu_count() or 1, int(cpus * (search.max_parallel or 1)))


def check_resources(cpus: float, gpus: float) -> None:
    """Check that some node can run a trial, which would otherwise wait forever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
        largest = max(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
        raise ConfigError(
            f"search.cpus={cpus:g} search.gpus={gpus:g}: no node of the cluster has that many for one trial; the "
            f"largest has {largest.get('CPU', 0):g} CPUs and {largest.get('GPU', 0):g} GPUs; ask for fewer"
        )


def population_options(study: Study, queue: list[tuple[Sampled, bool]], total: int) -> dict[str, Any]:
    """Options of Ray Tune for trials that are sampled beforehand."""
    sampled = [trial for trial, _ in queue]
    while trial := study.ask(total):
        sampled.append(trial)
    points = [as_config(trial) for trial in sampled]
    return {
        "search_alg": BasicVariantGenerator(points_to_evaluate=points),
        "num_samples": len(points),
        "param_space": {key: tune.choice([value]) for key, value in points[0].items()} if points else {},
    }


def make_scheduler(scheduler: Any, space: Space) -> TrialScheduler | None:
    """Copy a scheduler, which keeps the state of a search; one that perturbs values gets the space that it lacks."""
    if not isinstance(scheduler, partial):
        made: TrialScheduler | None = deepcopy(scheduler)
        return made
    mutable = [p for p in space.parameters if p.condition is None]
    return scheduler(
        hyperparam_mutations={p.key: _domain(p) for p in mutable}, custom_explore_fn=partial(_clip, mutable)
    )


def _domain(parameter: Parameter) -> Any:
    d = parameter.distribution
    if isinstance(d, Choice):
        return list(d.options)
    if d.is_integer:
        return tune.lograndint(d.low, d.high + 1) if d.log else tune.randint(d.low, d.high + 1)
    return tune.loguniform(d.low, d.high) if d.log else tune.uniform(d.low, d.high)


def _clip(parameters: list[Parameter], config: dict[str, Any]) -> dict[str, Any]:
    """Keep perturbed values within their bounds."""
    for p in parameters:
        if not isinstance(p.distribution, Choice) and p.key in config:
            value = min(max(config[p.key], p.distribution.low), p.distribution.high)
            config[p.key] = round(value) if p.distribution.is_integer else value
    return config


class StopWhen(Stopper):
    """Stops the whole search."""

    def __init__(self, should_stop: Callable[[], bool], files: Path) -> None:
        self.should_stop, self.files = should_stop, files

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether one trial stops; left to the scheduler."""
        return False

    def stop_all(self) -> bool:
        """Whether the search ends now; tells the trials to save."""
        if self.should_stop():
            (self.files / INTERRUPTED).touch()
            return True
        return False


class TrialEvents(tune.Callback):
    """Stores what trials report in the study."""

    def __init__(self, study: Study, files: Path, progress: Progress) -> None:
        self.study, self.files, self.progress = study, files, progress
        self.reports: dict[int, list[Report]] = {}  # of running trials
        self.values: dict[int, dict[str, Any]] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Store reports."""
        if "report" not in result:
            return
        facts = json.loads(result["report"])
        number = facts["number"]
        if facts["replays"]:
            return
        if self.values.setdefault(number, facts["values"]) != facts["values"]:
            self.study.set_values(number, facts["values"])
            self.values[number] = facts["values"]
        for step, metrics in facts["reports"]:
            self.reports[number] = [*(r for r in self.reports.get(number, ()) if r.step < step), Report(step, metrics)]
            self.study.report(number, len(self.reports[number]), metrics)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Store the end of a trial, unless it was interrupted."""
        result = trial.last_result or {}
        self._end(trial, result.get("state") or "pruned", result.get("error", ""))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Store the end of a trial whose worker was lost too often, or raised an error."""
        error = trial.get_pickled_error()
        is_lost = error is None or isinstance(error, ray.exceptions.RayActorError)
        if is_lost and trial.num_failures <= MAX_RESTARTS:
            return  # Ray gives up if a worker is lost in the middle of a restart; the search then starts again with it
        self._end(trial, "failed", "its Ray worker was lost" if is_lost else one_line(error))

    def _end(self, trial: Any, state: str, error: str) -> None:
        facts = read_facts(self.files, trial.trial_id)
        if facts is None or facts["replays"] or (self.files / INTERRUPTED).exists():
            return
        number = facts["number"]
        self.progress.ended(self.study.tell(number, state, self.reports.pop(number, []), error))


class StudySearcher(Searcher):
    """Suggests the values that a study samples."""

    def __init__(self, study: Study, queue: list[tuple[Sampled, bool]], total: int, files: Path) -> None:
        super().__init__(metric=study.metrics[0][0], mode=study.metrics[0][1])
        self.study, self.queue, self.total, self.files = study, queue, total, files

    def suggest(self, trial_id: str) -> Any:
        """Suggest the values of a trial, or that there are no more."""
        sampled, replays = self.queue.pop(0) if self.queue else (self.study.ask(self.total), False)
        if sampled is None:
            return Searcher.FINISHED
        config = as_config(sampled, replays)
        write_facts(self.files, trial_id, config)
        return config

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing to do: ``TrialEvents`` stores the end."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the study is on disk."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


def as_config(sampled: Sampled, replays: bool = False) -> dict[str, Any]:
    """The configuration of a trial in Ray Tune: its number, and its values by key."""
    return {"number": sampled.number, "replays": replays, **sampled.values}
