"""Checks of the batches that training and validation get."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence, tensors_of

FIRST = 8  # optimizer steps
MANY = 16  # training batches that are remembered
VALUES = 1024  # of pictures
SAME_SHAPE = 0.25  # largest difference of quantiles, in deviations


def remember(seen: Evidence) -> None:
    """Keep hash, labels and scale of a training batch."""
    if seen.batches >= MANY:
        return
    tensors = tensors_of(seen.batch)
    seen.batches += 1
    if num_workers(seen) > 1 or seen.store is not None:
        seen.hashes.append(batch_hash(tensors))
        seen.has_data = seen.has_data or has_data(seen)
    if seen.batches <= 4:
        for i, t in enumerate(tensors):
            if t.is_floating_point() and t.ndim >= 2 and t.numel() > 64 and _key(i, t) not in seen.scale:
                seen.scale[_key(i, t)] = Scale.of(t)
    labels = [t for t in tensors if not t.is_floating_point() and t.ndim == 1 and len(t) >= 8 and t.dtype != torch.bool]
    if len(labels) == 1:
        seen.labels.append(labels[0].detach().cpu())


def remember_validation(seen: Evidence) -> None:
    """Keep the labels of a validation batch."""
    found = [t for t in tensors_of(seen.validation_batch) if not t.is_floating_point() and t.ndim == 1 and len(t) > 1]
    seen.validation_labels += [t.detach().cpu() for t in found]


def batch_hash(tensors: list[Tensor]) -> int:
    """A hash of all values, in 62 bits."""
    total = 0
    for t in tensors:
        if t.numel() and not t.is_complex():
            t = t.detach().contiguous()
            value = torch.hash_tensor(t.float() if t.dtype == torch.bool else t)
            total = (total * 1_000_003 + int(value.item())) & ((1 << 62) - 1)
    return total


def has_data(seen: Evidence) -> bool:
    """Whether the batch is more than a placeholder, as of a loop that only counts."""
    wide = (t for t in tensors_of(seen.batch) if t.is_floating_point() and t.ndim > 1 and t.numel())
    return any(bool((t != t.flatten()[0]).any()) for t in wide)


def _key(number: int, tensor: Tensor) -> str:
    return f"{number}:{tuple(tensor.shape[1:])}"


class Scale(NamedTuple):
    """Of the values of a tensor.

    Args:
        mean: Their mean.
        deviation: Their standard deviation.
        size: Root of the mean of their squares.
        values: Some of them, evenly spread; only of pictures.
    """

    mean: float
    deviation: float
    size: float
    values: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Scale:
        """Measure a tensor whose first dimension is that of samples."""
        flat = tensor.detach().flatten().float()
        means = flat.mean()
        mean, norm = torch.stack([means, (flat - means).norm()]).tolist()  # std_mean takes 17 times as long
        deviation, size = norm / math.sqrt(len(flat) - 1), math.hypot(mean, norm / math.sqrt(len(flat)))
        is_picture = tensor.ndim == 4 and tensor.shape[1] in (1, 3, 4) and deviation > 0
        values = flat[:: (len(flat) // VALUES) | 1].clone() if is_picture else None  # odd: widths are mostly even
        return cls(mean, deviation, size, values)

    def shape(self) -> Tensor:
        """9 quantiles of a picture after the mean is subtracted, and the result divided by the deviation."""
        assert self.values is not None
        ordered = self.values.sort().values
        return (ordered[[i * len(ordered) // 10 for i in range(1, 10)]] - self.mean) / self.deviation

    def differs(self, other: Scale) -> bool:
        """Whether one of two splits must have been scaled by another factor.

        A series that grows has other means and deviations in a batch of neighbours, and so has a dark picture; neither
        is the same picture with other units.
        """
        if not (self.deviation > 0 and other.deviation > 0):
            return False
        ratio, sizes = other.deviation / self.deviation, other.size / self.size
        if not 0.1 < ratio < 10 and not 0.1 < sizes < 10:
            return True
        are_pictures = self.values is not None and other.values is not None
        return are_pictures and not 0.4 < ratio < 2.5 and float((self.shape() - other.shape()).abs().max()) < SAME_SHAPE


def loader_of(seen: Evidence) -> Any:
    """The loader of training."""
    return getattr(seen.trainer, "train_dataloader", None)


def num_workers(seen: Evidence) -> int:
    """Worker processes of the loader."""
    return int(getattr(loader_of(seen), "num_workers", 0))


@check("workers-same-data", "certain", at="batch")
def workers_same_data(seen: Evidence) -> Lines:
    """Eight batches in a row of an epoch have at most 8 / workers different hashes."""
    workers, recent = num_workers(seen), seen.hashes[-8:]
    is_one_epoch = seen.trainer.fit_loop.batch_idx >= 7  # batches of two epochs may be the same
    first = len(seen.hashes) < MANY and len(recent) == 8 and is_one_epoch and seen.step < FIRST and not overfits(seen)
    if first and workers > 1 and len(set(recent)) <= 8 // workers and seen.has_data:
        yield (
            f"each of {workers} workers yields the same batches, so every sample comes {workers} times per epoch; "
            "divide the samples by torch.utils.data.get_worker_info()"
        )


def compare_scales(split: str, known: Scale, found: Scale) -> Iterator[Line]:
    """The line on two splits of which one must have been scaled by another factor."""
    if known.differs(found):
        yield Line(
            f"inputs of {split} have mean {found.mean:.3g} and deviation {found.deviation:.3g}, those of training "
            f"{known.mean:.3g} and {known.deviation:.3g}; apply the same scaling to both",
            subject=split,
        )


@check("split-scale", "likely", at="validation")
def split_scale(seen: Evidence) -> Lines:
    """Inputs of two splits differ tenfold in deviation and size, or pictures by a factor of 2.5 and not in shape."""
    for i, t in enumerate(tensors_of(seen.validation_batch)):
        known = seen.scale.get(_key(i, t))
        if known and t.is_floating_point() and t.numel() > 64:
            seen.scale[_key(i, t)] = None
            for line in compare_scales("validation", known, Scale.of(t)):
                yield replace(line, sample=seen.sample(torch.ones(len(t), dtype=torch.bool), validation=True))


def overfits(seen: Evidence) -> bool:
    """Whether the trainer repeats some batches on purpose."""
    return bool(getattr(seen.trainer, "overfit_batches", 0))


def is_shuffled(seen: Evidence) -> bool:
    """Whether a few batches represent the whole training set."""
    loader = loader_of(seen)
    sampler = getattr(loader, "epoch_sampler", None) or getattr(loader, "sampler", None)
    shuffles = getattr(sampler, "shuffle", None)
    return bool(shuffles) if shuffles is not None else "Random" in type(sampler).__name__


@check("few-samples", "certain", at="start")
def few_samples(seen: Evidence) -> Lines:
    """A WeightedRandomSampler has fewer weights than the dataset has samples."""
    loader = loader_of(seen)
    weights = getattr(getattr(loader, "sampler", None), "weights", None)
    dataset = getattr(loader, "dataset", None)
    if isinstance(weights, Tensor) and hasattr(dataset, "__len__") and len(weights) < len(dataset):  # type: ignore[arg-type]
        yield (
            f"the sampler has {len(weights)} weights for {len(dataset)} samples, so only the first {len(weights)} "  # type: ignore[arg-type]
            "samples are drawn; give each sample the weight of its class (weights[labels])"
        )


@check("unseen-classes", "likely", at="summary")
def unseen_classes(seen: Evidence) -> Lines:
    """Most validation samples have classes of which no batch of a shuffled loader had any."""
    count = seen.num_classes
    if not seen.validation_labels or not seen.labels or count < 3 or not seen.targets or overfits(seen):
        return
    trained, held = torch.cat(seen.labels), torch.cat(seen.validation_labels)
    classes = set(torch.cat(seen.targets).unique().tolist())  # type: ignore[no-untyped-call]
    # Of a closed set: labels of the batch are what cross-entropy gets, and validation has no others.
    closed = len(classes) > 1 and classes >= set(trained.tolist()) and int(held.min()) >= 0 and int(held.max()) < count
    unseen = sorted(set(held.tolist()) - classes)
    share = float(torch.isin(held, torch.tensor(unseen)).float().mean()) if unseen else 0.0
    if closed and share > 0.5 and len(trained) >= 8 * count and is_shuffled(seen):
        yield (
            f"{share:.0%} of the validation samples have classes that no training sample had so far "
            f"({some([str(label) for label in unseen])}); shuffle before splitting"
        )


def has_unit_per_class(module: L.LightningModule, count: int) -> bool:
    """Whether a parameter has as many rows or columns as there are classes.

    Otherwise the same weights score all candidates, and the right one may stand at the same place in all samples.
    """
    return any(count in p.shape for p in module.parameters())


@check("one-class-batches", "likely", at="summary")
def one_class_batches(seen: Evidence) -> Lines:
    """Three quarters of the batches have one class each, though there are several."""
    if len(seen.labels) < 4 or overfits(seen) or seen.num_classes < 2:
        return
    labels = torch.cat(seen.labels).tolist()
    kinds, count = set(labels), len(labels)
    within = sum(len(set(t.tolist())) == 1 for t in seen.labels) / len(seen.labels)
    if within >= 0.75 and 1 < len(kinds) <= 1000:
        yield Line(
            f"{within:.0%} of the first batches have one class each, though there are {len(kinds)}; set shuffle=True"
        )
    elif (
        within == 1.0
        and len(kinds) == 1
        and seen.num_classes > 2
        and count >= 8 * seen.num_classes
        and has_unit_per_class(seen.module, seen.num_classes)
    ):
        yield Line(
            f"the first {count} training samples all have class {min(kinds)}, of {seen.num_classes}; set shuffle=True"
        )
