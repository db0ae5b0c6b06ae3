"""What all data modules share: three splits, exact loaders, and the position that a checkpoint keeps."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from boltcutter.data.iterable import IterableLoader
from boltcutter.data.loader import Loader, Pair, Samples
from boltcutter.data.mapped import MapSamples, fingerprint
from boltcutter.data.sampler import Batch, BatchSampler, check_batch_size

AnyDataset = Samples | Dataset[Any]
Split = Literal["train", "val", "test"]
Kind = Literal["classification", "regression"]
Indices = npt.NDArray[np.int64]


class TensorSamples:
    """Samples held in memory.

    Args:
        inputs: Shape (N, …).
        targets: Shape (N,) of class numbers, or (N, T) of numbers.
        augment: Changes a batch of inputs at random; given the batch, so that it depends on sample and epoch alone.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, augment: Callable[[Tensor, Batch], Tensor] | None = None
    ) -> None:
        self.inputs, self.targets, self.augment = inputs, targets, augment
        self._arrays: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs and targets of the samples in ``batch``."""
        # NumPy copies rows in a tenth of the time that inputs[batch] takes, and wakes no other thread for it.
        if self._arrays is None:
            self._arrays = self.inputs.numpy(), self.targets.numpy()
        inputs = torch.from_numpy(self._arrays[0].take(batch.array, axis=0))
        targets = torch.from_numpy(self._arrays[1].take(batch.array, axis=0))
        return self.augment(inputs, batch) if self.augment else inputs, targets

    def fingerprint(self) -> bytes:
        """Hash of every byte."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.targets):
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.digest()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_arrays": None}  # another process shares the tensors; arrays would be copied


class Splits(NamedTuple):
    """What is trained on, chosen by, and reported on; without ``test``, nothing is tested."""

    train: AnyDataset
    val: AnyDataset
    test: AnyDataset | None = None


class DataModule(L.LightningDataModule, ABC):
    """Splits behind loaders that show each sample once, in an order that any number of processes agrees on.

    A subclass writes ``load`` (the splits) and ``read`` (new files to predict); it declares what one sample is. Splits
    are ``Samples``, or any map-style data set or ``IterableDataset`` of torch.

    Args:
        batch_size: Samples in one step over all devices.
        seed: What split and order depend on.
        num_workers: Processes for each device that prepare batches; 0 prepares them in the training process.

    Attributes:
        shape: Of one input.
        num_classes: Number of classes, or of numbers in a target.
        kind: Whether targets are classes, numbers or tokens.
        classes: Names of the classes, known after ``setup``.
        statistics: What was measured on the training split to scale by; kept in checkpoints.
        exact: Whether to refuse to go on from a checkpoint with another order of samples.
        collate_fn: Makes a batch of a list of samples of torch's data sets; none means torch's own way.
    """

    exact = True
    collate_fn: Callable[[list[Any]], Any] | None = None
    kind: Kind | Literal["language_modeling"] = "classification"

    def __init__(self, *, batch_size: int, seed: int, num_workers: int) -> None:
        super().__init__()
        check_batch_size(batch_size, 1)
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers} is not a number of processes; try 0")
        self.batch_size, self.seed, self.num_workers = batch_size, seed, num_workers
        self.classes: list[str] = []
        self.statistics: dict[str, Any] = {}
        self.splits: Splits | None = None
        self._loader: Loader | IterableLoader | None = None
        self._resume: dict[str, Any] | None = None

    @abstractmethod
    def load(self) -> Splits:
        """Read and split the data; called once in each process."""

    @abstractmethod
    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """New inputs for prediction.

        Returns:
            Inputs (N, …) prepared as the training inputs were, and a name for each.
        """

    def sampler(self, dataset: AnyDataset) -> Sampler[int] | None:
        """What chooses training samples, such as a ``WeightedRandomSampler``; none means each once, in random order.

        It is asked for all samples of an epoch on every rank, with generators seeded by (seed, epoch).
        """
        return None

    @property
    def empty_splits(self) -> set[str]:
        """Names of splits without a sample, which cannot be evaluated; known once the data is loaded."""
        splits = self.splits._asdict() if self.splits else {}
        return {name for name, split in splits.items() if _is_empty(split)}

    def sizes(self) -> dict[str, Any]:
        """``shape`` and ``num_classes`` where they are found in the data and not given."""
        return {}

    def setup(self, stage: str) -> None:
        """Load once, whatever the stage."""
        if self.splits is None:
            self.splits = self.load()

    def fingerprint(self) -> str:
        """What changes whenever the contents of a split do."""
        self.setup("fit")
        splits = [split for split in self.splits or () if not _is_empty(split)]
        return hashlib.sha256(b"".join(map(fingerprint, splits))).hexdigest()[:16]

    def train_dataloader(self) -> Loader | IterableLoader:
        """A new order in each epoch; the last, smaller batch is left out."""
        if self._loader is not None and self._loader.begun:
            self._resume = None  # only the first loader goes on from a checkpoint
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        self._loader = self.loader("train", shuffle=not overfit, drop_last=True)
        if self._resume:
            sampler = self._loader.order
            sampler.epoch, sampler.start = self._resume["epoch"], self._position(self._resume, sampler)
            self._loader.done = sampler.start
            if isinstance(sampler, IterableLoader):  # Lightning fetches its first batch before it sets the epoch
                sampler.epoch += self._resume.get("finished", False)
                sampler.state = self._resume.get("stream") if sampler.start else None
        return self._loader

    def val_dataloader(self) -> Loader | IterableLoader:
        """Each sample once."""
        return self.loader("val")

    def test_dataloader(self) -> Loader | IterableLoader:
        """Each sample once."""
        return self.loader("test")

    def loader(self, split: Split, *, shuffle: bool = False, drop_last: bool = False) -> Loader | IterableLoader:
        """This process's batches of ``split``."""
        self.setup("fit")
        samples: Any = getattr(self.splits, split)
        if _is_empty(samples):
            raise ValueError(f"data: there is no {split} split; give data.split a share for it")
        ranks = getattr(self.trainer and self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        # Copies to a GPU are faster from pinned memory; a training on the CPU leaves a GPU of the machine alone.
        on_gpu = isinstance(getattr(self.trainer, "accelerator", None), CUDAAccelerator)
        fetch: Any = {"num_workers": self.num_workers, "pin_memory": on_gpu}
        place = {"seed": self.seed, "rank": ranks.get("rank", 0), "world_size": ranks.get("num_replicas", 1)}
        if isinstance(samples, IterableDataset):
            settings: Any = {"drop_last": drop_last, "collate": self.collate_fn, **fetch, **place}
            return IterableLoader(samples, self.batch_size, **settings)
        samples = samples if isinstance(samples, Samples) else MapSamples(samples, self.collate_fn)
        try:
            sampler = BatchSampler(
                len(samples),
                self.batch_size,
                **place,
                shuffle=shuffle,
                drop_last=drop_last,
                source=self.sampler(getattr(self.splits, split)) if split == "train" and shuffle else None,
                blocks=getattr(samples, "blocks", None),
            )
        except ValueError as error:
            raise ValueError(f"data: in the {split} split, {error}") from None
        return Loader(samples, sampler, **fetch)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave alone what is there already; Lightning would look through it all."""
        if isinstance(batch, tuple) and all(isinstance(part, Tensor) and part.device == device for part in batch):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        """Position in the training data, and statistics; plain types only."""
        state: dict[str, Any] = {"statistics": self.statistics}
        if self._loader is not None:
            sampler, done = self._loader.order, self._loader.done - self._in_flight()
            state["position"] = {
                "consumed": done * sampler.batch_size,
                "finished": self._finished(done),
                "batch_size": sampler.batch_size,
                "length": sampler.length,
                "seed": sampler.seed,
                "epoch": sampler.epoch,
            }
            if isinstance(sampler, IterableLoader) and (stream := sampler.state_after(done)) is not None:
                state["position"]["stream"] = stream
        elif self._resume:  # loaded but not yet trained on: still where it was
            state["position"] = self._resume
        return state

    def _in_flight(self) -> int:
        """Batches that were given out and not yet trained on: one within a step, and those that Lightning holds."""
        if self.trainer is None:
            return 0
        loop: Any = self.trainer.fit_loop
        progress = loop.epoch_loop.batch_progress.current
        return int(progress.ready - progress.processed) + len(getattr(loop._data_fetcher, "batches", ()))

    def _finished(self, done: int) -> bool:
        """Whether the epoch has no batch left, be it by ``limit_train_batches``."""
        if self.trainer is None:
            return done >= (sized_len(self._loader) or math.inf)
        loop: Any = self.trainer.fit_loop.epoch_loop
        progress = loop.batch_progress.current
        return bool(progress.processed == progress.ready > 0 and loop._num_ready_batches_reached())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's position."""
        self.statistics = state_dict["statistics"]
        self._resume = state_dict.get("position")

    def _position(self, then: dict[str, Any], now: BatchSampler | IterableLoader) -> int:
        """Batches of the epoch that are done.

        Raises:
            ValueError: The order of samples is not that of the checkpoint, and ``exact`` is set.
        """
        if "finished" not in then:  # written by an earlier version
            then = then | {"finished": then["consumed"] >= then["length"] // then["batch_size"] * then["batch_size"]}
        done = 0 if then["finished"] else int(then["consumed"] // now.batch_size)
        for name in ("seed", "length", "batch_size"):
            if self.exact and then[name] != getattr(now, name):
                raise ValueError(
                    f"data: {name}={getattr(now, name)}, but the checkpoint was made with {then[name]}; set it back, "
                    "or say resume_exact=false to go on without the same order of samples"
                )
        length = sized_len(now)
        return done if length is None else min(done, length)


def _is_empty(split: Any) -> bool:
    return split is None or sized_len(split) == 0


def check_shares(fractions: tuple[float, float, float]) -> None:
    """Refuse shares of train, val and test that are none; that of test may be 0.

    Raises:
        ValueError: One is not positive, or they do not add up to 1.
    """
    if abs(sum(fractions) - 1) > 1e-6 or min(fractions[:2]) <= 0 or fractions[2] < 0:
        raise ValueError(
            f"data.split={list(fractions)}: three shares that add up to 1 are needed; "
            "try [0.7, 0.15, 0.15], or [0.9, 0.1, 0] without a test split"
        )


def split_indices(
    length: int, fractions: tuple[float, float, float], seed: int, labels: Indices | None = None
) -> tuple[Indices, Indices, Indices]:
    """Share samples out to train, val and test; each class in the same proportion where ``labels`` are given.

    Args:
        length: Number of samples.
        fractions: Of train, val and test; they add up to 1.
        seed: All that the shares depend on.
        labels: Class number of each sample, shape (length,).

    Returns:
        Sorted indices of each split.

    Raises:
        ValueError: The fractions do not add up to 1, or there are too few samples.
    """
    check_shares(fractions)
    _, val, test = fractions
    rest, tested = cut(np.arange(length), test, seed, labels)
    trained, validated = cut(rest, val * length / len(rest), seed, labels)
    return trained, validated, tested


def cut(indices: Indices, share: float, seed: int, labels: Indices | None = None) -> tuple[Indices, Indices]:
    """Take a share of samples away from the others.

    Args:
        indices: Of the samples.
        share: To take, in [0, 1).
        seed: All that the choice depends on.
        labels: Class number of every sample that an index may stand for; then of each class the same share is taken.

    Returns:
        Sorted indices of what stays, and of what was taken.

    Raises:
        ValueError: There are too few samples.
    """
    if share == 0:
        return np.sort(indices), indices[:0]
    # Not every data set is cut, and the import, pandas with it, takes 70 MiB and holds up the first step.
    from sklearn.model_selection import train_test_split

    stratify = None if labels is None else labels[indices]
    count = max(1, round(share * len(indices)))
    try:
        kept, taken = train_test_split(indices, test_size=count, random_state=seed, stratify=stratify)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"data: no {share:.2f} of {len(indices)} samples can be split off: {reason}") from None
    return np.sort(kept), np.sort(taken)
