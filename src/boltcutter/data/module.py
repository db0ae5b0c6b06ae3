"""Base class of data modules: splits, deterministic data loaders, and the position that checkpoints save."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy.typing as npt
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from boltcutter.data.folds import check_folds
from boltcutter.data.iterable import IterableLoader
from boltcutter.data.loader import BatchedDataset, CountingLoader, Loader, Pair
from boltcutter.data.mapped import BatchedMapDataset, fingerprint
from boltcutter.data.sampler import Batch, BatchSampler
from boltcutter.internals import batches_ahead, is_last_batch
from boltcutter.protocols import data_parallel
from boltcutter.topology import check_batch_size

AnyDataset = BatchedDataset | Dataset[Any]
Split = Literal["train", "val", "test"]
Kind = Literal["classification", "regression"]


class BatchedTensorDataset:
    """A ``TensorDataset`` of inputs and targets that is fetched a whole batch at a time.

    Args:
        inputs: Shape (N, …).
        targets: Class indices of shape (N,), or regression targets of shape (N, T).
        augment: Random transform of a batch of inputs. It also receives the batch, so that its randomness can depend
            only on seed, epoch and position of the sample: ``batch.positions`` and ``batch.stream()``.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, augment: Callable[[Tensor, Batch], Tensor] | None = None
    ) -> None:
        self.inputs, self.targets, self.augment = inputs, targets, augment
        self._arrays: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def is_pure(self) -> bool:
        """Whether reading draws from no global random generator; a subclass that reads otherwise has to say so."""
        is_own = type(self).__getitems__ is BatchedTensorDataset.__getitems__
        return is_own and (self.augment is None or bool(getattr(self.augment, "is_pure", False)))

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs and targets of the samples in ``batch``."""
        # NumPy's take needs a tenth of the time of inputs[batch], and starts no threads.
        if self._arrays is None:
            self._arrays = self.inputs.numpy(), self.targets.numpy()
        inputs = torch.from_numpy(self._arrays[0].take(batch.indices, axis=0))
        targets = torch.from_numpy(self._arrays[1].take(batch.indices, axis=0))
        return self.augment(inputs, batch) if self.augment else inputs, targets

    def fingerprint(self) -> bytes:
        """Hash of all bytes, shapes and dtypes."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.targets):
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.digest()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_arrays": None}  # worker processes share the tensors; arrays would be copied


class Splits(NamedTuple):
    """Datasets for training, validation and test; ``test`` is optional."""

    train: AnyDataset
    val: AnyDataset
    test: AnyDataset | None = None


MAX_WORKERS = 1024  # of one rank: processes, of which more would end the machine, not the run


class DataModule(L.LightningDataModule, ABC):
    """A ``LightningDataModule`` whose order of samples is a pure function of seed and epoch.

    The order is the same for any number of ranks and workers, and training resumes at the next sample. A subclass
    implements ``load`` (the splits) and ``read`` (new files for prediction), and sets ``shape`` and ``num_classes``.
    A split is a ``BatchedDataset``, or any map-style ``Dataset`` or ``IterableDataset`` of torch.

    Args:
        batch_size: Global batch size: samples in one step over all devices.
        seed: Seed of split, order and augmentation.
        num_workers: DataLoader workers per device; 0 loads in the training process.
        num_folds: Number of folds for cross-validation, of all train and val samples, if ``load`` divides them by
            ``split_indices``; None: no folds.
        fold: The fold for validation, from 0; the others are the train split.
        classes: Names to use for the classes, by class index; None: those of the data.

    Attributes:
        shape: Shape of one input.
        num_classes: Number of classes; of target columns for regression.
        kind: ``classification``, ``regression`` or ``language_modeling``.
        classes: Class names, set by ``setup``.
        statistics: Statistics of the training split, such as means for scaling; saved in checkpoints.
        resume_exact: Whether to refuse a checkpoint whose order of samples differs.
        collate_fn: Collates a list of samples into a batch; None means ``default_collate``.
        input_structure: That of the inputs of a batch in training, if they are not a single tensor, in the form of
            ``boltcutter.structure.outline``; saved in checkpoints, so that requests to ``serve`` are read alike.
    """

    resume_exact = True
    input_structure: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    kind: Kind | Literal["language_modeling"] = "classification"

    def __init__(
        self,
        *,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
        num_folds: int | None = None,
        fold: int = 0,
        classes: list[str] | None = None,
    ) -> None:
        super().__init__()
        check_batch_size(batch_size, 1)
        if num_folds is not None or fold:
            check_folds(num_folds, fold)
        if not 0 <= seed < 2**32:
            raise ValueError(f"data.seed={seed} is not in [0, {2**32 - 1}]; try 0")
        if not 0 <= num_workers <= MAX_WORKERS:
            raise ValueError(f"data.num_workers={num_workers} is not in [0, {MAX_WORKERS}]; try 0")
        self.batch_size, self.seed, self.num_workers = batch_size, seed, num_workers
        self.num_folds, self.fold = num_folds, fold
        self._names = None if classes is None else [str(name) for name in classes]
        if repeated := [name for name in self._names or () if (self._names or []).count(name) > 1]:
            raise ValueError(f"data.classes: {repeated[0]!r} is the name of two classes; give each its own")
        self.classes: list[str] = []
        self._found: list[str] | None = None  # the names in the data, if others have replaced them
        self.statistics: dict[str, Any] = {}
        self.splits: Splits | None = None
        self._loader: CountingLoader | None = None
        self._counted = 0, 0  # iterations of the loader, and how many batches more than Lightning the last one counts
        self._resume: dict[str, Any] | None = None

    @abstractmethod
    def load(self) -> Splits:
        """Read and split the data. Called once in each process."""

    def read(self, paths: Sequence[Path]) -> tuple[Any, list[str]]:
        """Read new inputs for prediction, as ``boltcutter predict input=<files>`` does; optional.

        Returns:
            Inputs, preprocessed like the training inputs, and a name for each: a tensor (N, …), a dictionary or tuple
            of several; or a list of N samples like those of a split, which ``collate_fn`` collates. A target in such a
            sample is not used.
        """
        raise ValueError(f"input={paths[0]}: {type(self).__name__} reads no files; define its method read")

    def sampler(self, dataset: AnyDataset) -> Sampler[int] | None:
        """Return a sampler for training, such as a ``WeightedRandomSampler``; None means a random permutation.

        Every rank draws all indices of an epoch from it, with generators seeded by (seed, epoch). A sampler that is not
        one of torch's is asked for the next batch when training needs it, so that it may follow training.
        """
        return None

    @property
    def empty_splits(self) -> set[str]:
        """Names of splits without samples, which cannot be evaluated; known after ``setup``."""
        splits = self.splits._asdict() if self.splits else {}
        return {name for name, split in splits.items() if _is_empty(split)}

    def infer_settings(self) -> dict[str, Any]:
        """Return the values that the data determines for settings that may be null, such as ``num_classes``."""
        return {}

    def setup(self, stage: str) -> None:
        """Load the splits, once for all stages.

        Raises:
            ValueError: ``load`` has set ``shape`` or ``num_classes``, but another value was given to the constructor;
                or there are not as many names of classes as classes.
        """
        if self.splits is not None:
            return
        self.classes, self._found = self._classes_found, None
        given = {name: value for name in ("shape", "num_classes") if (value := vars(self).get(name))}
        self.splits = self.load()
        for name, value in given.items():
            as_list = [*value] if isinstance(value, Sequence) else value
            found = [*new] if isinstance(new := getattr(self, name), Sequence) else new
            if as_list != found:
                self.splits = None
                raise ValueError(
                    f"data.{name}={as_list}: contradicts the data, which has {found}; set data.{name}=null to infer "
                    f"it, or data.{name}={str(found).replace(' ', '')}"
                )
        if self._names is not None:
            self._rename(self._names)

    @property
    def _classes_found(self) -> list[str]:
        return self.classes if self._found is None else self._found

    def _rename(self, given: list[str]) -> None:
        """Replace the names of classes by those that are given."""
        self._check_names(given)
        self.classes, self._found = [*given], self.classes

    def _check_names(self, given: list[str]) -> None:
        """Check that there is a name for each class.

        Raises:
            ValueError: There is not.
        """
        count, is_class = len(self.classes) or getattr(self, "num_classes", None), self.kind == "classification"
        if not is_class or count not in (None, len(given)):
            self.splits = None
            found = f"{count} classes; give as many names, or null" if is_class else "no classes; set it to null"
            names = f"{','.join(given[:5])}{',…' if len(given) > 5 else ''}"
            raise ValueError(f"data.classes=[{names}]: {len(given)} names, but the data has {found}")

    def fingerprint(self) -> str:
        """Hash that changes when the contents of a split change."""
        self.setup("fit")
        splits = [split for split in self.splits or () if not _is_empty(split)]
        fold = f"{self.fold} of {self.num_folds}".encode() if self.num_folds else b""
        return hashlib.sha256(b"".join([*map(fingerprint, splits), fold])).hexdigest()[:16]

    def train_dataloader(self) -> CountingLoader:
        """Loader of the train split: shuffled in each epoch, without the last incomplete batch."""
        if self._loader is not None and self._loader.started:
            self._resume = None  # only the first loader resumes from a checkpoint
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        self._loader = self.loader("train", shuffle=not overfit, drop_last=True)
        if getattr(getattr(self, "augment", None), "on_device", False):
            if not isinstance(self._loader.epoch_sampler, BatchSampler):
                raise ValueError("data.augment.on_device=true: a stream has no positions of samples; set it to false")
            self._counted = 0, 0
            vars(self)["on_after_batch_transfer"] = self._augment  # else no hook, for which each step would be seeded
        if self._resume:
            sampler = self._loader.epoch_sampler
            sampler.epoch, sampler.start = self._resume["epoch"], self._position(self._resume, sampler)
            sampler.recorded = dict(self._resume.get("drawn", {}))
            if changes := getattr(sampler, "changes", None):
                changes.restore(self._resume.get("sampler"), within_epoch=bool(sampler.start))
            sampler.seed_workers()
            self._loader.num_yielded = sampler.start
            if hasattr(sampler, "state_after"):  # a stream; Lightning fetches a batch before it sets the epoch
                sampler.epoch += self._resume.get("epoch_finished", False)
                sampler.state = self._resume.get("stream") if sampler.start else None
        return self._loader

    def val_dataloader(self) -> CountingLoader:
        """Loader of the val split."""
        return self.loader("val")

    def test_dataloader(self) -> CountingLoader:
        """Loader of the test split."""
        return self.loader("test")

    def loader(self, split: Split, *, shuffle: bool = False, drop_last: bool = False) -> CountingLoader:
        """Loader of this rank's batches of ``split``."""
        self.setup("fit")
        samples: Any = getattr(self.splits, split)
        if _is_empty(samples):
            raise ValueError(f"data: there is no {split} split; give it a fraction in data.split")
        world_size, rank = data_parallel(self.trainer and self.trainer.strategy)
        # Copies to a GPU are faster from pinned memory; training on the CPU must not initialize CUDA.
        on_gpu = isinstance(getattr(self.trainer, "accelerator", None), CUDAAccelerator)
        options: Any = {"num_workers": self.num_workers, "pin_memory": on_gpu}
        shard: Any = {"seed": self.seed, "rank": rank, "world_size": world_size, "stage": split}
        if isinstance(samples, IterableDataset):
            settings: Any = {"drop_last": drop_last, "collate": self.collate_fn, **options, **shard}
            stream = IterableLoader(samples, self.batch_size, **settings)
            stream.epoch_sampler.follows_epochs = split == "train"
            return stream
        samples = samples if isinstance(samples, BatchedDataset) else BatchedMapDataset(samples, self.collate_fn)
        try:
            sampler = BatchSampler(
                len(samples),
                self.batch_size,
                **shard,
                shuffle=shuffle,
                drop_last=drop_last,
                index_sampler=self.sampler(getattr(self.splits, split)) if split == "train" and shuffle else None,
            )
        except ValueError as error:
            names_setting = str(error).startswith("data.")
            raise error if names_setting else ValueError(f"data: in the {split} split, {error}") from None
        sampler.follows_epochs = split == "train"
        return Loader(samples, sampler, **options)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Skip batches that are already on the device, which Lightning would traverse."""
        if isinstance(batch, tuple) and all(isinstance(part, Tensor) and part.device == device for part in batch):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _augment(self, batch: Any, dataloader_idx: int) -> Any:
        """Transform the inputs of a training batch on the device."""
        if self.trainer is None or not self.trainer.training or self._loader is None:
            return batch
        # Not the number of batches that were read, which is ahead; this one is the same until the step is done. If
        # max_steps has ended an epoch, a resumed run begins to count anew in the rest of it.
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        done = int(progress.processed)
        if self._loader.iterations != self._counted[0]:
            self._counted = self._loader.iterations, self._loader.first - done
        positions = self._loader.epoch_sampler.batch_at(done + self._counted[1])
        inputs, targets = batch
        if len(inputs) != len(positions):  # what a check has made
            return batch
        augment: Any = vars(self)["augment"]
        return augment.transform(inputs, positions), targets

    def state_dict(self) -> dict[str, Any]:
        """Position in the training data, and statistics, as plain types."""
        state: dict[str, Any] = {"statistics": self.statistics}
        if classes := self._classes_found:
            state["classes"] = [str(name) for name in classes]
        structure = self.input_structure if self._loader is None else self._loader.outline
        if structure is not None and not hasattr(torch, str(structure)):  # more than a tensor, whose dtype it then is
            state["input_structure"] = structure
        if self._loader is not None:
            sampler, done, is_finished = self._loader.epoch_sampler, *self._num_done(self._loader)
            state["position"] = {
                "samples_seen": done * sampler.batch_size,
                "epoch_finished": is_finished,
                "batch_size": sampler.batch_size,
                "num_samples": sampler.num_samples,
                "seed": sampler.seed,
                "epoch": sampler.epoch,
            }
            if hasattr(sampler, "state_after") and (stream := sampler.state_after(done)) is not None:
                state["position"]["stream"] = stream
            if hasattr(sampler, "drawn_after") and (drawn := sampler.drawn_after(done)):
                state["position"]["drawn"] = drawn
            if (changes := getattr(sampler, "changes", None)) and (changed := changes.state()):
                state["position"]["sampler"] = changed
        elif self._resume:  # restored, but not trained on yet
            state["position"] = self._resume
        return state

    def _num_done(self, loader: CountingLoader) -> tuple[int, bool]:
        """Batches that were trained on, and whether none is left, also because of ``limit_train_batches``.

        Not the current one, nor those that Lightning has fetched ahead.
        """
        if self.trainer is None:
            return loader.num_yielded, loader.num_yielded >= (sized_len(loader) or math.inf)
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        in_flight = int(progress.ready - progress.processed) + batches_ahead(self.trainer)
        is_finished = bool(progress.processed == progress.ready > 0 and is_last_batch(self.trainer))
        return loader.num_yielded - in_flight, is_finished

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position and the statistics of a checkpoint.

        Raises:
            ValueError: The classes of the data are others than those of the checkpoint, or in another order.
        """
        statistics, classes = state_dict["statistics"], self._classes_found
        known, found = [*map(str, state_dict.get("classes", ()))], [*map(str, classes)]
        # An export has the names that are given.
        if known and found and known not in (found, self._names) and "classes" not in statistics:
            raise ValueError(
                f"data: the classes are {', '.join(found[:10])}, and were {', '.join(known[:10])} in training, so that "
                "class indices mean something else; give data with the same classes, of which each has a sample"
            )
        # A prediction loads no splits, so it has found none.
        self.classes, self._found = known if not classes or (known and "classes" in statistics) else classes, None
        if self._names is not None and self.kind == "classification":
            self._rename(self._names)
        if self.statistics not in ({}, statistics):
            self.splits = None  # load again, with the checkpoint's statistics
        self.statistics, self.input_structure = statistics, state_dict.get("input_structure")
        self._resume = state_dict.get("position")

    def _position(self, saved: dict[str, Any], current: Any) -> int:
        """Number of batches of the epoch to skip.

        Raises:
            ValueError: The order of samples differs from the checkpoint's, and ``resume_exact`` is set.
        """
        done = 0 if saved["epoch_finished"] else int(saved["samples_seen"] // current.batch_size)
        for name in ("seed", "num_samples", "batch_size"):
            if self.resume_exact and saved[name] != getattr(current, name):
                raise ValueError(
                    f"data: {name}={getattr(current, name)}, but the checkpoint was saved with {saved[name]}; restore "
                    "it, or set resume_exact=false to resume with a different order of samples"
                )
        length = sized_len(current)
        return done if length is None else min(done, length)


def _is_empty(split: Any) -> bool:
    return split is None or sized_len(split) == 0
