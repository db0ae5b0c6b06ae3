"""Checks of the batches that training and validation get."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence, tensors_of

FIRST = 8  # optimizer steps
MANY = 16  # training batches that are remembered
MANY_VALIDATION = 200


def remember(seen: Evidence) -> None:
    """Keep hash, labels and scale of a training batch."""
    if len(seen.hashes) >= MANY:
        return
    tensors = tensors_of(seen.batch)
    seen.hashes.append(batch_hash(tensors))
    if len(seen.hashes) <= 4:
        for i, t in enumerate(tensors):
            if t.is_floating_point() and t.ndim >= 2 and t.numel() > 64:
                seen.scale[_key(i, t)] = _scale(t)
    labels = [t for t in tensors if not t.is_floating_point() and t.ndim == 1 and len(t) >= 8 and t.dtype != torch.bool]
    if len(labels) == 1:
        seen.labels.append(labels[0].detach().cpu())


def remember_validation(seen: Evidence) -> None:
    """Keep the labels of a validation batch."""
    if seen.validation_batches <= MANY_VALIDATION:
        found = [
            t for t in tensors_of(seen.validation_batch) if not t.is_floating_point() and t.ndim == 1 and len(t) > 1
        ]
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


def _has_data(seen: Evidence) -> bool:
    """Whether the batch is more than a placeholder, as of a loop that only counts."""
    wide = (t for t in tensors_of(seen.batch) if t.is_floating_point() and t.ndim > 1 and t.numel())
    return any(bool((t != t.flatten()[0]).any()) for t in wide)


def _key(number: int, tensor: Tensor) -> str:
    return f"{number}:{tuple(tensor.shape[1:])}"


def _scale(tensor: Tensor) -> tuple[float, float]:
    tensor = tensor.detach().float()
    return float(tensor.mean()), float(tensor.std())


def _loader(seen: Evidence) -> Any:
    return getattr(seen.trainer, "train_dataloader", None)


@check("workers-same-data", "certain", at="batch")
def workers_same_data(seen: Evidence) -> Lines:
    """Eight batches in a row have at most 8 / workers different hashes."""
    workers, recent = getattr(_loader(seen), "num_workers", 0), seen.hashes[-8:]
    first = len(seen.hashes) < MANY and len(recent) == 8 and seen.step < FIRST and not overfits(seen)
    if first and workers > 1 and len(set(recent)) <= 8 // workers and _has_data(seen):
        yield (
            f"each of {workers} workers yields the same batches, so every sample comes {workers} times per epoch; "
            "divide the samples by torch.utils.data.get_worker_info()"
        )


@check("split-scale", "likely", at="validation")
def split_scale(seen: Evidence) -> Lines:
    """The deviation of the inputs differs tenfold between training and validation."""
    for i, t in enumerate(tensors_of(seen.validation_batch)):
        known = seen.scale.get(_key(i, t))
        if known and t.is_floating_point() and t.numel() > 64:
            mean, deviation = _scale(t)
            if known[1] > 0 and deviation > 0 and not 0.1 < deviation / known[1] < 10:
                yield (
                    f"inputs of validation have mean {mean:.3g} and deviation {deviation:.3g}, those of training "
                    f"{known[0]:.3g} and {known[1]:.3g}; apply the same scaling to both"
                )


def overfits(seen: Evidence) -> bool:
    """Whether the trainer repeats some batches on purpose."""
    return bool(getattr(seen.trainer, "overfit_batches", 0))


def is_shuffled(seen: Evidence) -> bool:
    """Whether a few batches represent the whole training set."""
    loader = _loader(seen)
    sampler = getattr(loader, "epoch_sampler", None) or getattr(loader, "sampler", None)
    shuffles = getattr(sampler, "shuffle", None)
    return bool(shuffles) if shuffles is not None else "Random" in type(sampler).__name__


@check("unseen-classes", "likely", at="summary")
def unseen_classes(seen: Evidence) -> Lines:
    """Most validation samples have classes of which no batch of a shuffled loader had any."""
    count = seen.num_classes
    if not seen.validation_labels or not seen.labels or count < 3 or len(seen.train_classes) < 2 or overfits(seen):
        return
    trained, held = torch.cat(seen.labels), torch.cat(seen.validation_labels)
    # Of a closed set: labels of the batch are what cross-entropy gets, and validation has no others.
    closed = set(trained.tolist()) <= seen.train_classes and int(held.min()) >= 0 and int(held.max()) < count
    unseen = sorted(set(held.tolist()) - seen.train_classes)
    share = float(torch.isin(held, torch.tensor(unseen)).float().mean()) if unseen else 0.0
    if closed and share > 0.5 and len(trained) >= 8 * count and is_shuffled(seen):
        yield (
            f"{share:.0%} of the validation samples have classes that no training sample had so far "
            f"({some([str(label) for label in unseen])}); shuffle before splitting"
        )


@check("one-class-batches", "likely", at="summary")
def one_class_batches(seen: Evidence) -> Lines:
    """Three quarters of the batches have one class each, though there are several."""
    if len(seen.labels) < 4 or overfits(seen) or seen.num_classes < 2:
        return
    labels = torch.cat(seen.labels)
    kinds, count = set(labels.tolist()), len(labels)
    within = sum(bool((t == t[0]).all()) for t in seen.labels) / len(seen.labels)
    if within >= 0.75 and 1 < len(kinds) <= 1000:
        yield Line(
            f"{within:.0%} of the first batches have one class each, though there are {len(kinds)}; set shuffle=True"
        )
    elif within == 1.0 and len(kinds) == 1 and seen.num_classes > 2 and count >= 8 * seen.num_classes:
        yield Line(
            f"the first {count} training samples all have class {min(kinds)}, of {seen.num_classes}; set shuffle=True"
        )
