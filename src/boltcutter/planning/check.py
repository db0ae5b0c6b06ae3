"""The check command: find mistakes without training, or by a trial of a few batches. Nothing is written."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden

from boltcutter.assembly.assemble import Components, assemble, complete_config, read_config
from boltcutter.assembly.overrides import load_run_config
from boltcutter.checkpoint.storage import is_url
from boltcutter.config.errors import ConfigError, as_config_error, printable
from boltcutter.config.settings import Settings
from boltcutter.config.values import split_overrides
from boltcutter.data.hooks import run_hooks_early
from boltcutter.diagnosis import Finding, Invariants
from boltcutter.diagnosis.trial import Trial
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.evaluation.folds import check_fold
from boltcutter.evaluation.splits import skip_reason
from boltcutter.planning.flags import CHECK_FLAGS
from boltcutter.project import Project
from boltcutter.protocols import NativeData, NativeTask, data_parallel, handles_signals
from boltcutter.structure import split_batch
from boltcutter.topology import ONE_DEVICE
from boltcutter.training.failure import LAUNCH_BLOCKING, explain_errors

NUM_SAMPLES = 16  # of each rank, to which the model is applied; in two of them, one class may be missing
TWO_RANKS = {"accelerator": "cpu", "devices": 2, "num_nodes": 1, "strategy": "ddp"}
BROADCAST = ".*Using a target size .* that is different to the input size.*"  # trains on wrong pairs of values


@contextmanager
def errors_in_place() -> Iterator[None]:
    """Have CUDA, which reads this once, raise errors of kernels where they happen."""
    before = os.environ.get(LAUNCH_BLOCKING)
    os.environ[LAUNCH_BLOCKING] = "1"
    try:
        yield
    finally:
        del os.environ[LAUNCH_BLOCKING]
        os.environ.update({LAUNCH_BLOCKING: before} if before else {})


@errors_in_place()
def check_command(project: Project, arguments: list[str]) -> dict[str, list[Finding]] | None:
    """Check the configuration, load the data and apply the model to it, and print ``ok``.

    Args:
        project: Project whose configuration is used.
        arguments: Overrides of training, or ``run=<folder>`` for the configuration of an earlier run; with ``--batch``,
            some batches are also trained, and one is validated and tested.

    Returns:
        With ``--batch``, what was found.
    """
    found = None
    filter_warnings()
    run, rest = split_overrides([argument for argument in arguments if argument not in CHECK_FLAGS], "run")
    cfg = complete_config(load_run_config(project, Path(run["run"]), rest)) if run else read_config(project, rest)
    if (file := cfg.init_from) and not cfg.resume and not is_url(str(file)) and not Path(file).exists():
        raise ConfigError(f"init_from={file}: no such file; give a checkpoint")
    given = cfg.folder
    with TemporaryDirectory() as folder:
        cfg = cfg.changed({"folder": given or folder})
        components = assemble(cfg)
        try:
            if "--batch" in arguments:
                cfg = cfg.changed({"folder": folder})
                found = {"findings": run_trial(cfg, components.topology.data_ranks)}
            else:
                apply_model(components, cfg)
        except Exception as error:
            if getattr(error, "hide_traceback", False):
                raise ConfigError(str(error)) from error
            raise
    for line in getattr(components.data, "read_as", ()):
        print(printable(line))
    print("ok")
    return found


def apply_model(components: Components, cfg: Settings) -> None:
    """Load the data, unless that may download or write files, and apply the model and the loss to some samples."""
    trainer, data, task = components.trainer, components.data, components.task
    with explain_errors(trainer):
        with as_config_error():
            if data is not None and hasattr(data, "check_files"):
                data.check_files()
            if data is None or is_overridden("prepare_data", data):
                print("note: training prepares the data, so it was not loaded; check --batch does so", file=sys.stderr)
                return
            run_hooks_early(trainer, task, data)
        if not isinstance(data, NativeData) or not isinstance(task, NativeTask):
            return
        data.num_workers = 0  # type: ignore[attr-defined]
        data.batch_size = min(data.batch_size, NUM_SAMPLES * data_parallel(trainer.strategy).size)
        device = trainer.strategy.root_device
        task.to(device).eval()
        with as_config_error():  # what the data finds wrong in a sample that it reads
            batch = next(iter(data.loader("train")))
        inputs, targets = split_batch(task.transfer_batch_to_device(batch, device, 0))
        with torch.no_grad(), broadcasting_refused():
            outputs = task(inputs)
            if losses := getattr(task, "losses", None):
                losses(outputs, targets)


def run_trial(
    cfg: Settings,
    num_ranks: int,
    *,
    with_data: bool = False,
    weights: Callable[[L.LightningModule], bool] | None = None,
    on_ranks: bool = False,
) -> list[Finding]:
    """Train some batches, validate and test one, on one device, without loggers, checkpoints and progress bar.

    Args:
        cfg: Configuration.
        num_ranks: Over which training divides a batch.
        with_data: Whether the data are checked, too.
        weights: Loads trained weights, with which predictions are compared with baselines; see ``Trial``.
        on_ranks: Whether two ranks train, on the CPU, and nothing is tested.

    Returns:
        What ``callback.invariants`` and its probes found; nothing without that callback.

    Raises:
        ConfigError: A setting is wrong, or a metric that a callback monitors is not logged.
        FirstBatchError: The task, the model or the data failed.
    """
    planned = cfg.trainer
    devices = TWO_RANKS if on_ranks else ONE_DEVICE if num_ranks > 1 else {}
    cfg = cfg.changed({"trainer": {"fast_dev_run": 1, **devices}})
    with redirect_stdout(io.StringIO()):  # notes that were printed before
        components = assemble(cfg)
    trainer, data, task = components.trainer, components.data, components.task
    trainer.num_sanity_val_steps = 1  # as in training, which validates first
    if isinstance(data, NativeData):
        data.batch_size = data.batch_size // num_ranks * trainer.world_size
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [c for c in callbacks if not isinstance(c, ProgressBar) and not handles_signals([c])]
    trials = []
    for place, callback in enumerate(callbacks):
        if type(callback) is Invariants:
            options: Any = {"ignore": callback.ignore, "on_finding": callback.on_finding}
            callbacks[place] = trial = Trial(with_data=with_data, weights=weights, **options)
            trials.append(trial)
            plan_training(trainer, planned)  # which the trial ends
    with explain_errors(trainer), broadcasting_refused():
        check_fold(cfg, trainer)
        with as_config_error():
            if data is not None:
                run_hooks_early(trainer, task, data)
        trainer.fit(task, datamodule=data)
        if cfg.test and not on_ranks and not skip_reason(data, task, "test"):
            trainer.test(task, datamodule=data, verbose=False)
    return [finding for trial in trials for finding in trial.findings]


def plan_training(trainer: L.Trainer, settings: Mapping[str, Any]) -> None:
    """Give a trainer of a trial the length of the training, which schedules depend on."""
    steps, epochs = settings.get("max_steps"), settings.get("max_epochs")
    if epochs is None:
        epochs = 1000 if steps in (None, -1) else -1  # as Lightning does
    trainer.fit_loop.max_epochs = epochs
    trainer.fit_loop.epoch_loop.max_steps = -1 if steps is None else steps
    limit = settings.get("limit_train_batches")
    trainer.limit_train_batches = 1.0 if limit is None else limit


@contextmanager
def broadcasting_refused() -> Iterator[None]:
    """Turn torch's warning that outputs and targets have different shapes into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", BROADCAST)
        yield
