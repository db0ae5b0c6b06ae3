"""Train, test and report, from a configuration."""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from boltcutter import lineage, run, summary
from boltcutter.adapt import is_native_data, is_native_task, prediction_argument, skip_reason
from boltcutter.assemble import Components, TaskLoaders, as_config_error, assemble, read_config
from boltcutter.changes import SettingChanges
from boltcutter.config import ConfigError, DictConfig, redacted
from boltcutter.data_hooks import run_early
from boltcutter.ending import Ending
from boltcutter.environment import lease, signals, startup
from boltcutter.environment.elastic import isolate_attempts
from boltcutter.environment.identity import job_id, run_id
from boltcutter.environment.process import distributed_shutdown, is_rank_zero, track_children
from boltcutter.environment.warnings import filter_warnings
from boltcutter.failure import explain_errors
from boltcutter.loading import load, read_metadata
from boltcutter.log import capture_output
from boltcutter.monitors import MonitorCheck
from boltcutter.restart import check_start
from boltcutter.selection import find_best, list_names
from boltcutter.storage import CheckpointError, check_writable
from boltcutter.weights import incompatibility, load_weights

NO_METRICS = ("step", "epoch", "throughput/", "test/", "test_")  # columns of metrics.csv not of training itself


def main(configs: Path, words: list[str]) -> None:
    """Train as the words say."""
    filter_warnings()
    cfg = read_config(configs, words)
    startup.prepare()
    isolate_attempts()
    with run_id(words) as name, distributed_shutdown():
        given = bool(cfg.folder)
        cfg.folder = cfg.folder or str(Path(cfg.runs) / cfg.name / name)
        try:
            with lease.hold(Path(cfg.folder), is_holder=is_rank_zero()):
                check_start(cfg, given=given)
                train(cfg)
        except signals.PreemptionError as left:
            if is_rank_zero():
                print(f"{left.reason}{'' if left.requeued else how_to_resume(Path(cfg.folder))}", file=sys.stderr)
            raise
        except lease.LeaseHeldError as error:
            raise ConfigError(f"{'resume' if cfg.resume else 'folder'}={cfg.folder}: {error}") from error


def how_to_resume(folder: Path) -> str:
    """What to say after how a training was interrupted; nothing where it had not begun."""
    begun = (folder / "record.json").is_file()
    return f"; continue with: python {shlex.quote(sys.argv[0])} resume={shlex.quote(str(folder))}" if begun else ""


def train(cfg: DictConfig) -> dict[str, float]:
    """Fit, test the best checkpoint and report; go on where the folder has a checkpoint.

    Returns:
        Metrics on the test split; empty with ``test=false``.
    """
    folder = Path(cfg.folder)
    checkpoint = run.last_checkpoint(cfg.checkpoints)
    ending, changes = Ending(cfg), SettingChanges(cfg)
    components = assemble(cfg, [Recorder(cfg), ending, changes])
    if not any(getattr(callback, "handles_signals", False) for callback in components.trainer.callbacks):  # type: ignore[attr-defined]
        startup.finish()
        signals.restore_handlers()  # nobody would look at the flag
    load_early(components)
    begin_from(components, cfg, checkpoint, ending, changes)
    track_children(getattr(components.trainer.strategy.launcher, "procs", []))
    first = components.trainer.is_global_zero
    lack = skip_reason(components.data, components.task, "test")
    if first and cfg.test and lack:
        print(f"test=true: {lack}, so nothing is measured after training")
    if first:
        run.create(cfg)
        if cfg.reproduce or checkpoint:
            for difference in lineage.differences(run.read_record(Path(cfg.reproduce or folder))):
                print(f"warning: {difference}")
    facts: dict[str, Any] = {"resumed_from": checkpoint, "devices": components.trainer.world_size, "job": job_id()}
    if changes.changed:
        facts["changed"] = list(changes.changed)
    with ExitStack() as stack:
        if first and cfg.report:
            stack.callback(write_report, folder)  # last of all, and also when training failed
        stack.enter_context(capture_output(folder, components.trainer.global_rank))
        stack.enter_context(closing_loggers(components.trainer))
        stack.enter_context(run.record_attempt(folder, writes=first, **facts))
        stack.enter_context(explain_errors(components.trainer))
        components.trainer.fit(components.task, datamodule=components.data, ckpt_path=checkpoint, weights_only=True)
        if first:
            write_metrics(components.trainer)
            found = final_metrics(folder)
            run.update_record(
                folder,
                metrics={name: value for name, (value, _) in found.items()},
                measured_after={name: steps for name, (_, steps) in found.items()},
            )
        kept = best_kept(components.trainer, cfg.checkpoints)
        lack = skip_reason(
            components.data, components.task, "test"
        )  # which splits are empty, only the first rank knew before
        scores = test(components, folder, kept) if cfg.test and not lack else {}
        if first:
            run.update_record(folder, best=kept, best_after=steps_of(kept), test=scores)
    if first:
        summary.print_end(folder, evaluates=not lack, predicts=prediction_argument(components.data, components.task))
        if cfg.reproduce:
            from boltcutter.compare import report_reproduction  # its libraries would hold up the first step

            report_reproduction(Path(cfg.reproduce), folder)
    return scores


def begin_from(
    components: Components, cfg: DictConfig, checkpoint: str | None, ending: Ending, changes: SettingChanges
) -> None:
    """See that checkpoints can be written and ``checkpoint`` fits before anything starts, or load ``init_from``.

    Raises:
        ConfigError: They cannot; it does not fit, or cannot be read.
    """
    if components.trainer.is_global_zero and components.trainer.checkpoint_callbacks:
        with run.prefix_errors(f"checkpoints={cfg.checkpoints}", CheckpointError):
            check_writable(cfg.checkpoints)
    if checkpoint:
        with run.prefix_errors(f"resume={cfg.folder}", CheckpointError):
            fault = incompatibility(checkpoint, components.task)
            if fault:
                raise ConfigError(f"{checkpoint} was made by something else: {fault}")
            saved = load(checkpoint, lazy=True)
            done = check_end(components.trainer, saved)
            for callback in components.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, MonitorCheck) and (state := saved.get("callbacks", {}).get(callback.state_key)):
                    callback.load_state_dict(state)
            go_on_with(components.data, cfg, saved)
            told = ending.resume(saved)
            lines = [*([told] if told else []), *changes.resume(saved, ends=done or ending.finished)]
        if components.trainer.is_global_zero:
            print(*(f"resume={cfg.folder}: {line}\n" for line in lines), sep="", end="")
    elif cfg.init_from:
        with run.prefix_errors(f"init_from={cfg.init_from}", CheckpointError):
            task: Any = components.task
            left_alone = load_weights(task.model if is_native_task(task) else task, cfg.init_from)
        if components.trainer.is_global_zero:
            print(*(f"init_from: {line}\n" for line in left_alone), sep="", end="")


def best_kept(trainer: L.Trainer, place: str) -> str | None:
    """The best checkpoint as the first rank finds it, which has written them; None where there is none."""
    found: str | None = trainer.strategy.broadcast(find_best(place) if trainer.is_global_zero else None)
    return found


def check_end(trainer: L.Trainer, saved: dict[str, Any]) -> bool:
    """See that the run has not gone beyond where it is to end.

    Returns:
        Whether it is just there.

    Raises:
        ConfigError: It has.
    """
    epochs = saved.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current", {}).get("processed", 0)
    ended = False
    for name, done in (("max_epochs", epochs), ("max_steps", saved.get("global_step", 0))):
        limit = getattr(trainer, name)
        ended = ended or limit == done
        if limit not in (None, -1) and done > limit:
            raise ConfigError(
                f"trainer.{name}={limit}: the run has done {done} already; give as many or more, or another run"
            )
    return ended


def go_on_with(data: Any, cfg: DictConfig, saved: dict[str, Any]) -> None:
    """See that the samples are those of the checkpoint, in their order; with ``resume_exact=false`` go on all the same.

    Raises:
        ConfigError: They are not.
    """
    if not is_native_data(data):
        return  # Lightning gives it its state
    data.exact = cfg.resume_exact
    state = saved.get(type(data).__qualname__)
    if state:
        with as_config_error():
            data.load_state_dict(state)
            data.train_dataloader()
    then = run.read_record(Path(cfg.folder)).get("data")
    if cfg.resume_exact and then and then != data.fingerprint():
        raise ConfigError(
            f"resume={cfg.folder}: the data is not what it was (fingerprint {data.fingerprint()}, was {then}); bring "
            "it back, or say resume_exact=false"
        )


def test(components: Components, folder: Path, checkpoint: str | None) -> dict[str, float]:
    """Metrics of a checkpoint on the test split; without one, of the weights as they are."""
    from boltcutter.evaluate import score  # its libraries would hold up the first step

    return score(components, checkpoint, folder / "evaluation" / "test")


def write_report(folder: Path) -> None:
    """Write ``report.html``; where it cannot be, how training ended matters more."""
    if lease.is_lost():
        return
    from boltcutter import report  # its libraries would hold up the first step

    try:
        report.write(folder)
    except OSError as error:
        print(f"warning: {folder}/report.html is not written ({error})", file=sys.stderr)


def load_early(components: Components) -> None:
    """Read the data once before any process is started, so that a mistake in it is told in one line.

    Raises:
        ConfigError: Something is wrong with the data, or a split has no batch.
    """
    if components.trainer.local_rank or isinstance(
        components.data, TaskLoaders
    ):  # a task prepares its data as training begins
        return
    with as_config_error():
        run_early(components.trainer, components.task, components.data)


def final_metrics(folder: Path) -> dict[str, tuple[float, int]]:
    """All metrics as they stood last, whichever attempt told them, but for those of time and of the test.

    Returns:
        By name, the value and the number of optimizer steps after which it was measured.
    """
    found: dict[str, tuple[float, int]] = {}
    if (folder / "metrics.csv").is_file():
        with open(folder / "metrics.csv", newline="") as file:
            for row in csv.DictReader(file):
                steps = int(row["step"]) + 1  # loggers count them from 0
                found |= {name: (float(value), steps) for name, value in row.items() if value}
    return {name: value for name, value in found.items() if not name.startswith(NO_METRICS)}


def steps_of(checkpoint: str | None) -> int | None:
    """Optimizer steps that the weights of a checkpoint were trained for."""
    return read_metadata(checkpoint).get("global_step") if checkpoint else None


def write_metrics(trainer: L.Trainer) -> None:
    """Have on the disk what was logged so far."""
    for logger in trainer.loggers:
        getattr(logger, "flush", int)()


@contextmanager
def closing_loggers(trainer: L.Trainer) -> Iterator[None]:
    """End loggers that want to know how the process ended."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = getattr(error, "status", error.code if isinstance(error.code, int) else 1)
        raise
    finally:
        for logger in trainer.loggers:
            close = getattr(logger, "close", None)
            if close:
                close(code)


class Recorder(Callback):
    """Writes into the run's record what is known only once training begins, and marks each checkpoint with the run.

    Args:
        cfg: The run's configuration.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.made_by: dict[str, Any] = {}
        self.saved = False  # whether the record says that there is a checkpoint

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fingerprint the data, give the configuration to the loggers, and show what is about to happen."""
        if not trainer.is_global_zero:
            return
        folder = Path(self.cfg.folder)
        record = run.read_record(folder)
        self.made_by = {"run": record["id"], **{name: record["git"][name] for name in ("commit", "dirty")}}
        data = trainer.datamodule  # type: ignore[attr-defined]
        if is_native_data(data):
            run.update_record(folder, data=data.fingerprint())
        hyperparameters = redacted(self.cfg)
        for logger in trainer.loggers:
            logger.log_hyperparams(hyperparameters)
            location = getattr(logger, "location", None)
            if isinstance(location, str):  # the logger of fast_dev_run has any attribute
                run.update_record(folder, wandb={"id": logger.version, "location": location})
        summary.print_start(folder, trainer, pl_module)

    def _is_resumable(self) -> bool:
        """Whether a checkpoint to continue from was written before the one that is saved now."""
        return any(name.startswith("last") for name in list_names(self.cfg.checkpoints))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say which run and which code made the checkpoint; what was logged before it must not be lost after it."""
        write_metrics(trainer)
        checkpoint["boltcutter"] = self.made_by
        if trainer.is_global_zero and not self.saved and self._is_resumable():
            run.update_record(Path(self.cfg.folder), saved=True)
            self.saved = True
