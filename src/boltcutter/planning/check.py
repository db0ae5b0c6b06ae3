"""The check command: find mistakes without training, or by a trial of one batch. Nothing is written."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from boltcutter.assembly.assemble import Components, assemble, complete_config, read_config
from boltcutter.assembly.overrides import load_run_config
from boltcutter.checkpoint.storage import is_url
from boltcutter.config.compose import DictConfig
from boltcutter.config.errors import ConfigError, as_config_error, printable
from boltcutter.config.values import split_overrides
from boltcutter.data.hooks import run_hooks_early
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.evaluation.folds import check_fold
from boltcutter.evaluation.splits import skip_reason
from boltcutter.planning.flags import CHECK_FLAGS
from boltcutter.project import Project
from boltcutter.protocols import NativeData, NativeTask, handles_signals
from boltcutter.structure import split_batch, tensors, with_tensors
from boltcutter.topology import ONE_DEVICE
from boltcutter.training.failure import LAUNCH_BLOCKING, explain_errors

NUM_SAMPLES = 16  # to which the model is applied; in two of them, one class may be missing
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
def main(project: Project, arguments: list[str]) -> None:
    """Check the configuration, load the data and apply the model to it, and print ``ok``.

    Args:
        project: Project whose configuration is used.
        arguments: Overrides of training, or ``run=<folder>`` for the configuration of an earlier run; with ``--batch``,
            one batch is also trained, validated and tested.
    """
    filter_warnings()
    run, rest = split_overrides([argument for argument in arguments if argument not in CHECK_FLAGS], "run")
    cfg = complete_config(load_run_config(project, Path(run["run"]), rest)) if run else read_config(project, rest)
    if (file := cfg.init_from) and not cfg.resume and not is_url(str(file)) and not Path(file).exists():
        raise ConfigError(f"init_from={file}: no such file; give a checkpoint")
    given = cfg.folder
    with TemporaryDirectory() as folder:
        cfg.folder = given or folder
        components = assemble(cfg)
        try:
            if "--batch" in arguments:
                cfg.folder = folder
                run_one_batch(cfg, components.topology.data_ranks)
            else:
                apply_model(components, cfg)
        except Exception as error:
            if getattr(error, "hide_traceback", False):
                raise ConfigError(str(error)) from error
            raise
    for line in getattr(components.data, "read_as", ()):
        print(printable(line))
    print("ok")


def apply_model(components: Components, cfg: DictConfig) -> None:
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
        data.batch_size = min(data.batch_size, NUM_SAMPLES)
        device = trainer.strategy.root_device
        task.to(device).eval()
        batch = next(iter(data.loader("train")))
        inputs, targets = split_batch(task.transfer_batch_to_device(batch, device, 0))
        with torch.no_grad(), broadcasting_refused():
            outputs = task(inputs)
            if losses := getattr(task, "losses", None):
                losses(outputs, targets)
            for text in suspicious_outputs(task, inputs, outputs):
                print(f"warning: model: {text}", file=sys.stderr)


def suspicious_outputs(task: L.LightningModule, inputs: Any, outputs: Any) -> Iterator[str]:
    """What is rarely meant: samples that affect each other in evaluation, and probabilities in place of logits.

    Args:
        task: In evaluation mode.
        inputs: Some samples: a tensor of shape (N, …), or a structure of several.
        outputs: Of the task for these, shape (N, …).
    """
    if not isinstance(outputs, Tensor) or not outputs.ndim or not outputs.is_floating_point():
        return
    half, parts = len(outputs) // 2, tensors(inputs)
    if half and parts and all(part.ndim and len(part) == len(outputs) for part in parts):
        # The whole is repeated only to tell this from random outputs.
        error = (task(with_tensors(inputs, [part[:half] for part in parts])) - outputs[:half]).abs().max()
        if error > 0.02 * outputs.abs().max() and torch.equal(task(inputs), outputs):
            yield (
                "the output for a sample depends on the other samples of its batch, also in evaluation, so metrics "
                "depend on data.batch_size; compute each sample by itself, or use BatchNorm, whose statistics are "
                "fixed then"
            )
    has_classes = getattr(task, "kind", None) == "classification" and outputs.ndim == 2 and outputs.shape[1] > 1
    if has_classes and outputs.min() >= 0 and torch.allclose(outputs.sum(1), torch.ones(()).to(outputs), atol=1e-3):
        yield "its outputs are probabilities, while cross-entropy expects logits; remove the softmax"


def run_one_batch(cfg: DictConfig, num_ranks: int) -> None:
    """Train, validate and test one batch on one device, without loggers, checkpoints and progress bar.

    Raises:
        ConfigError: A setting is wrong, or a metric that a callback monitors is not logged.
        FirstBatchError: The task, the model or the data failed.
    """
    cfg.trainer.fast_dev_run = 1
    if num_ranks > 1:
        cfg.trainer.update(ONE_DEVICE)
    with redirect_stdout(io.StringIO()):  # notes that were printed before
        components = assemble(cfg)
    trainer, data, task = components.trainer, components.data, components.task
    trainer.num_sanity_val_steps = 1  # as in training, which validates first
    if isinstance(data, NativeData):
        data.batch_size //= num_ranks
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [c for c in callbacks if not isinstance(c, ProgressBar) and not handles_signals([c])]
    with explain_errors(trainer), broadcasting_refused():
        check_fold(cfg, trainer)
        with as_config_error():
            if data is not None:
                run_hooks_early(trainer, task, data)
        trainer.fit(task, datamodule=data)
        if cfg.test and not skip_reason(data, task, "test"):
            trainer.test(task, datamodule=data, verbose=False)


@contextmanager
def broadcasting_refused() -> Iterator[None]:
    """Turn torch's warning that outputs and targets have different shapes into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", BROADCAST)
        yield
