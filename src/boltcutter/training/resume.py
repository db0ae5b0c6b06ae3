"""The state with which training starts: that of a checkpoint of the run, or the weights of ``init_from``.

Lightning reads a checkpoint in ``fit``, on each rank: weights, data module and callbacks after ``setup``, then loops,
optimizers and schedulers, right before training. What is changed, in the order of a run:

1. Before ``fit``, ``load_initial_state`` reads the same file without its tensors being copied, checks its form, and
   compares weights, limits and data with those of the run: a mistake is one line, before ranks are launched. The data
   module loads its state here already, by which it compares its samples and their order.
2. ``fit`` restores as always. ``explain_restoring`` turns an error of that into one line.
3. ``Recorder.on_fit_start`` checks the paths of files that ``ModelCheckpoint`` will remove.
4. At ``on_train_start``, ``ResumeState`` restores what Lightning does not save: logged values, metrics, what is frozen.
   After it, ``SettingChanges`` applies the settings that were changed, as optimizers have those of the checkpoint.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from boltcutter.assembly.assemble import Components
from boltcutter.checkpoint.load import load_checkpoint
from boltcutter.checkpoint.state import check_state
from boltcutter.checkpoint.storage import CheckpointError, check_writable, is_within
from boltcutter.checkpoint.weights import incompatibility, load_weights
from boltcutter.config.errors import ConfigError, as_config_error, one_line, prefix_errors, quoted
from boltcutter.config.settings import Settings
from boltcutter.protocols import NativeData, NativeTask, find_model
from boltcutter.run.changes import SettingChanges, length
from boltcutter.run.folder import read_record
from boltcutter.run.remote.store import run_store
from boltcutter.training.ending import EndOfTraining

RESTORING = {"_restore_modules_and_callbacks", "restore_training_state"}  # functions of Lightning, and others
RESTORING |= {"load_initial_state", "restore_epoch", "_apply_changes", "_replay_schedules"}


def load_initial_state(
    components: Components, cfg: Settings, checkpoint: str | None, ending: EndOfTraining, changes: SettingChanges
) -> None:
    """Check the checkpoint storage, then read the state to resume from, or load the weights of ``init_from``.

    Args:
        components: Changed.
        cfg: The configuration of the run.
        checkpoint: Checkpoint to resume from; None for a new run.
        ending: Detects whether training had stopped early.
        changes: Applies overrides given together with ``resume=``.

    Raises:
        ConfigError: Checkpoints cannot be written, or ``checkpoint`` cannot be read or does not match.
    """
    if components.trainer.is_global_zero and components.trainer.checkpoint_callbacks:
        with prefix_errors(f"checkpoints={cfg.checkpoints}", CheckpointError):
            check_writable(cfg.place.checkpoints)
    lines = []
    if checkpoint:
        with prefix_errors(f"resume={cfg.folder}", CheckpointError), explain_restoring(checkpoint):
            saved = load_checkpoint(checkpoint, lazy=True)
            check_state(saved, checkpoint, resumes=True)
            if fault := incompatibility(saved, components.task):
                raise ConfigError(
                    f"{checkpoint} does not match the task: {fault}; use the same model, or start a new run"
                )
            reached_limit = check_limits(components.trainer, saved)
            for callback in components.trainer.callbacks:  # type: ignore[attr-defined]
                state = saved.get("callbacks", {}).get(callback.state_key)
                if state and getattr(callback, "restores_monitors", False):
                    callback.load_state_dict(state)
            restore_data_state(components.data, cfg, saved)
            note = ending.resume(saved)
            if reached_limit and not note:
                note = f"training is complete ({reached_limit}){'; it is only tested' if cfg.test else ''}; "
                note += f"to continue, set {reached_limit.partition('=')[0]}=<more>"
            changed = changes.resume(
                saved, ends=bool(reached_limit) or ending.finished, planned=length(components.trainer)
            )
            lines = [
                f"resume={run_store().show(cfg.place.folder)}: {line}"
                for line in ([note, *changed] if note else changed)
            ]
    elif cfg.init_from:
        with prefix_errors(f"init_from={cfg.init_from}", CheckpointError):
            is_native = isinstance(components.task, NativeTask)
            unmatched = load_weights(find_model(components.task) if is_native else components.task, cfg.init_from)
            lines = [f"init_from: {line}" for line in unmatched]
    if components.trainer.is_global_zero:
        print(*(f"{quoted(line)}\n" for line in lines), sep="", end="")


def check_restored_paths(trainer: L.Trainer) -> None:
    """Check the paths that each ``ModelCheckpoint`` has restored from a checkpoint, as it removes them.

    The path of the best one may be that of another folder, where the run was before; it is not restored.

    Raises:
        CheckpointError: A path is not in the folder of the callback.
    """
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None:
            continue
        place, best = callback.dirpath, callback.best_model_path
        restored = (*callback.best_k_models, callback.kth_best_model_path, callback.last_model_path)
        if outside := [path for path in restored if path and not is_within(path, place)]:
            raise CheckpointError(
                f"{trainer.ckpt_path}: {type(callback).__name__} names {quoted(outside[0])}, which is not in {place}; "
                "use another checkpoint, or start a new run with init_from="
            )
        if best and not is_within(best, place):
            callback.best_model_path = ""
            if trainer.is_global_zero:
                print(f"warning: {type(callback).__name__} forgets {quoted(best)}, which is not in {place}")


@contextmanager
def explain_restoring(checkpoint: str | None) -> Iterator[None]:
    """In this context, an error while a checkpoint is restored is one line with the place of its cause.

    Raises:
        ConfigError: Lightning, the task, the data module or a callback cannot restore its state.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        is_restoring = getattr(error, "is_of_checkpoint", False) or RESTORING & {frame.name for frame in frames}
        if isinstance(error, ConfigError) or getattr(error, "hide_traceback", False) or not is_restoring:
            raise
        place = f"{type(error).__name__} in {Path(frames[-1].filename).name}:{frames[-1].lineno}"
        raise ConfigError(
            f"{checkpoint}: not restored ({place}: {one_line(error)}); use another checkpoint, or start a new run"
        ) from error


def check_limits(trainer: L.Trainer, saved: dict[str, Any]) -> str:
    """Check that the resumed run has not gone beyond ``max_epochs`` or ``max_steps``.

    Returns:
        The limit that it has reached, such as ``trainer.max_epochs=20``; empty if there is none.

    Raises:
        ConfigError: It has gone beyond one of them.
    """
    epochs = saved.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current", {}).get("processed", 0)
    if "StochasticWeightAveraging" in saved.get("callbacks", {}) and epochs - 1 == trainer.max_epochs:
        epochs -= 1  # the last one computes the statistics of BatchNorm
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


def restore_data_state(data: L.LightningDataModule | None, cfg: Settings, saved: dict[str, Any]) -> None:
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
    recorded = read_record(cfg.place.folder).get("data")
    if cfg.resume_exact and recorded and recorded != data.fingerprint():
        raise ConfigError(
            f"resume={cfg.folder}: the data has changed (fingerprint {data.fingerprint()}, was {recorded}); restore "
            "it, or set resume_exact=false"
        )
