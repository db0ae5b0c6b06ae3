"""Read and copy the next batches while a step is computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from boltcutter.data.loader import CountingLoader
from boltcutter.data.module import DataModule
from boltcutter.data.prefetch import DeviceCopies, Prefetcher, can_read_ahead
from boltcutter.data.sampler import MAX_READ_AHEAD
from boltcutter.internals import active_fetcher, combination
from boltcutter.protocols import data_parallel

ON_GPU = 2  # batches
HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


class Prefetch(Callback):
    """Let a thread read the next batches while a step is computed, and copy them to a GPU beside it.

    Lightning reads a batch when the step before it was queued, and copies it in the stream of the steps, so that a GPU
    waits for both. Here the first batch of an epoch is read as ever; then a thread reads ahead, where that gives the
    same batches (``data/prefetch.py: can_read_ahead``); else they are read as ever, and only copied beside the step.
    Order, random numbers and errors are the same, and checkpoints count the batches that were trained on.

    A module or data module with a hook of its own before or at the transfer, ``on_before_batch_transfer`` or
    ``transfer_batch_to_device``, is called by Lightning in the training's thread, in Lightning's order: batches are
    then only read ahead, and not copied. ``on_after_batch_transfer`` is called as ever.

    Args:
        batches: Number of batches that are read ahead; None: 2 on a GPU, 0 elsewhere; 0 on a GPU: only the copies.

    Raises:
        ValueError: ``batches`` is negative, or more than 16.
    """

    def __init__(self, batches: int | None = None) -> None:
        if batches is not None and not 0 <= batches <= MAX_READ_AHEAD:
            raise ValueError(f"callback.prefetch.batches={batches} is not in [0, {MAX_READ_AHEAD}]; try 2, or null")
        self.batches = batches
        self._open: dict[Any, Prefetcher] = {}  # by fetcher of a loop
        self._reported = False

    def __getstate__(self) -> dict[str, Any]:
        return {"batches": self.batches, "_open": {}, "_reported": self._reported}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Do nothing on a CPU, unless it is asked for."""
        if self.batches or trainer.strategy.root_device.type == "cuda":
            for name in ("train", "validation", "test", "predict"):
                vars(self)[f"on_{name}_batch_start"] = self._begin  # else no hook that each step would call
                vars(self)[f"on_{name}_end"] = vars(self)[f"on_{name}_epoch_end"] = self._end

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """End the threads, before Lightning ends the workers that they wait for."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """End the threads."""
        while self._open:
            self._close(next(iter(self._open)))
        for name in [name for name in vars(self) if name.startswith("on_")]:
            del vars(self)[name]

    def _begin(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """After the first batch of an epoch, read the others ahead."""
        fetcher = active_fetcher(trainer)
        iterator = getattr(fetcher, "iterator", None)
        if iterator is None or isinstance(iterator, Prefetcher) or not hasattr(fetcher, "batches"):
            return  # begun, or the step reads its batches itself
        self._close(fetcher)
        loaders = iterator.flattened
        reads_ahead = can_read_ahead(loaders, combination(iterator), data_parallel(trainer.strategy).size)
        depth = 0 if not reads_ahead else ON_GPU if self.batches is None else self.batches
        copies = DeviceCopies(trainer.strategy.root_device) if self._copies(trainer, pl_module) else None
        if not depth and copies is None:
            return
        left = None if fetcher.length is None else max(0, fetcher.length - fetcher.fetched)
        counting = [loader for loader in loaders if depth and isinstance(loader, CountingLoader)]
        for loader in counting:
            vars(loader)["is_read_ahead"] = True
        fetcher.iterator = self._open[fetcher] = Prefetcher(
            iterator, depth=depth, left=left, copies=copies, waited=partial(_add_wait, counting)
        )

    def _copies(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Whether batches are copied beside the step: to a GPU, if nobody moves them otherwise."""
        strategy = trainer.strategy
        if strategy.root_device.type != "cuda" or type(strategy).batch_to_device is not Strategy.batch_to_device:
            return False
        for owner in (pl_module, getattr(trainer, "datamodule", None)):
            for name in HOOKS if owner is not None else ():
                ours = name not in vars(owner) and getattr(type(owner), name) is getattr(DataModule, name)
                if not ours and is_overridden(name, owner):
                    if not self._reported and trainer.is_global_zero:
                        self._reported = True
                        kind = type(owner).__name__
                        print(
                            f"callback.prefetch: batches are not copied beside the step, as {kind} has its own {name}"
                        )
                    return False
        return True

    def _end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """At the end of an epoch, read nothing more."""
        self._close(active_fetcher(trainer))

    def _close(self, fetcher: Any) -> None:
        if (opened := self._open.pop(fetcher, None)) is None:
            return
        count = opened.close()
        if fetcher.iterator is opened:
            fetcher.iterator = opened.batches
        combined: Any = opened.batches  # Lightning's CombinedLoader
        for loader in combined.flattened:
            if isinstance(loader, CountingLoader):
                vars(loader).update(is_read_ahead=False, num_yielded=loader.num_yielded - count)


def _add_wait(loaders: Sequence[CountingLoader], seconds: float) -> None:
    for loader in loaders:
        vars(loader)["wait_seconds"] = loader.wait_seconds + seconds
