"""What all data modules share: three splits, exact loaders, and the position that a checkpoint keeps."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol, cast

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from boltcutter.data.sampler import Batch, BatchSampler, check_batch_size

Pair = tuple[Tensor, Tensor]
Split = Literal["train", "val", "test"]
Kind = Literal["classes", "numbers"]
Indices = npt.NDArray[np.int64]
FETCH = 1 << 20  # bytes of small batches fetched at once; what is read stays in the processor's cache


class Samples(Protocol):
    """A data set that is fetched a whole batch at a time."""

    def __len__(self) -> int: ...

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs (N, …) and targets of the samples in ``batch``."""
        ...

    def fingerprint(self) -> bytes:
        """What changes whenever the contents do."""
        ...


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
    """What is trained on, chosen by, and reported on."""

    train: Samples
    val: Samples
    test: Samples


class DataModule(L.LightningDataModule, ABC):
    """Splits behind loaders that show each sample once, in an order that any number of processes agrees on.

    A subclass writes ``load`` (all three splits) and ``read`` (new files to predict); it declares what one sample is.

    Args:
        batch_size: Samples in one step over all devices.
        seed: What split and order depend on.
        workers: Processes for each device that prepare batches; 0 prepares them in the training process.

    Attributes:
        shape: Of one input.
        outputs: Number of classes, or of numbers in a target.
        kind: Whether targets are classes, numbers or tokens.
        classes: Names of the classes, known after ``setup``.
        statistics: What was measured on the training split to scale by; kept in checkpoints.
        exact: Whether to refuse to go on from a checkpoint with another order of samples.
    """

    exact = True
    kind: Kind | Literal["tokens"] = "classes"

    def __init__(self, *, batch_size: int, seed: int, workers: int) -> None:
        super().__init__()
        check_batch_size(batch_size, 1)
        if workers < 0:
            raise ValueError(f"data.workers={workers} is not a number of processes; try 0")
        self.batch_size, self.seed, self.workers = batch_size, seed, workers
        self.classes: list[str] = []
        self.statistics: dict[str, Any] = {}
        self.splits: Splits | None = None
        self._loader: Loader | None = None
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

    def sizes(self) -> dict[str, Any]:
        """``shape`` and ``outputs`` where they are found in the data and not given."""
        return {}

    def setup(self, stage: str) -> None:
        """Load once, whatever the stage."""
        if self.splits is None:
            self.splits = self.load()

    def fingerprint(self) -> str:
        """What changes whenever the contents of a split do."""
        self.setup("fit")
        return hashlib.sha256(b"".join(split.fingerprint() for split in cast(Splits, self.splits))).hexdigest()[:16]

    def train_dataloader(self) -> Loader:
        """A new order in each epoch; the last, smaller batch is left out."""
        self._loader = self.loader("train", shuffle=True, drop_last=True)
        if self._resume:
            sampler = self._loader.sampler
            sampler.epoch, sampler.start = self._resume["epoch"], self._position(self._resume, sampler)
            self._loader.done = sampler.start
        return self._loader

    def val_dataloader(self) -> Loader:
        """Each sample once."""
        return self.loader("val")

    def test_dataloader(self) -> Loader:
        """Each sample once."""
        return self.loader("test")

    def loader(self, split: Split, *, shuffle: bool = False, drop_last: bool = False) -> Loader:
        """This process's batches of ``split``."""
        self.setup("fit")
        samples: Samples = getattr(self.splits, split)
        ranks = getattr(self.trainer and self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        try:
            sampler = BatchSampler(
                len(samples),
                self.batch_size,
                seed=self.seed,
                rank=ranks.get("rank", 0),
                world_size=ranks.get("num_replicas", 1),
                shuffle=shuffle,
                drop_last=drop_last,
                blocks=getattr(samples, "blocks", None),
            )
        except ValueError as error:
            raise ValueError(f"data: in the {split} split, {error}") from None
        return Loader(samples, sampler, workers=self.workers)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave alone what is there already; Lightning would look through it all."""
        if isinstance(batch, tuple) and all(isinstance(part, Tensor) and part.device == device for part in batch):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        """Position in the training data, and statistics; plain types only."""
        state: dict[str, Any] = {"statistics": self.statistics}
        if self._loader is not None:
            sampler = self._loader.sampler
            state["position"] = {
                "consumed": (self._loader.done - self._in_flight()) * sampler.batch_size,
                "batch_size": sampler.batch_size,
                "length": sampler.length,
                "seed": sampler.seed,
                "epoch": sampler.epoch,
            }
        elif self._resume:  # loaded but not yet trained on: still where it was
            state["position"] = self._resume
        return state

    def _in_flight(self) -> int:
        """Batches that were given out and not yet trained on: one between the start of a step and its end."""
        if self.trainer is None:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.ready - progress.processed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's position."""
        self.statistics = state_dict["statistics"]
        self._resume = state_dict.get("position")

    def _position(self, then: dict[str, Any], now: BatchSampler) -> int:
        """Batches of the epoch that are done.

        Raises:
            ValueError: The order of samples is not that of the checkpoint, and ``exact`` is set.
        """
        done = int(then["consumed"] // now.batch_size) if then["consumed"] < _whole(then) else 0
        for name in ("seed", "length", "batch_size"):
            if self.exact and then[name] != getattr(now, name):
                raise ValueError(
                    f"data: {name}={getattr(now, name)}, but the checkpoint was made with {then[name]}; set it back, "
                    "or say resume_exact=false to go on without the same order of samples"
                )
        return min(done, len(now))


def _whole(position: dict[str, Any]) -> int:
    """Samples of an epoch without its last, smaller batch."""
    return int(position["length"] // position["batch_size"] * position["batch_size"])


class Loader(DataLoader[Pair]):
    """Batches fetched whole, from where ``sampler.start`` says; counts what it gave out."""

    sampler: BatchSampler
    is_sharded = True  # so that nobody shards it once more

    def __init__(self, samples: Samples, sampler: BatchSampler, *, workers: int = 0) -> None:
        super().__init__(
            samples,  # type: ignore[arg-type]  # it has __getitems__ in place of __getitem__
            batch_sampler=sampler,  # type: ignore[arg-type]  # batches are sequences, if no lists
            collate_fn=_as_it_is,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
        vars(self)["sampler"] = sampler  # torch refuses plain assignment, and Lightning looks for set_epoch here
        self.done = 0
        self.waited = 0.0

    def __iter__(self) -> Iterator[Pair]:  # type: ignore[override]
        # A generator, because Lightning asks for the iterator before it sets the epoch.
        counted = vars(self)  # torch looks closely at each plain assignment
        counted["done"] = self.sampler.start
        try:
            fetches: Iterator[Iterable[Pair]]
            fetches = ((batch,) for batch in super().__iter__()) if self.num_workers else self._here()
            while True:
                began = perf_counter()
                batches = next(fetches, None)
                if not busy():
                    counted["waited"] += perf_counter() - began
                if batches is None:
                    return
                for batch in batches:
                    counted["done"] += 1
                    yield batch
        except ValueError as error:
            if "in DataLoader worker" not in str(error):
                raise
            # A worker hands its whole traceback over as text; the last line is what went wrong.
            raise ValueError(str(error).rstrip().rsplit("ValueError: ", 1)[-1]) from error

    def _here(self) -> Iterator[Iterable[Pair]]:
        """Batches prepared in this process, small ones several at once: one fetch for all costs less than one each."""
        samples = cast(Samples, self.dataset)
        most = [1]
        for chosen, count in self.sampler.several(lambda: most[0]):
            parts = samples.__getitems__(chosen)
            if self.pin_memory:
                parts = (parts[0].pin_memory(), parts[1].pin_memory())
            most[0] = max(1, FETCH * count // max(1, parts[0].nbytes + parts[1].nbytes))
            # Not as views, each of which would know of all others.
            size = len(parts[0]) // count
            yield [parts] if count == 1 else zip(parts[0].unsafe_split(size), parts[1].unsafe_split(size), strict=True)


def busy() -> bool:
    """Whether a CUDA device still has work in its queue."""
    # Without work on it there is no context, and asking for a stream would make one.
    return bool(torch.cuda.is_initialized() and not torch.cuda.current_stream().query())  # type: ignore[no-untyped-call]


def _as_it_is(batch: Any) -> Any:
    return batch


def check_shares(fractions: tuple[float, float, float]) -> None:
    """Refuse shares of train, val and test that are none.

    Raises:
        ValueError: One is not positive, or they do not add up to 1.
    """
    if abs(sum(fractions) - 1) > 1e-6 or min(fractions) <= 0:
        raise ValueError(
            f"data.split={list(fractions)}: three shares that add up to 1 are needed; try [0.7, 0.15, 0.15]"
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
        share: To take, in (0, 1).
        seed: All that the choice depends on.
        labels: Class number of every sample that an index may stand for; then of each class the same share is taken.

    Returns:
        Sorted indices of what stays, and of what was taken.

    Raises:
        ValueError: There are too few samples.
    """
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
