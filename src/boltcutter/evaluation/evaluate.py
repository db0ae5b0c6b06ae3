"""Evaluate a checkpoint: metrics over each sample once, on any number of processes."""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import datetime, timezone
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Callback

from boltcutter import run_files
from boltcutter.assembly.assemble import (
    Components,
    assemble,
    build_each,
    complete_config,
    configured_callbacks,
)
from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.callback.announced import Announced
from boltcutter.callback.reseed import EvaluationSeeds
from boltcutter.checkpoint.atomic import write_atomically, write_text
from boltcutter.config.errors import ConfigError, as_config_error, hint, printable
from boltcutter.config.settings import Settings
from boltcutter.config.values import name_missing_files, split_overrides
from boltcutter.environment import announcement, reads
from boltcutter.environment.process import distributed_shutdown, is_rank_zero, track_children
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.evaluation.outcomes import PredictionWriter
from boltcutter.evaluation.splits import (
    ChainedLoader,
    NoLoaderError,
    ReturnedLoaders,
    has_own_loader,
    loader_owner,
    note_limit,
    skip_reason,
    uses_validation_step,
)
from boltcutter.formatting import to_json
from boltcutter.project import Project
from boltcutter.protocols import NativeData
from boltcutter.report import page as report
from boltcutter.report import terminal as summary
from boltcutter.report.media_logging import MediaLogging
from boltcutter.run import evaluations, lineage, trust
from boltcutter.run.best import find_checkpoint
from boltcutter.run.folder import read_record, writable_place
from boltcutter.run.inputs import changed_inputs, describe_inputs
from boltcutter.run.remote.store import run_store

SPLITS = ("train", "val", "test", "all")
SETTINGS = "settings.json"  # in the folder of an evaluation
MAX_NAME = 80  # characters of its name


@reads.observed()
def evaluate_command(project: Project, overrides: list[str]) -> dict[str, float]:
    """Evaluate a run.

    Args:
        project: Project whose configuration is used.
        overrides: ``run=<folder>``, and ``ckpt=best|last|<path>``, ``split=test|val|train|all``, ``output=<folder>``;
            other overrides change the run's configuration, for example ``data=…``.

    Returns:
        Metrics by name.
    """
    filter_warnings(trains=False)
    special, rest = split_overrides(overrides, "run", "ckpt", "split", "output")
    cfg, folder = load_evaluation_config(project, special, rest)
    split = special.get("split", "test")
    if split not in SPLITS:
        raise ConfigError(
            f"split={split}: expected {', '.join(SPLITS[:-1])} or all{hint(split, SPLITS)}", kind="wrong_type"
        )
    cfg = complete_config(cfg)
    with distributed_shutdown(), name_missing_files(cfg.written), assembled(cfg, folder, "evaluate") as components:
        which = special.get("ckpt", "best")
        checkpoint = find_checkpoint(cfg.place, which)
        is_validation = uses_validation_step(components.data, split)
        limit = "limit_val_batches" if is_validation else "limit_test_batches"
        note_limit(components.trainer, limit, rest)
        source, library = lineage.git_state(project.root), lineage.library_state(project.root)
        if is_rank_zero():
            for difference in lineage.code_differences(read_record(folder), source, library):
                print(f"warning: {difference}")
        code = lineage.code_key(source, library)
        settings = describe_evaluation(components, checkpoint, split, rest, code=code)
        named = [split, *([Path(which).stem] if which != "best" else []), *sorted(rest)]
        name = re.sub(r"[^\w.=,-]+", "-", "-".join(named))[:MAX_NAME].rstrip("-.")
        given, place = special.get("output"), writable_place(folder, cfg.runs)
        output = Path(given or find_folder(place / "evaluation" / name, settings))
        components.trainer.callbacks.append(MediaLogging(output))  # type: ignore[attr-defined]
        scores = score(components, checkpoint, output, settings)
        if components.trainer.is_global_zero:
            if (found := reads.end()) is not None:
                for difference in changed_inputs(read_record(folder), describe_inputs(found, folder)):
                    print(f"warning: {printable(difference)}")
            evaluations.append(place, settings)
            for name, state in (("code.patch", source), ("library.patch", library)):
                if state.get("patch"):
                    write_atomically(output / name, methodcaller("write", state["patch"]))
            tests = evaluations.of_test(folder) if split == "test" else []
            count = count_samples(components.data, split, getattr(components.trainer, limit))
            summary.print_evaluation(output, scores, evaluations.describe(tests) if len(tests) > 1 else None, count)
            if split == "test" and (text := describe_reads(Path(cfg.runs), folder, scores, components.data)):
                print(f"note: {text}", file=sys.stderr)
            if place == folder and not given and (folder / run_files.REPORT).is_file():
                report.write_or_warn(folder)
            run_store().push(folder)
    return scores


@contextmanager
def assembled(cfg: Settings, folder: Path, command: str) -> Iterator[Components]:
    """Trainer, data and task of a run, watched as training is; of its callbacks only that which reads ahead.

    Args:
        cfg: Configuration of the run, whose ``timeout`` is the limit.
        folder: Of the run.
        command: ``evaluate`` or ``predict``.
    """
    timeout = float(cfg.timeout)

    def in_order(configured: Mapping[str, Callback]) -> list[Callback]:
        alone = cfg.changed({"callback": {name: None for name in cfg.get("callback") or {} if name != "prefetch"}})
        known = {**configured, **build_each(alone, "callback", Callback)}
        return [Announced(folder, timeout, command), *configured_callbacks(cfg, known)]

    with announcement.announce(folder, timeout, command):
        components = assemble(cfg, in_order, with_callbacks=False)
        announcement.follow(components.trainer)
        track_children(components.trainer.strategy.launcher)
        yield components


def describe_reads(runs: Path, folder: Path, scores: Mapping[str, float], data: Any) -> str:
    """How often the test split was read in a project, and by how much its best model is lucky; empty for a single one.

    Args:
        runs: Folder of all runs.
        folder: Folder of the run.
        scores: Its metrics; a fraction of the samples says how much these vary.
        data: Its data.
    """
    reads, models = evaluations.count_tests({*evaluations.folders_of(runs.absolute()), folder.absolute()})
    if models < 2:
        return ""
    name, value = next(((name, value) for name, value in scores.items() if "acc" in name and 0 < value < 1), ("", 0.0))
    test = data.splits.test if isinstance(data, NativeData) and data.splits else None
    size, count = evaluations.luck_of_best(models), (sized_len(test) if test is not None else None)
    luck = f"{size:.2f} standard deviations over seeds and samples"
    if name and count:
        deviation = math.sqrt(value * (1 - value) / count)
        luck += f", of which the {count:,} samples alone give {name} {deviation:.2g}"
    return evaluations.describe_luck(reads, models, luck)


def count_samples(data: Any, split: str, limit: float = 1.0) -> str | None:
    """How many samples of how many were evaluated, and how to evaluate all; None if this is unknown.

    Args:
        data: The data.
        split: That was evaluated.
        limit: Number of its batches that were, or their fraction if it is no integer.
    """
    splits = data.splits._asdict() if isinstance(data, NativeData) and data.splits else {}
    sizes = {name: 0 if part is None else sized_len(part) for name, part in splits.items()}
    if not sizes or None in sizes.values() or has_own_loader(data, split):
        return None
    total = sum(size or 0 for size in sizes.values())
    if isinstance(limit, int) or limit != 1.0:
        if split == "all":
            return None
        size = sizes[split] or 0
        batches = limit if isinstance(limit, int) else int(limit * math.ceil(size / data.batch_size))
        return f"{min(size, batches * data.batch_size):,} of {size:,}, some batches of the {split} split"
    if split == "all":
        return f"{total:,}"
    return f"{sizes[split]:,} of {total:,}, the {split} split; split=all evaluates all, also those of new files"


def describe_evaluation(
    components: Components,
    checkpoint: str | None,
    split: str = "test",
    overrides: Sequence[str] = (),
    *,
    code: Mapping[str, Any],
) -> dict[str, Any]:
    """What determines the result of an evaluation of a run, as plain values; ``code`` is that of ``code_key``."""
    changed = Path(checkpoint).stat().st_mtime if checkpoint and Path(checkpoint).exists() else None
    return {
        "split": split,
        "checkpoint": checkpoint and Path(checkpoint).name,
        "written": changed and datetime.fromtimestamp(changed, timezone.utc).isoformat(),
        "overrides": sorted(overrides),
        "devices": components.topology.world_size,
        "code": dict(code),
    }


def find_folder(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Return ``folder``, or with a number behind its name if it has the result of an evaluation with other settings."""
    found, number = folder, 1
    while found.exists() and _read_settings(found) != settings:
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def keep_earlier(folder: Path, settings: Mapping[str, Any]) -> None:
    """Rename ``folder`` if it has the result of an evaluation with other settings."""
    if find_folder(folder, settings) != folder:
        folder.rename(find_folder(folder, {}))


def _read_settings(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        return trust.read_json(folder / SETTINGS)
    return None


def score(
    components: Components, checkpoint: str | None, output: Path, settings: Mapping[str, Any]
) -> dict[str, float]:
    """Evaluate a checkpoint on a split and write metrics, and a table of what was predicted for each sample.

    Args:
        components: Trainer, data and task.
        checkpoint: Checkpoint to load; None uses the current weights of the task.
        output: Folder to write to.
        settings: Description of the evaluation, whose split is evaluated.

    Returns:
        Metrics by name, over all samples of the split.

    Raises:
        ConfigError: The task has no step for the split, or there is no data loader for it.
    """
    split = str(settings["split"])
    if isinstance(components.data, NativeData) and not components.trainer.local_rank:
        with as_config_error():
            components.data.prepare_data()
            components.data.setup(stage="fit")
    if split == "all" and not isinstance(components.data, NativeData):
        name = type(components.data or components.task).__name__
        raise ConfigError(f"split=all: {name} has a loader for each split; set split=test, val or train")
    if reason := skip_reason(components.data, components.task, "test" if split == "all" else split):
        raise ConfigError(f"split={split}: {reason}; add it, or set another split")
    writers = [PredictionWriter(output)]
    callbacks: list[Callback] = components.trainer.callbacks  # type: ignore[attr-defined]
    callbacks += writers
    for seeds in (callback for callback in callbacks if isinstance(callback, EvaluationSeeds)):
        seeds.tested_split = "test" if split == "all" else split
    owner: Any = loader_owner(components.data, components.task, "test" if split == "all" else split)
    is_validation = uses_validation_step(components.data, split)
    evaluate = components.trainer.validate if is_validation else components.trainer.test
    name = f"{'val' if is_validation else 'test'}_dataloader"
    function = getattr(owner, name) if is_validation or split == "test" else partial(_loader, owner, split)
    loaders = ReturnedLoaders(function)
    try:
        with replaced(owner, name, loaders), explain_mismatch(checkpoint), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Total length of `NoLoader`")  # reported below
            found = evaluate(
                components.task, datamodule=components.data, ckpt_path=checkpoint, verbose=False, weights_only=True
            )
    finally:
        callbacks[len(callbacks) - len(writers) :] = []
    if loaders.is_empty:
        raise NoLoaderError(split, f"{type(owner).__name__}.{split}_dataloader returns no loader")
    logged = {name: float(value) for of_loader in found for name, value in of_loader.items()}
    scores = {re.sub(r"^test(?=[/_.-])", split, name): value for name, value in logged.items()}
    if components.trainer.is_global_zero:
        output.mkdir(parents=True, exist_ok=True)
        write_text(output / "metrics.json", to_json(scores, indent=2) + "\n")
        write_text(output / SETTINGS, to_json(settings, indent=2) + "\n")
    return scores


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a data module or module in this context."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


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
    if split == "all":
        owner.setup(stage="fit")  # again, if the checkpoint has other statistics than these data
    if isinstance(owner, NativeData) and split == "all":
        train = copy(owner.splits.train)
        if getattr(train, "augment", None) is not None:
            train.augment = None
        with replaced(owner, "splits", owner.splits._replace(train=train)):
            return ChainedLoader([owner.loader(name) for name in SPLITS[:-1] if name not in owner.empty_splits])
    if isinstance(owner, NativeData) and not has_own_loader(owner, split):
        return owner.loader(split)
    if isinstance(owner, L.LightningDataModule):
        owner.setup(stage="fit")
    return getattr(owner, f"{split}_dataloader")()
