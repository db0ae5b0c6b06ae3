"""The search command: check the space, run trials, and report the best of them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boltcutter.config.errors import ConfigError
from boltcutter.config.values import split_overrides
from boltcutter.environment import lease, startup
from boltcutter.environment import stop_signals as signals
from boltcutter.extend import NegativeResult
from boltcutter.formatting import parse_count
from boltcutter.project import Project, command, display_path
from boltcutter.run.folder import record_attempt
from boltcutter.search.plan import Plan, continued, planned, save, save_reason
from boltcutter.search.trial import MAX_RESTARTS

if TYPE_CHECKING:
    from boltcutter.search.study import Study

FLAGS = {"--check": "check the search and exit"}


def search_command(project: Project, arguments: list[str]) -> Path | None:
    """Search, or continue a search.

    Args:
        project: Project whose configuration is used.
        arguments: Overrides of ``search`` and of training, and ``budget=30m`` for ``search.max_time=30m``; or
            ``resume=<folder of a search>``.

    Returns:
        The folder of the search.

    Raises:
        ConfigError: There are mistakes.
        PreemptionError: A signal ended the search.
    """
    flags = [argument for argument in arguments if argument in FLAGS]
    rest = [argument for argument in arguments if argument not in FLAGS]
    special, rest = split_overrides(rest, "resume", "worker")
    plan = continued(project, Path(special["resume"]), rest) if special else planned(project, rest)
    if "worker" in special:
        if (worker := parse_count(special["worker"])) is None:
            raise ConfigError(f"worker={special['worker']}: not a number; use worker=0")
        with startup.restored_signals():
            signals.install_handlers()
            with record_attempt(worker_folder(plan.folder, worker), writes=True):
                search(plan, worker)
        return None
    if "--check" in flags:
        print(f"ok: {plan.total} trials")
        return None
    with startup.restored_signals():
        signals.install_handlers()
        try:
            with lease.hold(plan.folder):
                if not special:
                    save(plan)
                search(plan)
        except lease.LeaseHeldError as error:
            raise ConfigError(f"{'resume' if special else 'folder'}={plan.folder}: {error}") from error
        if number := signals.received_signal():
            print(f"continue with: {command('search', f'resume={plan.folder}')}", file=sys.stderr)
            signals.exit(number, "interrupted", is_collective=False)
    return plan.folder


def search(plan: Plan, worker: int | None = None) -> None:
    """Run the trials, and write the results once all have ended.

    Args:
        plan: The search.
        worker: Index of this process, if it is one of ``search.max_parallel`` jobs that share the trials, of which each
            runs one at a time, and the last writes the results.

    Raises:
        LeaseLostError: Another process has taken over the search.
        NegativeResult: All trials failed.
    """
    settings = plan.search
    if settings.engine == "wandb":
        from boltcutter.search.sweep import write_sweep

        path = shlex.quote(str(write_sweep(plan)))
        print(f"wandb sweep {path}    # creates the sweep, and prints the command of its agents")
        return
    from boltcutter.search.local import TimeLimit, run_trials  # which need Optuna
    from boltcutter.search.outcome import best_on_average, write_outcome
    from boltcutter.search.results import Progress

    study = open_study(plan, worker)
    save_reason(plan.folder, "running")
    progress = Progress(plan.metrics, plan.total, study.results())
    limit = TimeLimit(plan.folder if worker is None else worker_folder(plan.folder, worker), settings.time_limit)
    print(f"{plan.total} trials in {display_path(plan.folder)}", flush=True)

    def is_reached() -> bool:
        if not plan.repeats:
            return reached(plan, progress.best)
        best = best_on_average(progress.results, plan.metrics, plan.repeats)
        return reached(plan, best.objectives[plan.metrics[0][0]] if best else None)

    def should_stop() -> bool:
        return bool(signals.received_signal()) or limit.is_over() or is_reached()

    options: dict[str, Any] = {"total": plan.total, "should_stop": should_stop, "progress": progress}
    if settings.engine == "ray":
        from boltcutter.search.ray_tune import run_trials as run_on_ray

        options |= {"cpus": settings.cpus or plan.devices, "gpus": plan.gpus, "folder": plan.folder}
        for _ in range(MAX_RESTARTS):
            run_on_ray(study, plan.make_trial, settings, **options)
            if should_stop() or not study.interrupted():
                break  # otherwise Ray gave up a trial whose worker was lost in the middle of a restart
    elif worker is None:
        run_trials(study, plan.make_trial, parallel=settings.max_parallel or 1, gpus=plan.gpus, **options)
    else:
        run_trials(study, plan.make_trial, parallel=1, gpus=0, **options)  # the job has GPUs of its own
        if number := signals.received_signal():
            signals.exit(number, "interrupted", is_collective=False)
    if limit.is_over():
        proceed = command("search", f"resume={plan.folder}")
        print(f"search.max_time={settings.max_time} is used up; continue with: {proceed} search.max_time=<more>")
    if worker is not None:
        states = [result.state for result in study.results()]
        if "running" in states or not (len(states) >= plan.total or is_reached()):
            return
    lease.check_lease()
    results = study.results()
    write_outcome(plan, results, study.importances())
    save_reason(plan.folder, "interrupted" if signals.received_signal() else "completed")
    if results and all(result.state == "failed" for result in results):
        raise NegativeResult(plan.folder)


def worker_folder(folder: Path, worker: int) -> Path:
    """Folder of the log and the record of a worker, as those of the runs of a job array."""
    return folder / f"{folder.name}-{worker}"


def open_study(plan: Plan, worker: int | None = None) -> Study:
    """Open or create the study of a search; ``worker`` is the index of one of several processes that share it."""
    from boltcutter.search.study import Study

    settings = plan.search
    study = Study(
        plan.folder,
        plan.space,
        plan.metrics,
        sampler=settings.sampler,
        pruner=settings.scheduler if settings.engine == "local" else None,
        seed=settings.seed,
        worker=worker or 0,
        workers=1 if worker is None else settings.max_parallel or 1,
    )
    if plan.fixed != [{}] and worker is None:
        study.enqueue([values for _ in range(settings.num_trials or 1) for values in plan.fixed])
    return study


def reached(plan: Plan, best: float | None) -> bool:
    """Whether the best value, the mean of repeated runs if there are any, has reached the target."""
    target = plan.search.target
    if target is None or best is None:
        return False
    return best >= target if plan.metrics[0][1] == "max" else best <= target
