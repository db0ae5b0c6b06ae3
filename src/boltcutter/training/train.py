"""Train a model, test its best checkpoint and write the report."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from boltcutter.assembly.adapt import prediction_argument, skip_reason
from boltcutter.assembly.assemble import Components, TaskLoaders, assemble, read_config
from boltcutter.assembly.folds import check_fold
from boltcutter.assembly.monitors import MonitorCheck
from boltcutter.callback.trial import trial_reporter
from boltcutter.checkpoint.load import load, read_metadata
from boltcutter.checkpoint.select import list_names
from boltcutter.checkpoint.storage import CheckpointError, check_writable, repeat
from boltcutter.checkpoint.weights import incompatibility, load_weights
from boltcutter.config.compose import DictConfig
from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.config.values import redacted
from boltcutter.data.hooks import run_hooks_early
from boltcutter.environment import lease, signals, startup
from boltcutter.environment.elastic import isolate_attempts
from boltcutter.environment.identity import job_id, run_id
from boltcutter.environment.process import distributed_shutdown, is_rank_zero, track_children
from boltcutter.environment.threads import describe_contention
from boltcutter.environment.warnings import filter_warnings
from boltcutter.project import Project, command
from boltcutter.protocols import (
    BuffersMetrics,
    ClosesWithExitCode,
    HasLocation,
    NativeData,
    NativeTask,
    PlannedExit,
    find_model,
    handles_signals,
)
from boltcutter.report import terminal as summary
from boltcutter.run import folder as run
from boltcutter.run import lineage, remote
from boltcutter.run.best import find_best, resumed_checkpoint
from boltcutter.run.changes import SettingChanges
from boltcutter.run.log import capture_output
from boltcutter.run.restart import check_start
from boltcutter.training.best import BestRecorder
from boltcutter.training.ending import EndOfTraining
from boltcutter.training.failure import explain_errors
from boltcutter.training.learning import LearningCheck

NO_METRICS = (
    "step",
    "epoch",
    "throughput/",
    "test/",
    "test_",
)  # prefixes of columns in metrics.csv that are not training metrics


def main(project: Project, overrides: list[str]) -> Path:
    """Compose the configuration, create or resume the run folder, and train.

    Args:
        project: Project whose configuration is used.
        overrides: Overrides of the configuration, such as ``model=mlp``.

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
    with run_id(overrides) as name, distributed_shutdown():
        given = bool(cfg.folder)
        place = cfg.folder or remote.join(cfg.runs, cfg.name, name)
        folder = remote.pull(place, "folder" if given else "runs")
        cfg.folder = str(folder)
        remote.use_url(cfg)
        remote.check_sharding(cfg)
        try:
            holding = lease.hold(folder, is_holder=is_rank_zero(), lease=remote.remote_lease(folder))
            with holding, remote.mirrored(folder):
                check_start(cfg, given=given)
                train(cfg, project)
        except signals.PreemptionError as error:
            if is_rank_zero():
                print(f"{error.reason}{'' if error.requeued else resume_hint(Path(cfg.folder))}", file=sys.stderr)
            raise
        except lease.LeaseHeldError as error:
            raise ConfigError(f"{'resume' if cfg.resume else 'folder'}={cfg.folder}: {error}") from error
    return Path(cfg.folder)


def resume_hint(folder: Path) -> str:
    """Return the command that resumes an interrupted run; empty if the run has no record yet."""
    has_record = (folder / "record.json").is_file()
    return f"; continue with: {command('train', f'resume={remote.show(folder)}')}" if has_record else ""


def train(cfg: DictConfig, project: Project) -> dict[str, float]:
    """Fit, test the best checkpoint and write the report; resume if the run folder has a checkpoint.

    Args:
        cfg: Checked configuration with the run folder set.
        project: Whose code is recorded.

    Returns:
        Metrics of the test split; empty with ``test=false``.
    """
    folder = Path(cfg.folder)
    checkpoint = resumed_checkpoint(cfg)
    ending, changes = EndOfTraining(cfg), SettingChanges(cfg)
    components = assemble(
        cfg, [Recorder(cfg), BestRecorder(cfg), LearningCheck(cfg), ending, changes, *trial_reporter()]
    )
    trainer, data, task = components.trainer, components.data, components.task
    if not handles_signals(trainer.callbacks):  # type: ignore[attr-defined]
        startup.finish()
        signals.restore_handlers()  # no callback checks the flag
    if not checkpoint and is_rank_zero():
        check_fold(cfg, trainer)
    with explain_errors(trainer):
        load_data(components)
    load_initial_state(components, cfg, checkpoint, ending, changes)
    track_children(getattr(trainer.strategy.launcher, "procs", []))
    untested = skip_reason(data, task, "test")
    if trainer.is_global_zero and cfg.test and untested:
        print(f"test=true: {untested}; testing is skipped")
    if trainer.is_global_zero:
        run.create(cfg, project.root)
        if cfg.reproduce or checkpoint:
            for difference in lineage.differences(run.read_record(Path(cfg.reproduce or folder)), project.root):
                print(f"warning: {difference}")
    device = trainer.strategy.root_device.type
    facts: dict[str, Any] = {"resumed_from": checkpoint, "devices": trainer.world_size, "job": job_id()}
    facts |= {"device": device, "deterministic": lineage.is_deterministic(device)}
    if checkpoint and trainer.is_global_zero and not facts["deterministic"]:
        print(f"note: {device} without trainer.deterministic=true: equal to an uninterrupted run up to rounding only")
    if changes.changed:
        facts["changed"] = list(changes.changed)
    with ExitStack() as stack:
        if trainer.is_global_zero and cfg.report:
            stack.callback(write_report, folder)  # runs last, also after a failure
        stack.enter_context(capture_output(folder, trainer.global_rank))
        stack.enter_context(close_loggers_at_exit(trainer))
        stack.enter_context(run.record_attempt(folder, writes=trainer.is_global_zero, **facts))
        stack.enter_context(explain_errors(trainer))
        trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        if trainer.is_global_zero:
            flush_loggers(trainer)
            found = final_metrics(folder)
            run.update_record(
                folder,
                metrics={name: value for name, (value, _) in found.items()},
                measured_after={name: steps for name, (_, steps) in found.items()},
            )
        best = trainer.strategy.broadcast(find_best(cfg) if trainer.is_global_zero else None)
        # Before fitting, only rank zero knew which splits are empty.
        untested = skip_reason(data, task, "test")
        scores = test(components, folder, best) if cfg.test and not untested else {}
        if trainer.is_global_zero:
            steps = read_metadata(best).get("global_step") if best else None
            run.update_record(folder, best=best, best_after=steps, test=scores)
    if trainer.is_global_zero:
        summary.print_end(folder, evaluates=not untested, predicts=prediction_argument(data, task))
        if cfg.reproduce:
            from boltcutter.run.compare import report_reproduction

            report_reproduction(Path(cfg.reproduce), folder)
    return scores


def load_initial_state(
    components: Components, cfg: DictConfig, checkpoint: str | None, ending: EndOfTraining, changes: SettingChanges
) -> None:
    """Check the checkpoint storage, then read the state to resume from, or load the weights of ``init_from``.

    Args:
        components: Trainer, data and task; changed.
        cfg: The configuration of the run.
        checkpoint: Checkpoint to resume from; None for a new run.
        ending: Callback that detects whether training had stopped early.
        changes: Callback that applies overrides given together with ``resume=``.

    Raises:
        ConfigError: Checkpoints cannot be written, or ``checkpoint`` cannot be read or does not match.
    """
    if components.trainer.is_global_zero and components.trainer.checkpoint_callbacks:
        with run.prefix_errors(f"checkpoints={cfg.checkpoints}", CheckpointError):
            check_writable(cfg.checkpoints)
    if checkpoint:
        with run.prefix_errors(f"resume={cfg.folder}", CheckpointError):
            fault = incompatibility(checkpoint, components.task)
            if fault:
                raise ConfigError(
                    f"{checkpoint} does not match the task: {fault}; use the same model, or start a new run"
                )
            saved = load(checkpoint, lazy=True)
            reached_limit = check_limits(components.trainer, saved)
            for callback in components.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, MonitorCheck) and (state := saved.get("callbacks", {}).get(callback.state_key)):
                    callback.load_state_dict(state)
            restore_data_state(components.data, cfg, saved)
            note = ending.resume(saved)
            if reached_limit and not note:
                note = f"training is complete ({reached_limit}){'; it is only tested' if cfg.test else ''}; "
                note += f"to continue, set {reached_limit.partition('=')[0]}=<more>"
            lines = [*([note] if note else []), *changes.resume(saved, ends=bool(reached_limit) or ending.finished)]
        if components.trainer.is_global_zero:
            print(*(f"resume={remote.show(cfg.folder)}: {line}\n" for line in lines), sep="", end="")
    elif cfg.init_from:
        with run.prefix_errors(f"init_from={cfg.init_from}", CheckpointError):
            is_native = isinstance(components.task, NativeTask)
            unmatched = load_weights(find_model(components.task) if is_native else components.task, cfg.init_from)
        if components.trainer.is_global_zero:
            print(*(f"init_from: {line}\n" for line in unmatched), sep="", end="")


def check_limits(trainer: L.Trainer, saved: dict[str, Any]) -> str:
    """Check that the resumed run has not gone beyond ``max_epochs`` or ``max_steps``.

    Returns:
        The limit that it has reached, such as ``trainer.max_epochs=20``; empty if there is none.

    Raises:
        ConfigError: It has gone beyond one of them.
    """
    epochs = saved.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current", {}).get("processed", 0)
    reached = ""
    for name, done in (("max_epochs", epochs), ("max_steps", saved.get("global_step", 0))):
        limit = getattr(trainer, name)
        if limit == done:
            reached = reached or f"trainer.{name}={limit}"
        if limit not in (None, -1) and done > limit:
            raise ConfigError(
                f"trainer.{name}={limit}: the run has already done {done}; "
                f"set trainer.{name}={done} or more, or start a new run"
            )
    return reached


def restore_data_state(data: L.LightningDataModule, cfg: DictConfig, saved: dict[str, Any]) -> None:
    """Restore the position in the data, and check that the data is unchanged unless ``resume_exact=false``.

    Raises:
        ConfigError: The samples or their order differ from those of the checkpoint.
    """
    if not isinstance(data, NativeData):
        return  # Lightning restores its state
    data.resume_exact = cfg.resume_exact
    state = saved.get(type(data).__qualname__)
    if state:
        with as_config_error():
            data.load_state_dict(state)
            data.train_dataloader()
    recorded = run.read_record(Path(cfg.folder)).get("data")
    if cfg.resume_exact and recorded and recorded != data.fingerprint():
        raise ConfigError(
            f"resume={cfg.folder}: the data has changed (fingerprint {data.fingerprint()}, was {recorded}); restore "
            "it, or set resume_exact=false"
        )


def test(components: Components, folder: Path, checkpoint: str | None) -> dict[str, float]:
    """Compute the metrics of a checkpoint on the test split; without one, of the current weights."""
    # Imported late: its dependencies would delay the first step.
    from boltcutter.evaluation.evaluate import describe_evaluation, keep_earlier, score

    output, settings = folder / "evaluation" / "test", describe_evaluation(components, checkpoint)
    if components.trainer.is_global_zero:
        keep_earlier(output, settings)
    return score(components, checkpoint, output, settings)


def write_report(folder: Path) -> None:
    """Write ``report.html``; a failure to write is only a warning, so that it cannot hide the outcome of training."""
    if lease.is_lost():
        return
    from boltcutter.report import html as report  # imported late: its dependencies would delay the first step

    try:
        report.write(folder)
    except OSError as error:
        print(f"warning: {remote.show(folder)}/report.html could not be written ({error})", file=sys.stderr)


def load_data(components: Components) -> None:
    """Load the data once before processes are launched, so that a mistake in it is reported in one line.

    Raises:
        ConfigError: The data cannot be loaded, or a split has no batch.
    """
    if components.trainer.local_rank or isinstance(components.data, TaskLoaders):  # a task prepares its data in fit
        return
    with as_config_error():
        run_hooks_early(components.trainer, components.task, components.data)


def final_metrics(folder: Path) -> dict[str, tuple[float, int]]:
    """Read the last value of each training and validation metric, over all attempts, from ``metrics.csv``.

    Returns:
        For each metric, its value and the number of optimizer steps after which it was measured.
    """
    found: dict[str, tuple[float, int]] = {}
    if (folder / "metrics.csv").is_file():
        with open(folder / "metrics.csv", newline="") as file:
            for row in csv.DictReader(file):
                steps = int(row["step"]) + 1  # loggers count steps from 0
                found |= {name: (float(value), steps) for name, value in row.items() if value}
    return {name: value for name, value in found.items() if not name.startswith(NO_METRICS)}


def flush_loggers(trainer: L.Trainer) -> None:
    """Write the metrics logged so far to disk."""
    for logger in trainer.loggers:
        if isinstance(logger, BuffersMetrics):
            logger.flush()


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


class Recorder(Callback):
    """Records what is known only once training starts, and adds the run's id and commit to each checkpoint.

    Args:
        cfg: The configuration of the run.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.provenance: dict[str, Any] = {}
        self.saved = False  # whether the record marks the run as resumable

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the fingerprint of the data, log the configuration, and print a summary of the run."""
        if not trainer.is_global_zero:
            return
        folder = Path(self.cfg.folder)
        record = run.read_record(folder)
        self.provenance = {"run": record["id"], **{name: record["git"][name] for name in ("commit", "dirty")}}
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, NativeData):
            run.update_record(folder, data=data.fingerprint())
        hyperparameters = redacted(self.cfg)
        for logger in trainer.loggers:
            logger.log_hyperparams(hyperparameters)
            # The dummy logger of fast_dev_run has every attribute.
            if isinstance(logger, HasLocation) and isinstance(logger.location, str):
                run.update_record(folder, wandb={"id": logger.version, "location": logger.location})
        summary.print_start(folder, trainer, pl_module)
        if pl_module.device.type == "cpu" and (line := describe_contention(trainer)):
            print(line)

    def _is_resumable(self) -> bool:
        """Whether a checkpoint to resume from was written before the one that is being saved."""
        place = self.cfg.checkpoints
        return any(name.startswith("last") for name in repeat(place, lambda: list_names(place)))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the run's id and commit to the checkpoint, and flush metrics so that none logged before it is lost."""
        flush_loggers(trainer)
        checkpoint["boltcutter"] = self.provenance
        if trainer.is_global_zero and not self.saved and self._is_resumable():
            run.update_record(Path(self.cfg.folder), saved=True)
            self.saved = True
        remote.flush(Path(self.cfg.folder))
