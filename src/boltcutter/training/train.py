"""Train a model, test its best checkpoint and write the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning as L

from boltcutter import run_files
from boltcutter.assembly.assemble import Components, assemble, read_config
from boltcutter.checkpoint.load import read_steps
from boltcutter.config.errors import ConfigError, as_config_error, one_line
from boltcutter.config.locate import origin, package
from boltcutter.config.settings import Settings
from boltcutter.config.values import name_missing_files
from boltcutter.data.hooks import run_hooks_early
from boltcutter.environment import announcement, lease, reads, startup
from boltcutter.environment import stop_signals as signals
from boltcutter.environment.identity import isolate_attempts, job_id, run_id
from boltcutter.environment.process import distributed_shutdown, is_rank_zero, track_children
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.evaluation.folds import check_fold
from boltcutter.evaluation.splits import NoLoaderError, prediction_argument, skip_reason
from boltcutter.project import Project, command
from boltcutter.protocols import ClosesWithExitCode, PlannedExit, handles_signals
from boltcutter.report import terminal as summary
from boltcutter.run import evaluations, lineage
from boltcutter.run.best import find_tested, relative, resumed_checkpoint
from boltcutter.run.changes import SettingChanges
from boltcutter.run.folder import create_folder, read_record, record_attempt, update_record
from boltcutter.run.log import capture_output
from boltcutter.run.metrics import final_metrics
from boltcutter.run.remote.store import run_store
from boltcutter.run.restart import check_start
from boltcutter.run.store import join
from boltcutter.training import callbacks
from boltcutter.training.ending import EndOfTraining, early_stop, unfinished_schedule
from boltcutter.training.failure import explain_errors
from boltcutter.training.recorder import flush_loggers
from boltcutter.training.resume import explain_restoring, load_initial_state


@reads.observed()
def train_command(project: Project, overrides: list[str], *, goes_on: bool = False) -> Path:
    """Compose the configuration, create or resume the run folder, and train.

    Args:
        project: The project.
        overrides: Those of the command line.
        goes_on: Whether the program goes on afterwards, as with Lightning, on the connections of its ranks.

    Returns:
        The folder of the run.

    Raises:
        ConfigError: The configuration has mistakes, or another process uses the run folder.
        PreemptionError: A signal ended training.
    """
    filter_warnings()
    cfg = read_config(project, overrides)
    startup.prepare()
    isolate_attempts()
    with run_id(overrides) as name, distributed_shutdown(at_exit=goes_on):
        given = bool(cfg.folder)
        place = cfg.folder or join(cfg.runs, cfg.name, name)
        folder = run_store().pull(place, "folder" if given else "runs")
        cfg = run_store().use_url(cfg.changed({"folder": str(folder)}))
        run_store().check(cfg)
        try:
            holding = lease.hold(folder, is_holder=is_rank_zero(), lease=run_store().lease(folder))
            with holding, run_store().mirrored(folder), announcement.announce(folder, float(cfg.timeout)):
                check_start(cfg, given=given)
                with name_missing_files(cfg.written):
                    train(cfg, project)
        except signals.PreemptionError as error:
            if is_rank_zero():
                print(f"{error.reason}{'' if error.requeued else resume_hint(cfg.place.folder)}", file=sys.stderr)
            raise
        except lease.LeaseHeldError as error:
            raise ConfigError(f"{'resume' if cfg.resume else 'folder'}={cfg.folder}: {error}") from error
    return cfg.place.folder


class TestFailedError(RuntimeError):
    """Training is complete, but its best checkpoint could not be tested.

    Args:
        folder: Of the run.
        error: What the test has raised.
    """

    hide_traceback = True

    def __init__(self, folder: Path, error: Exception) -> None:
        self.error = error
        evaluates = command("evaluate", f"run={run_store().show(folder)}")
        name = "" if getattr(error, "hide_traceback", False) else f"{type(error).__name__}: "
        super().__init__(
            f"the run is trained, but its test failed: {name}{one_line(error)}; correct that, then run: {evaluates}"
        )


def resume_hint(folder: Path) -> str:
    """Return the command that resumes an interrupted run; empty if the run has no record yet."""
    has_record = (folder / run_files.RECORD).is_file()
    return f"; continue with: {command('train', f'resume={run_store().show(folder)}')}" if has_record else ""


def train(cfg: Settings, project: Project) -> dict[str, float]:
    """Fit, test the best checkpoint and write the report; resume if the run folder has a checkpoint.

    ``Trainer.fit`` launches ranks, calls the hooks of the data, restores the checkpoint, and trains and validates until
    a limit is reached; its loop is Lightning's. What is done around it, in this order:

    1. Before ``fit``, in each process that exists by then: the components are assembled, the data is loaded and the
       checkpoint is read and compared with them. Lightning would do both after it has launched ranks, each of which
       would report a mistake; and the run would be recorded already. Then rank 0 writes the folder of the run.
    2. ``fit``, within ``attempt``, which records the output and how the attempt ended. What Lightning restores wrongly,
       or does not restore, callbacks correct (``resume_state``); what is changed at its end, ``ending`` says.
    3. After it, rank 0 records the last metrics and chooses the best checkpoint as the callbacks say. All ranks test
       that one, with each sample once; by itself ``fit`` tests nothing. A test that fails is raised when all is
       recorded.
    4. The report is written as ``attempt`` is left, so after any error as well; then rank 0 prints what to do next.

    Args:
        cfg: Checked configuration with the run folder set.
        project: Whose code is recorded.

    Returns:
        Metrics of the test split; empty with ``test=false``.

    Raises:
        TestFailedError: The run is trained and recorded, but its test has failed.
    """
    checkpoint = resumed_checkpoint(cfg)
    ending, changes = EndOfTraining(cfg), SettingChanges(cfg)
    components = assemble(cfg, lambda configured: callbacks.in_order(cfg, configured, changes, ending))
    trainer, data, task = components.trainer, components.data, components.task
    announcement.follow(trainer)
    if not handles_signals(trainer.callbacks):  # type: ignore[attr-defined]
        startup.finish()
        signals.restore_handlers()  # no callback checks the flag
    # Data and checkpoint are read before Lightning launches ranks and before the run is recorded: a mistake in them is
    # reported once, in one line, and leaves no attempt behind.
    if not checkpoint and is_rank_zero():
        check_fold(cfg, trainer)
    with explain_errors(trainer):
        load_data(components)
    load_initial_state(components, cfg, checkpoint, ending, changes)
    track_children(trainer.strategy.launcher)
    if trainer.is_global_zero:
        create_run(cfg, project, components, checkpoint)
    with attempt(cfg, components, checkpoint, changes):
        with explain_restoring(checkpoint):
            trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        stopped_by = ending.stopped_by(trainer)
        record_metrics(cfg, trainer, stopped_by)
        if trainer.is_global_zero:
            lines = (early_stop(trainer, stopped_by), unfinished_schedule(trainer, stopped_by))
            print(*(f"{line}\n" for line in lines if line), sep="", end="")
        best = trainer.strategy.broadcast(find_tested(cfg.place) if trainer.is_global_zero else None)
        # Before fitting, only rank zero knew which splits are empty.
        untested, failure = skip_reason(data, task, "test"), None
        scores: dict[str, float] = {}
        if cfg.test and not untested:
            try:
                with explain_errors(trainer):
                    scores = test(components, cfg.place.folder, best)
            except NoLoaderError as error:
                untested = error.reason
                if trainer.is_global_zero:
                    print(f"test=true: {untested}; testing is skipped")
            except Exception as error:  # the run is trained, whatever a test does
                failure = TestFailedError(cfg.place.folder, error)
                if trainer.is_global_zero:
                    update_record(cfg.place.folder, warning=f"the test failed: {one_line(error, 200)}")
        record_scores(cfg, trainer, best, scores)
    if trainer.is_global_zero:
        summary.print_end(cfg.place.folder, evaluates=not untested, predicts=prediction_argument(data, task))
        if cfg.reproduce:
            from boltcutter.run.compare import report_reproduction

            report_reproduction(Path(cfg.reproduce), cfg.place.folder)
    if failure:
        raise failure from failure.error
    return scores


def create_run(cfg: Settings, project: Project, components: Components, checkpoint: str | None) -> None:
    """Create the run folder, and print what differs from the run that is resumed or reproduced."""
    if cfg.test and (untested := skip_reason(components.data, components.task, "test")):
        print(f"test=true: {untested}; testing is skipped")
    create_folder(cfg, project.root)
    if cfg.reproduce or checkpoint:
        record = read_record(Path(cfg.reproduce) if cfg.reproduce else cfg.place.folder)
        for difference in lineage.differences(record, project.root, components.topology.world_size):
            print(f"warning: {difference}")
    device = components.trainer.strategy.root_device.type
    if checkpoint and not lineage.is_deterministic(device):
        print(f"note: {device} without trainer.deterministic=true: equal to an uninterrupted run up to rounding only")


@contextmanager
def attempt(cfg: Settings, components: Components, checkpoint: str | None, changes: SettingChanges) -> Iterator[None]:
    """Record an attempt, its output and how it ended, and write the report."""
    trainer, folder = components.trainer, cfg.place.folder
    device = trainer.strategy.root_device.type
    facts: dict[str, Any] = {"resumed_from": checkpoint, "devices": components.topology.world_size, "job": job_id()}
    facts |= {"device": device, "deterministic": lineage.is_deterministic(device)}
    if checkpoint and (changed := changes.described()):
        facts |= {"resumed_at": changes.step, "changed": changed}
    with ExitStack() as stack:  # left from last to first
        if trainer.is_global_zero and cfg.report:
            stack.callback(write_report, folder)  # when all else is recorded, also after a failure
        stack.enter_context(capture_output(folder, trainer.global_rank))
        stack.enter_context(close_loggers_at_exit(trainer))
        stack.enter_context(record_attempt(folder, writes=trainer.is_global_zero, **facts))
        stack.enter_context(explain_errors(trainer))  # the explanation is what is recorded
        yield


def record_metrics(cfg: Settings, trainer: L.Trainer, stopped_by: str | None) -> None:
    """Record the last value of each metric, and what ended training early."""
    if trainer.is_global_zero:
        flush_loggers(trainer)
        found = final_metrics(cfg.place.folder)
        update_record(
            cfg.place.folder,
            stopped_by=stopped_by,
            metrics={name: value for name, (value, _) in found.items()},
            measured_after={name: steps for name, (_, steps) in found.items()},
        )


def record_scores(cfg: Settings, trainer: L.Trainer, best: str | None, scores: dict[str, float]) -> None:
    """Record the best checkpoint, and its metrics of the test split."""
    if trainer.is_global_zero:
        steps = read_steps(best) if best else None
        update_record(cfg.place.folder, best=best and relative(cfg.place, best), best_after=steps, test=scores)


def test(components: Components, folder: Path, checkpoint: str | None) -> dict[str, float]:
    """Compute the metrics of a checkpoint on the test split; without one, of the current weights."""
    # Imported late: its dependencies would delay the first step.
    from boltcutter.evaluation.evaluate import describe_evaluation, keep_earlier, score

    record = read_record(folder) if components.trainer.is_global_zero else {}
    code = lineage.code_key(record.get("git") or {}, record.get("library") or {})
    output, settings = folder / "evaluation" / "test", describe_evaluation(components, checkpoint, code=code)
    if components.trainer.is_global_zero:
        keep_earlier(output, settings)
        evaluations.append(folder, settings)
    return score(components, checkpoint, output, settings)


def write_report(folder: Path) -> None:
    """Write ``report.html``, unless another process has taken over the run."""
    if not lease.is_lost():
        from boltcutter.report import page as report  # imported late: its dependencies would delay the first step

        report.write_or_warn(folder)


def load_data(components: Components) -> None:
    """Load the data once before processes are launched, so that a mistake in it is reported in one line.

    Raises:
        ConfigError: The data cannot be loaded, or a split has no batch.
    """
    if components.trainer.local_rank or components.data is None:  # a task prepares its data in fit
        return
    with as_config_error():
        try:
            run_hooks_early(components.trainer, components.task, components.data)
        except OSError as error:
            if error.filename:
                raise
            place = origin(error, package(type(components.data)))  # such as of a download, whose error names nothing
            raise ConfigError(f"data: {one_line(error, 200)} ({place}); correct it, or provide the files") from error


@contextmanager
def close_loggers_at_exit(trainer: L.Trainer) -> Iterator[None]:
    """Close loggers that have a ``close`` method with the exit code of the process."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        if isinstance(error, PlannedExit):
            code = error.status
        elif isinstance(error.code, int):
            code = error.code
        raise
    finally:
        for logger in trainer.loggers:
            if isinstance(logger, ClosesWithExitCode):
                logger.close(code)
