"""Measure a checkpoint: each sample counted once on any number of processes; tables, a picture, the worst errors."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from boltcutter import run, summary
from boltcutter.adapt import is_native_data, loader_owner, skip_reason, uses_validation_step
from boltcutter.assemble import Components, as_config_error, assemble, check_config
from boltcutter.atomic import write_text
from boltcutter.config import ConfigError, hint
from boltcutter.environment.process import distributed_shutdown, is_rank_zero
from boltcutter.environment.warnings import filter_warnings
from boltcutter.loading import find_damage
from boltcutter.outcomes import PredictionWriter
from boltcutter.project import Project
from boltcutter.selection import find_best, find_newest, list_names
from boltcutter.storage import CheckpointError


def main(project: Project, words: list[str]) -> None:
    """Evaluate a run.

    Args:
        project: Whose configuration is used.
        words: ``run=<folder>``, and ``ckpt=best|last|<path>``, ``split=test|val|train``, ``output=<folder>``; any other
            word changes the run's configuration, as ``data=…`` does.
    """
    filter_warnings()
    special, rest = run.split_overrides(words, "run", "ckpt", "split", "output")
    cfg, folder = run.load_evaluation_config(project, special, rest)
    split = special.get("split", "test")
    if split not in ("train", "val", "test"):
        raise ConfigError(f"split={split}: expected train, val or test{hint(split, ('train', 'val', 'test'))}")
    check_config(cfg)
    name = split if not any(word.startswith("data") for word in rest) else f"{cfg.choices.data}-{split}"
    output = Path(special.get("output") or folder / "evaluation" / name)
    components = assemble(cfg, with_callbacks=False)
    with distributed_shutdown():
        scores = score(components, find_checkpoint(cfg.checkpoints, special.get("ckpt", "best")), output, split)
        if components.trainer.is_global_zero:
            summary.print_evaluation(output, scores)


def find_checkpoint(place: str, which: str) -> str:
    """``best``, ``last``, the name of one of the run's checkpoints, a path or a URL.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    try:
        known = list_names(place)
        if which in ("best", "last"):
            found = (find_best if which == "best" else find_newest)(
                place, print if is_rank_zero() else lambda told: None
            )
        else:
            found = f"{place}/{which}" if which in known else which
        fault = find_damage(found) if found else "none is there"
    except CheckpointError as error:
        raise ConfigError(f"ckpt={which}: {error}") from error
    if found is None or fault:
        raise ConfigError(f"ckpt={which}: {fault} (the run has: {', '.join(known) or 'none yet'})")
    return found


def score(components: Components, checkpoint: str | None, output: Path, split: str = "test") -> dict[str, float]:
    """Measure ``checkpoint`` on a split and write ``output``: metrics, tables, predictions, a picture, worst errors.

    Args:
        components: Trainer, data and task.
        checkpoint: Whose weights are measured; None takes those that the task has.
        output: Folder.
        split: Which samples.

    Returns:
        Metrics by name, over all samples of the split.

    Raises:
        ConfigError: The task has no step for it, or nobody has its samples.
    """
    if is_native_data(components.data) and not components.trainer.local_rank:
        with as_config_error():
            components.data.prepare_data()
            components.data.setup("fit")
    if lack := skip_reason(components.data, components.task, split):
        raise ConfigError(f"split={split}: {lack}; give it one, or choose another split")
    outcomes = PredictionWriter(output)
    callbacks: list[Callback] = components.trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(outcomes)
    owner: Any = loader_owner(components.data, components.task, split)
    try:
        if uses_validation_step(components.data, split):
            measure = components.trainer.validate
        else:
            measure = components.trainer.test
            if split != "test":
                owner.test_dataloader = partial(_loader, owner, split)
        found = measure(
            components.task, datamodule=components.data, ckpt_path=checkpoint, verbose=False, weights_only=True
        )
    finally:
        callbacks.remove(outcomes)
    logged = {name: float(value) for of_loader in found for name, value in of_loader.items()}
    scores = {re.sub(r"^test(?=[/_.-])", split, name): value for name, value in logged.items()}
    if components.trainer.is_global_zero:
        output.mkdir(parents=True, exist_ok=True)
        write_text(output / "metrics.json", json.dumps(scores, indent=2) + "\n")
    return scores


def _loader(owner: Any, split: str) -> Any:
    """All samples of another split than the test's."""
    if is_native_data(owner):
        return owner.loader(split)
    if isinstance(owner, L.LightningDataModule):
        owner.setup("fit")
    return getattr(owner, f"{split}_dataloader")()
