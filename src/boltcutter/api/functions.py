"""Train, evaluate and predict from Python, as the commands of the same names do.

Functions take the overrides of the command line as strings, and raise ``ConfigError`` where the command would print an
error. They change the calling process only while they run: its signal handlers, warning filters and logging levels are
restored afterwards.
"""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from boltcutter.cli.main import expand_home, local_runs, prepare_process
from boltcutter.config.errors import ConfigError
from boltcutter.environment import announcement
from boltcutter.environment.process import distributed_rank
from boltcutter.environment.startup import restored_signals
from boltcutter.environment.stop_signals import PreemptionError
from boltcutter.environment.warning_filters import LOGGERS
from boltcutter.extend import load_object
from boltcutter.project import Project, ProjectError
from boltcutter.run import trust

if TYPE_CHECKING:
    import lightning as L

    from boltcutter.report.csv_table import Table

Location = Project | Path | str | None


class Loaded(NamedTuple):
    """A trained task with its data module, which is set up, or None if the task defines its own dataloaders."""

    task: L.LightningModule
    data: L.LightningDataModule | None


def train(*overrides: str, project: Location = None, task: Any = None, data: Any = None, trainer: Any = None) -> Path:
    """Train a model, test its best checkpoint and write the report.

    With ``task``, objects that were built in Python are trained in place of those of the configuration. To resume such
    a run, pass ``"resume=<folder>"`` and the same objects, built anew.

    Args:
        overrides: Overrides of the configuration, such as ``"model=mlp", "trainer.max_epochs=3"``;
            ``"resume=<folder>"`` continues a run.
        project: The project, or a file or folder in it; by default the project of the working directory.
        task: A LightningModule.
        data: A LightningDataModule; None if the task has its own dataloaders.
        trainer: An ``L.Trainer``, which keeps its own callbacks and loggers besides those of the configuration.

    Returns:
        The folder of the run.

    Raises:
        ConfigError: The configuration has mistakes, or this process has already trained on several devices.
        KeyboardInterrupt: Training was interrupted, and has saved a checkpoint.
        PreemptionError: Another signal ended training, which has saved a checkpoint; not handled, it ends the process
            with the exit status that a scheduler expects.
    """
    if distributed_rank() is not None:
        raise ConfigError(
            "train: this process has been a rank of a run on several devices, and can be one only once; train in a new "
            "process, for example by the command `boltcutter train`"
        )
    with ExitStack() as stack:
        if task is not None or data is not None or trainer is not None:
            from boltcutter.api.objects import registered  # slow import of Lightning

            overrides = stack.enter_context(registered(task, data, trainer, overrides))
        folder: Path = _call("boltcutter.training.train:train_command", project, overrides, goes_on=True)
    return folder


def load(
    run: Path | str,
    *overrides: str,
    ckpt: Path | str = "best",
    device: str = "cpu",
    task: Any = None,
    data: Any = None,
    project: Location = None,
) -> Loaded:
    """Build the task and data of a run, and load the weights of a checkpoint.

    Args:
        run: Folder of the run.
        overrides: Changes of the run's configuration, such as ``"data.batch_size=512"``.
        ckpt: ``best``, ``last`` or the path of a checkpoint.
        device: Device of the task, such as ``cuda:0``.
        task: The task to load the weights into, if it was not built from a configuration.
        data: Its data module.
        project: The project, or a file or folder in it; by default the project of the working directory.

    Returns:
        The task in evaluation mode, and the data module after ``setup``.

    Raises:
        ConfigError: The run does not exist, or its objects were built in Python.
    """
    from boltcutter.api.objects import lent  # slow import of Lightning

    with lent(task, data):
        components = _call("boltcutter.api.load:load_components", project, (*overrides, *_format(run=run, ckpt=ckpt)))
    return Loaded(components.task.to(device), components.data)


def evaluate(
    *overrides: str,
    run: Path | str,
    ckpt: Path | str = "best",
    split: str = "test",
    output: Path | str | None = None,
    project: Location = None,
) -> dict[str, float]:
    """Evaluate a checkpoint of a run on each sample of a split, and write metrics and predictions to the run folder.

    Args:
        overrides: Changes of the run's configuration, such as ``"data.batch_size=512"``.
        run: Folder of the run.
        ckpt: ``best``, ``last`` or the path of a checkpoint.
        split: ``train``, ``val`` or ``test``.
        output: Folder to write to; by default one of its own in ``evaluation`` of the run folder.
        project: The project, or a file or folder in it; by default the project of the working directory.

    Returns:
        Metrics by name.

    Raises:
        ConfigError: The run does not exist, has no such split, or an override is invalid.
    """
    given = _format(run=run, ckpt=ckpt, split=split, output=output)
    scores: dict[str, float] = _call("boltcutter.evaluation.evaluate:evaluate_command", project, (*overrides, *given))
    return scores


def predict(
    *overrides: str,
    run: Path | str,
    input: Path | str | None = None,
    ckpt: Path | str = "best",
    output: Path | str | None = None,
    project: Location = None,
) -> Table | list[Any] | str:
    """Predict new files, or generate the continuation of a text, and write the predictions to the run folder.

    Args:
        overrides: Changes of the run's configuration; for a text also ``"tokens=200"``, ``"temperature=0.8"``,
            ``"top_k=50"`` and ``"seed=0"``.
        run: Folder of the run.
        input: File or folder, several separated by commas; for a text also the text itself. Not used by data modules
            with a ``predict_dataloader`` of their own.
        ckpt: ``best``, ``last`` or the path of a checkpoint.
        output: File to write to; by default ``predictions.csv`` in the run folder.
        project: The project, or a file or folder in it; by default the project of the working directory.

    Returns:
        The columns of a table with one row per sample, by name, for example for ``pandas.DataFrame``; for a text, the
        text and its continuation; a list of outputs over batches if they do not fit into a table.

    Raises:
        ConfigError: The run does not exist, an input cannot be read, or an override is invalid.
    """
    given = _format(run=run, input=input, ckpt=ckpt, output=output)
    found: Table | list[Any] | str = _call(
        "boltcutter.prediction.predict:predict_command", project, (*overrides, *given)
    )
    return found


def _format(**arguments: Path | str | None) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in arguments.items() if value is not None)


def _call(target: str, project: Location, overrides: tuple[str, ...], **options: Any) -> Any:
    """Call a function of a command, given as ``package.module:function``."""
    if flags := [override for override in overrides if override.startswith("-")]:
        raise ConfigError(f"{flags[0]}: a flag of the command line; remove it")
    found = _find(project)
    found.activate()
    with _unchanged_process():
        arguments = trust.apply_overrides([expand_home(override) for override in overrides])
        prepare_process()
        return load_object(target)(found, local_runs(found, arguments), **options)


def _find(project: Location) -> Project:
    try:
        found = project if isinstance(project, Project) else Project.find(project)
    except ProjectError as error:
        raise ConfigError(str(error)) from error
    if copy := found.unused_vendored_library():
        raise ConfigError(
            f"PYTHONPATH: {copy} has the project's copy of boltcutter, but another one is imported; "
            f"set PYTHONPATH={copy}"
        )
    return found


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Restore what commands change in their process, which ends with them."""
    is_trusted = trust.is_granted()
    try:
        with restored_signals(), _restored_filters():
            yield
    except PreemptionError as error:
        if error.status == 128 + signal.SIGINT:
            raise KeyboardInterrupt(error.reason) from error
        raise
    finally:
        trust.apply_overrides([f"trust={is_trusted}"])
        announcement.withdraw()  # a notebook that is idle afterwards does not hang


@contextmanager
def _restored_filters() -> Iterator[None]:
    """Restore the warning filters and logging levels of this process after the block."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
