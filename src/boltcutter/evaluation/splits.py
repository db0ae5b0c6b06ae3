"""Which splits of a run can be evaluated or predicted: what its data module, or else its task, offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from boltcutter.config.errors import ConfigError
from boltcutter.data.module import DataModule
from boltcutter.environment.process import is_rank_zero
from boltcutter.protocols import GeneratesTokens, NativeData


class NoLoaderError(ConfigError):
    """The function that makes the loader of a split returns none.

    Attributes:
        reason: What it returns.
    """

    def __init__(self, split: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"split={split}: {reason}; return a loader, or set another split")


class NoLoader:
    """In place of no loader, which Lightning refuses or takes for a loader."""

    is_sharded = True

    def __len__(self) -> int:
        """Return the number of batches."""
        return 0

    def __iter__(self) -> Iterator[Any]:
        """Return no batch."""
        return iter(())


class ChainedBatches:
    """The indices of this rank's batches of several loaders, counted over the datasets of all."""

    def __init__(self, loaders: Sequence[Any]) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches."""
        begin = 0
        for loader in self.loaders:
            yield from ([begin + index for index in batch] for batch in loader.batch_sampler)
            begin += len(loader.dataset)


class ChainedLoader:
    """The batches of several loaders of this rank, one after the other.

    Args:
        loaders: Of the splits.

    Attributes:
        dataset: Has the ``names`` of the files of all splits, if their datasets have them.
        batch_sampler: Indices of this rank's batches, of which each split has those after the last one's.
    """

    is_sharded = True

    def __init__(self, loaders: Sequence[Any]) -> None:
        self.loaders = loaders
        lists = [getattr(getattr(loader, "dataset", None), "names", None) for loader in loaders]
        known = [names for names in lists if isinstance(names, list | tuple)]
        self.dataset = SimpleNamespace(names=[*chain.from_iterable(known)] if len(known) == len(lists) else None)
        has_indices = all(getattr(loader, "batch_sampler", None) is not None for loader in loaders)
        self.batch_sampler = ChainedBatches(loaders) if has_indices else None

    def __len__(self) -> int:
        """Return the number of batches."""
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all batches."""
        return chain.from_iterable(self.loaders)


class ReturnedLoaders:
    """Calls a function that makes loaders, of which Lightning refuses None.

    Args:
        function: Such as ``test_dataloader``.

    Attributes:
        is_empty: Whether it has returned None or no loader.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.is_empty = function, False

    def __call__(self) -> Any:
        """Return the loaders."""
        loaders = self.function()
        self.is_empty = loaders is None or (isinstance(loaders, list | tuple | dict) and not loaders)
        return NoLoader() if self.is_empty else loaders


def skip_reason(data: Any, task: L.LightningModule, split: str) -> str | None:
    """Return why ``train``, ``val`` or ``test`` cannot be evaluated; None if it can.

    ``data`` is a data module, or None if the task defines its own dataloaders.
    """
    step = "validation_step" if uses_validation_step(data, split) else "test_step"
    if not is_overridden(step, task):
        return f"{type(task).__name__} has no {step}"
    if loader_owner(data, task, split) is None:
        name = f"{split}_dataloader"
        unused = f" (that of {type(task).__name__} is not used beside it)" if is_overridden(name, task) else ""
        return f"{type(task if data is None else data).__name__} has no {name}{unused}"
    # Which splits are empty is known once the data is loaded.
    if isinstance(data, NativeData) and split in data.empty_splits and not has_own_loader(data, split):
        return f"{type(data).__name__} has no samples in its {split} split (data.split)"
    return None


def note_limit(trainer: Any, name: str, overrides: Sequence[str]) -> None:
    """Print that a limit of the run, such as ``limit_test_batches``, applies, unless an override has just set it."""
    limit = getattr(trainer, name)
    is_chosen = any(override.lstrip("+").startswith(f"trainer.{name}=") for override in overrides)
    is_whole = isinstance(limit, float) and limit == 1.0  # 1 is one batch
    if not (is_whole or is_chosen) and is_rank_zero():
        key = name if not trainer.fast_dev_run else "fast_dev_run"
        print(
            f"note: trainer.{key}={getattr(trainer, key)} of the run leaves out batches; set trainer.{name}=1.0 for all"
        )


def uses_validation_step(data: Any, split: str) -> bool:
    """Whether a split is evaluated by ``validation_step``; the library's data modules pass any split to a test."""
    return split == "val" and not isinstance(data, NativeData)


def loader_owner(data: Any, task: L.LightningModule, split: str) -> L.LightningDataModule | L.LightningModule | None:
    """Return the data module, or the task without one, if it defines the dataloader of a split.

    Lightning asks the data module for all loaders if there is one.
    """
    owner = task if data is None else data
    return owner if is_overridden(f"{split}_dataloader", owner) else None


def has_own_loader(data: Any, split: str) -> bool:
    """Whether a data module defines the dataloader of a split itself, rather than the base class of the library."""
    name = f"{split}_dataloader"
    return is_overridden(name, data) and getattr(type(data), name, None) is not getattr(DataModule, name)


def prediction_argument(data: Any, task: L.LightningModule) -> str | None:
    """Return the argument that ``boltcutter predict`` needs besides the run; None if prediction is not supported."""
    if isinstance(data, NativeData) and not has_own_loader(data, "predict"):
        return f"input=<{'text or file' if isinstance(task, GeneratesTokens) else 'files'}>"
    return "" if loader_owner(data, task, "predict") else None
