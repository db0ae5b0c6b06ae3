"""Compare the samples of folds before a cross-validation, to find a data module that ignores its fold."""

from __future__ import annotations

import copy
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple, cast

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset

from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.config.instantiate import build
from boltcutter.config.settings import Settings
from boltcutter.data.draws import draw_indices
from boltcutter.data.hooks import seed_hooks
from boltcutter.data.loader import BatchedDataset
from boltcutter.data.mapped import hash_batch
from boltcutter.data.sampler import Batch
from boltcutter.data.seeding import seed_generators, seeded_generators
from boltcutter.data.streams import Purpose, hash64, stream
from boltcutter.evaluation.splits import has_own_loader
from boltcutter.internals import tree_leaves
from boltcutter.protocols import NativeData

READ = stream(Purpose.FINGERPRINT, 0, loader=1)
READ_SECONDS = 3.0  # per split, after which the rest of its samples is not compared
CHUNK = 64  # samples that are read together
COVERAGE = 0.9  # of the samples, where windows or statistics of a fold change contents, so that only counts compare


def check_folds(cfg: Settings, trainer: L.Trainer, folds: Iterable[int]) -> None:
    """Load the data of some folds, one after the other, and compare their train and val splits.

    Raises:
        ConfigError: Folds share validation samples, a fold validates on train samples, or the folds do not cover the
            data.
    """
    contents = {fold: _load_fold(cfg, trainer, fold) for fold in folds}
    with as_config_error():
        fault = find_fault(contents, cfg.data["num_folds"])
    if fault:
        raise ConfigError(
            f"data.num_folds={cfg.data['num_folds']}: {fault}; in {cfg.data['_target_']}, divide the samples by "
            "boltcutter.split_indices(…, num_folds=num_folds, fold=fold)"
        )


def check_fold(cfg: Settings, trainer: L.Trainer) -> None:
    """Compare the fold of a run, if it has one, with the next fold; see ``check_folds``."""
    if cfg.data.get("num_folds"):
        fold = cfg.data.get("fold", 0)
        check_folds(cfg, trainer, (fold, (fold + 1) % cfg.data["num_folds"]))


def _load_fold(cfg: Settings, trainer: L.Trainer, fold: int) -> FoldContents:
    """Load and read one fold, with the random splits that training would have."""
    with seeded_generators(READ), as_config_error():  # only restores the generators
        L.seed_everything(cfg.seed, verbose=False)
        data = build(cfg.changed({"data": {"fold": fold}}).data, "data")
        seed_hooks(data, cfg.seed)
        data.trainer = trainer
        data.prepare_data()
        data.setup(stage="fit")
        return read_fold(data)


class SplitContents(NamedTuple):
    """Digests of the samples of a split, in a random order that depends on their number only."""

    digests: Counter[bytes]  # number of samples with each digest
    total: int | None  # number of samples; None if unknown

    @property
    def fraction(self) -> float:
        """Fraction of the samples that were read."""
        return self.digests.total() / self.total if self.total else 1.0


class FoldContents(NamedTuple):
    """Contents of the train and val splits of a fold."""

    train: SplitContents
    val: SplitContents


def read_fold(data: L.LightningDataModule) -> FoldContents:
    """Read the samples of a fold, each split for a few seconds at most, without ``augment`` or ``transform``."""
    return FoldContents(_read_split(data, "train"), _read_split(data, "val"))


def find_fault(folds: Mapping[int, FoldContents], num_folds: int) -> str | None:
    """Return how the splits differ from those of a cross-validation; None if they do not.

    Equal samples may be in several splits as often as they are in the data. Where the contents of a sample depend on
    the fold, as with means of its train split, only the number of samples shows what no fold validates.

    Args:
        folds: Contents of some of the folds, at least two.
        num_folds: Number of folds; all of them are needed to find out whether they cover the data.
    """
    all_samples = {fold: found.train.digests + found.val.digests for fold, found in folds.items()}
    is_complete = all(split.digests.total() == split.total for found in folds.values() for split in found)
    first = next(iter(all_samples.values()))
    is_comparable = is_complete and all(found.keys() == first.keys() for found in all_samples.values())
    for one, other in combinations(folds, 2):
        train, (ours, theirs) = folds[one].train.digests, (folds[fold].val.digests for fold in (one, other))
        shared = [key for key in ours.keys() & theirs if train[key] <= ours[key]]
        excess = [key for key in shared if is_comparable and ours[key] + theirs[key] > all_samples[one][key]]
        if excess or 2 * len(shared) > max(2, min(len(ours), len(theirs))):
            return f"folds {one} and {other} share {len(shared)} of {len(ours)} validation samples"
    for fold, (train_split, val) in folds.items():
        overlap = train_split.digests.keys() & val.digests
        if is_comparable:
            most = all_samples[fold]
            overlap = {key for key in overlap if any(most[key] > other[key] for other in all_samples.values())}
        elif 2 * len(overlap) <= max(2, len(val.digests) * train_split.fraction):
            continue
        if overlap:
            return f"{len(overlap)} of {len(val.digests)} validation samples of fold {fold} are in its train split"
    validated = [found.val.digests for found in folds.values()]
    covered = len(set().union(*validated)) if is_comparable else sum(map(len, validated))
    if is_complete and len(folds) == num_folds and covered < len(first) * (1 if is_comparable else COVERAGE):
        return f"{len(first) - covered} of {len(first)} samples are in no fold's val split"
    return None


def _read_split(data: L.LightningDataModule, split: str) -> SplitContents:
    """Digests of a split: of the dataset in a ``DataModule``, elsewhere of what the dataloaders select."""
    name, end = f"{split}_dataloader", time.monotonic() + READ_SECONDS
    digests, total = Counter[bytes](), cast(int | None, 0)
    if isinstance(data, NativeData) and not has_own_loader(data, split):
        parts: Any = [_select(getattr(data.splits, split), None)]
    else:
        loaders = getattr(data, name)()
        flat = loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)
        parts = [_select(getattr(loader, "dataset", loader), loader) for loader in flat]
    for dataset, indices in parts:
        total = None if indices is None or total is None else total + len(indices)
        with seeded_generators(READ):
            for found in _digests(dataset, indices):
                digests.update(found)
                if time.monotonic() > end:
                    break
    return SplitContents(digests, total)


def _select(dataset: Any, loader: Any) -> tuple[Any, Any]:
    """Dataset and indices of the samples of a loader, or of a dataset; None for a stream."""
    if isinstance(dataset, IterableDataset) or sized_len(dataset) is None or dataset is loader:
        return dataset, None
    indices = np.arange(len(dataset))
    if isinstance(loader, DataLoader) and not isinstance(loader.sampler, RandomSampler):
        is_custom = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
        drawn = draw_indices(loader.batch_sampler if is_custom else loader.sampler, seed=0)
        in_batches = bool(drawn) and isinstance(drawn[0], Sequence)
        indices = np.unique(list(chain.from_iterable(drawn)) if in_batches else drawn).astype(np.int64)
    while type(dataset) is Subset:
        dataset, indices = dataset.dataset, np.asarray(dataset.indices, np.int64)[indices]
    return dataset, np.random.default_rng(hash64(READ, len(indices))).permutation(indices)


def _digests(dataset: Any, indices: Any) -> Iterator[list[bytes]]:
    """Digests of the samples, a few at a time."""
    if indices is None:
        yield from ([hash_batch(sample)] for sample in dataset)
        return
    for name in ("augment",) if isinstance(dataset, BatchedDataset) else ("augment", "transform"):
        if callable(getattr(dataset, name, None)):
            dataset = copy.copy(dataset)
            setattr(dataset, name, _unchanged)
    for begin in range(0, len(indices), CHUNK):
        chunk = indices[begin : begin + CHUNK]
        if isinstance(dataset, BatchedDataset):
            yield _hash_rows(tree_leaves(dataset.__getitems__(Batch(chunk))), len(chunk))
        elif type(dataset) is TensorDataset:
            yield _hash_rows([tensor[torch.from_numpy(chunk)] for tensor in dataset.tensors], len(chunk))
        else:
            yield [_hash_sample(dataset, index) for index in chunk.tolist()]


def _unchanged(sample: Any, *_: Any) -> Any:
    return sample


def _hash_sample(dataset: Any, index: int) -> bytes:
    seed_generators(READ)
    return hash_batch(dataset[index])


def _hash_rows(leaves: list[Any], count: int) -> list[bytes]:
    """Digest of each sample of a collated batch."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and len(leaf) == count]
    rows = [tensor.contiguous().view(count, -1).view(torch.uint8).numpy() for tensor in tensors]
    return [hashlib.blake2b(row, digest_size=8).digest() for row in np.concatenate(rows, axis=1)]
