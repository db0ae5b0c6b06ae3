"""Evaluate a checkpoint: metrics over each sample once on any number of processes, tables, a plot, worst errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from boltcutter.assembly.adapt import loader_owner, skip_reason, uses_validation_step
from boltcutter.assembly.assemble import Components, assemble, check_config
from boltcutter.assembly.media import MediaLogging
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError, as_config_error, hint
from boltcutter.environment.process import distributed_shutdown
from boltcutter.environment.warnings import filter_warnings
from boltcutter.evaluation.outcomes import PredictionWriter
from boltcutter.project import Project
from boltcutter.protocols import NativeData
from boltcutter.report import terminal as summary
from boltcutter.run import folder as run
from boltcutter.run import remote
from boltcutter.run.best import find_checkpoint


def main(project: Project, overrides: list[str]) -> dict[str, float]:
    """Evaluate a run.

    Args:
        project: Project whose configuration is used.
        overrides: ``run=<folder>``, and ``ckpt=best|last|<path>``, ``split=test|val|train``, ``output=<folder>``; other
            overrides change the run's configuration, for example ``data=…``.

    Returns:
        Metrics by name.
    """
    filter_warnings()
    special, rest = run.split_overrides(overrides, "run", "ckpt", "split", "output")
    cfg, folder = run.load_evaluation_config(project, special, rest)
    split = special.get("split", "test")
    if split not in ("train", "val", "test"):
        raise ConfigError(f"split={split}: expected train, val or test{hint(split, ('train', 'val', 'test'))}")
    check_config(cfg)
    name = split if not any(override.startswith("data") for override in rest) else f"{cfg.choices.data}-{split}"
    output = Path(special.get("output") or folder / "evaluation" / name)
    components = assemble(cfg, with_callbacks=False)
    components.trainer.callbacks.append(MediaLogging(output))  # type: ignore[attr-defined]
    with distributed_shutdown():
        scores = score(components, find_checkpoint(cfg, special.get("ckpt", "best")), output, split)
        if components.trainer.is_global_zero:
            summary.print_evaluation(output, scores)
            remote.push(folder)
    return scores


def score(components: Components, checkpoint: str | None, output: Path, split: str = "test") -> dict[str, float]:
    """Evaluate a checkpoint on a split and write metrics, tables, predictions, a plot and the worst errors.

    Args:
        components: Trainer, data and task.
        checkpoint: Checkpoint to load; None uses the current weights of the task.
        output: Folder to write to.
        split: ``train``, ``val`` or ``test``.

    Returns:
        Metrics by name, over all samples of the split.

    Raises:
        ConfigError: The task has no step for the split, or there is no data loader for it.
    """
    if isinstance(components.data, NativeData) and not components.trainer.local_rank:
        with as_config_error():
            components.data.prepare_data()
            components.data.setup("fit")
    if reason := skip_reason(components.data, components.task, split):
        raise ConfigError(f"split={split}: {reason}; add it, or set another split")
    writer = PredictionWriter(output)
    callbacks: list[Callback] = components.trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(writer)
    owner: Any = loader_owner(components.data, components.task, split)
    try:
        if uses_validation_step(components.data, split):
            evaluate = components.trainer.validate
        else:
            evaluate = components.trainer.test
            if split != "test":
                owner.test_dataloader = partial(_loader, owner, split)
        with explain_mismatch(checkpoint):
            found = evaluate(
                components.task, datamodule=components.data, ckpt_path=checkpoint, verbose=False, weights_only=True
            )
    finally:
        callbacks.remove(writer)
    logged = {name: float(value) for of_loader in found for name, value in of_loader.items()}
    scores = {re.sub(r"^test(?=[/_.-])", split, name): value for name, value in logged.items()}
    if components.trainer.is_global_zero:
        output.mkdir(parents=True, exist_ok=True)
        write_text(output / "metrics.json", json.dumps(scores, indent=2) + "\n")
    return scores


@contextmanager
def explain_mismatch(checkpoint: str | None) -> Iterator[None]:
    """Convert Lightning's error about weights that do not fit.

    Raises:
        ConfigError: The checkpoint is from another model.
    """
    try:
        yield
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        raise ConfigError(f"{checkpoint}: its weights do not fit the model; remove overrides of the model") from error


def _loader(owner: Any, split: str) -> Any:
    """Loader over all samples of the train or val split."""
    if isinstance(owner, NativeData):
        return owner.loader(split)
    if isinstance(owner, L.LightningDataModule):
        owner.setup("fit")
    return getattr(owner, f"{split}_dataloader")()
