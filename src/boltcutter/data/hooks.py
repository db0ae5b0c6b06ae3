"""Run ``prepare_data`` and ``setup`` with the same random state in every process, and prepare loaders."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from boltcutter.data.foreign_loader import LoaderPreparation
from boltcutter.data.seeding import seeded_generators
from boltcutter.data.streams import Purpose, stream
from boltcutter.internals import data_connector, tree_leaves
from boltcutter.protocols import NativeData

HOOKS = ("prepare_data", "setup")


class SeededHook:
    """Wraps a hook so that all random generators are seeded with the run's seed while it runs.

    A random split, such as ``random_split`` without a generator, is then the same on all ranks, in a resumed run and
    in an evaluation.

    Args:
        hook: A bound method, or what was set in its place, such as a lambda.
        name: Name of the hook.
        seed: Seed of the run.

    Attributes:
        ran_early: Whether the hook already ran before Lightning's call, which is then skipped.
    """

    def __init__(self, hook: Callable[..., None], name: str, seed: int) -> None:
        update_wrapper(self, hook)  # Lightning checks whether the hook is overridden
        self.hook, self.stream, self.ran_early = hook, stream(Purpose.SETUP, seed, position=HOOKS.index(name)), False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the hook, unless it ran early."""
        if self.ran_early:
            self.ran_early = False
            return
        with seeded_generators(self.stream):
            self.hook(*args, **kwargs)


def seed_hooks(owner: L.LightningDataModule | L.LightningModule, seed: int) -> None:
    """Seed the overridden data hooks of ``owner``, so that their random splits depend only on ``seed``."""
    for name in HOOKS:
        if isinstance(hook := getattr(owner, name), SeededHook):  # of an earlier training with the same object
            hook = hook.hook
        if type(hook) is not MethodType or is_overridden(name, owner):
            setattr(owner, name, SeededHook(hook, name, seed))


def shard_loaders(trainer: L.Trainer, seed: int) -> None:
    """Use loaders that are sharded as they are; others are sharded, seeded and resumed by ``LoaderPreparation``."""
    data_connector(trainer)._prepare_dataloader = LoaderPreparation(trainer, seed)


def run_hooks_early(trainer: L.Trainer, task: L.LightningModule, data: L.LightningDataModule) -> None:
    """Load the data before processes are launched, with the trainer attached as during Lightning's own calls.

    On several devices, each rank runs ``setup`` of its own, which may depend on the rank. So the early one is that of a
    copy, and what needs the process group is not run early.

    Raises:
        ValueError: A split has no batch, or a file that a setting names cannot be read.
    """
    trainer.strategy.connect(task)
    data_connector(trainer).attach_data(task, datamodule=data)
    is_alone = trainer.num_devices * trainer.num_nodes == 1
    try:
        _run_hook(data, "prepare_data")
        if isinstance(data, NativeData):  # it loads its splits once, and again for the statistics of a checkpoint
            data.setup(stage=TrainerFn.FITTING)
        elif is_alone:
            _run_hook(data, "setup", TrainerFn.FITTING)
        elif copied := _copy_of(data, trainer):
            data = copied
            data.setup(stage=TrainerFn.FITTING)
        else:
            return
        for split in ("train", "val"):
            name = f"{split}_dataloader"
            if is_overridden(name, data) and has_no_batch(getattr(data, name)()):
                raise ValueError(f"data: the {split} split has no batch; give more samples or lower data.batch_size")
    except (ValueError, RuntimeError) as error:
        if is_alone or "init_process_group" not in str(error):
            raise
    except OSError as error:
        if (setting := _setting_of(error.filename, data)) is None:
            raise
        place = "" if setting.endswith(f"={error.filename}") else f"{error.filename}: "
        raise ValueError(f"{setting}: {place}{str(error.strerror).lower()}; correct it") from error


def _setting_of(file: object, data: L.LightningDataModule) -> str | None:
    """The argument of a data module, ``data.name=path``, that is the path of a file, or of a folder above it."""
    if not isinstance(file, str | Path):
        return None
    given = {**getattr(data, "hparams", {}), **vars(data)}
    for name in inspect.signature(type(data)).parameters:
        path = given.get(name)
        if isinstance(path, str | Path) and str(path) and Path(file).absolute().is_relative_to(Path(path).absolute()):
            return f"data.{name}={path}"
    return None


def _run_hook(data: L.LightningDataModule, name: str, *arguments: Any) -> None:
    """Run a hook in place of Lightning's call of it."""
    hook = getattr(data, name)
    hook(*arguments)
    if isinstance(hook, SeededHook):
        hook.ran_early = True


def _copy_of(data: L.LightningDataModule, trainer: L.Trainer) -> L.LightningDataModule | None:
    """A copy of a data module that is not set up; None if it cannot be copied, such as for an open file."""
    try:
        return copy.deepcopy(data, {id(trainer): trainer})
    except Exception:  # of any object that it has
        return None


def has_no_batch(loaders: Any) -> bool:
    """Whether every loader is empty; False for an empty list, which means that there is no such split."""
    flat = loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)
    return bool(flat) and all(sized_len(loader) == 0 for loader in flat)
