"""Checks of the classes of splits, and of the weights that these get: for ``audit``."""

from __future__ import annotations

from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import WeightedRandomSampler

from boltcutter.diagnosis.calls import CLASSES, is_equal
from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence, overrides, tensors_of
from boltcutter.diagnosis.loaders import SECONDS
from boltcutter.diagnosis.splits import NUMBERS
from boltcutter.diagnosis.targets import replaced
from boltcutter.structure import flatten, targets_of


def class_count(seen: Evidence) -> tuple[int, int] | None:
    """The number of classes and ignore_index, if cross-entropy gets the labels of the batch as they are."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches:
        return None
    labels = tensors_of(probe.batches["training_step"])
    for call in probe.base("training_step").calls:
        p, t = call.prediction, call.target
        is_plain = call.kind in ("cross_entropy", "nll_loss") and p is not None and t is not None
        if is_plain and t.ndim == 1 and p.ndim == 2 and any(x.shape == t.shape and torch.equal(x, t) for x in labels):
            return p.shape[1], call.options["ignore_index"]
    return None


def labels_of(seen: Evidence) -> dict[str, Tensor]:
    """Labels of the samples of each split, if they are integers."""
    tables = {name: seen.splits.table(name) for name in seen.splits.loaders} if seen.splits else {}
    return {name: table[1] for name, table in tables.items() if table and not table[1].is_floating_point()}


def _first(seen: Evidence, name: str, chosen: Tensor) -> Any:
    """The first of the chosen samples of a split."""
    return seen.splits.samples(name)[int(chosen.nonzero()[0])] if seen.splits else None


@check("label-range", "certain", at="data")
def label_range(seen: Evidence) -> Lines:
    """A label of a split is no class of the model, and not ignored, and its step fails by it."""
    if (found := class_count(seen)) is None:
        return
    count, ignored = found
    for name, labels in labels_of(seen).items():
        strange = ((labels >= count) | (labels < 0)) & (labels != ignored)
        if outside := torch.unique(labels[strange]).tolist():
            yield Line(
                f"{name} has labels {some([*map(str, outside)])}, but the model has {count} classes, 0 to {count - 1}; "
                "correct num_classes or the labels",
                None if _reads(seen, name, outside[0]) else "note",  # samples of unknown classes may be left out
                subject=name,
                sample=_first(seen, name, strange),
            )


def _reads(seen: Evidence, name: str, label: int) -> bool:
    """Whether the step of a split fails if the batch has a label, which a loss function gets as it is."""
    probe, kind = seen.probe, "training_step" if name == "train" else "validation_step"
    if probe is None or kind not in probe.batches:
        return False
    calls = [c for c in probe.base(kind).calls if c.kind in CLASSES and c.prediction.ndim == 2]
    targets = [c.target for c in calls if not 0 <= label < c.prediction.shape[1]]
    leaves = flatten(probe.batches[kind])
    places = [j for j, t in enumerate(leaves) if isinstance(t, Tensor) and any(is_equal(t, y) for y in targets)]
    if not places or leaves[places[0]].is_cuda:  # on a GPU, no later call would work
        return bool(places)
    step = "test_step" if name == "test" and overrides(seen.module, "test_step") else kind
    labels = leaves[places[0]].clone()
    labels[0] = label
    probe.end, probe.most = monotonic() + SECONDS, probe.passes + 2
    for batch, is_changed in ((probe.batches[kind], False), (replaced(probe, kind, {places[0]: labels}), True)):
        try:
            probe.run(step, batch, training=name == "train", record=False)
        except Exception:  # of cross-entropy, or of a metric; or a step that needs more than its batch
            return is_changed
    return False


@check("unseen-labels", "likely", at="data")
def unseen_labels(seen: Evidence) -> Lines:
    """Over 1% of the samples of validation or test have a class of the model that no training sample has."""
    found, labels = class_count(seen), labels_of(seen)
    train = labels.pop("train", None)
    if found is None or train is None or len(train) < 8 * (count := found[0]):
        return
    for name, held in labels.items():
        unseen = ~torch.isin(held, train) & (held >= 0) & (held < count)
        share = float(unseen.double().mean())
        if share > 0.01:
            classes = some([*map(str, torch.unique(held[unseen]).tolist())])
            yield Line(
                f"{share:.1%} of the {name} samples have classes that no training sample has ({classes}); "
                "shuffle before splitting, or split by class",
                subject=name,
                sample=_first(seen, name, unseen),
            )


@check("sampler-weights", "likely", at="data")
def sampler_weights(seen: Evidence) -> Lines:
    """WeightedRandomSampler draws samples in proportion to the size of their class, which differs threefold or more."""
    weights = getattr(getattr(seen.splits.train if seen.splits else None, "sampler", None), "weights", None)
    labels = labels_of(seen).get("train")
    if isinstance(weights, Tensor) and labels is not None and len(weights) == len(labels) and int(labels.min()) >= 0:
        counts = labels.long().bincount().double()
        if is_proportional(weights.double(), counts[labels.long()]):
            yield (
                "samples are drawn in proportion to the size of their class, so rare classes become rarer; give each "
                "sample the inverse: 1 / counts[labels]"
            )


@check("sampler-weights", "likely", at="data")
def drawn_once(seen: Evidence) -> Lines:
    """WeightedRandomSampler draws all samples without replacement, so that weights change only their order."""
    sampler = getattr(seen.splits.train if seen.splits else None, "sampler", None)
    if not isinstance(sampler, WeightedRandomSampler) or sampler.replacement:
        return
    weights = sampler.weights
    labels = labels_of(seen).get("train")
    if labels is None or len(labels) != len(weights):
        return
    values = len(torch.unique(weights))
    is_of_class = values <= len(torch.unique(labels))
    if sampler.num_samples == int((weights > 0).sum()) and values > 1 and is_of_class:
        yield (
            f"WeightedRandomSampler draws {sampler.num_samples} of {len(weights)} samples without replacement, which "
            "is each once, so weights balance nothing; write replacement=True"
        )


@check("class-weights", "likely", at="data")
def class_weights(seen: Evidence) -> Lines:
    """Weights of classes, whose sizes differ threefold, are proportional to these, or to 1 / size of other classes."""
    table, probe = seen.splits.table("train") if seen.splits else None, seen.probe
    if table is None or probe is None or "training_step" not in probe.batches or not _are_classes(table[1]):
        return
    counts = table[1].long().bincount().double()
    for call in probe.base("training_step").calls:
        weights: Any = call.options.get("weight")
        positive: Any = call.options.get("pos_weight")
        if isinstance(positive, Tensor) and positive.numel() == 1 and len(counts) == 2:
            weights = torch.stack([torch.ones_like(positive.flatten()[0]), positive.flatten()[0]])
        elif call.kind != "cross_entropy":
            weights = None
        if not isinstance(weights, Tensor) or weights.shape != counts.shape:
            continue
        given = weights.double().cpu()
        if is_proportional(given, counts):
            yield (
                f"the class weights of {call.kind} are the sizes of the classes, so frequent ones count most; use "
                "their inverse: 1 / counts"
            )
            return
        ordered = given.sort(descending=True).values
        for power in (1.0, 0.5):
            ideal = counts.sort().values ** -power
            if is_proportional(ordered, ideal) and not is_proportional(given, counts**-power):
                yield (
                    f"the class weights of {call.kind} are the inverse sizes of the classes, but in another order: "
                    f"that of class {int(counts.argmax())}, the most frequent, is "
                    f"{float(given[counts.argmax()] / given.min()):.3g} times the smallest; sort them by class"
                )
                return


@check("class-weights", "likely", at="data")
def positive_weights(seen: Evidence) -> Lines:
    """The pos_weight of binary cross-entropy is the number of positive targets over that of negative ones."""
    probe = seen.probe
    if seen.splits is None or probe is None or "training_step" not in probe.batches:
        return
    for call in probe.base("training_step").calls:
        given: Any = call.options.get("pos_weight")
        if not isinstance(given, Tensor) or not 0 < float(given.min()) < 1 / 3:
            continue
        targets = [targets_of(sample) for sample in seen.splits.samples("train")]
        if not targets or not all(isinstance(each, NUMBERS) for each in targets):
            return
        stacked = [torch.as_tensor(each).double() for each in targets]
        if any(each.shape != stacked[0].shape for each in stacked) or stacked[0].dim() < given.dim() - 1:
            return
        y = torch.stack(stacked)
        if not bool(((y == 0) | (y == 1)).all()):
            return
        positive, negative = (part.sum_to_size(given.shape) for part in (y, 1 - y))
        if torch.allclose(given.double().cpu(), positive / negative, rtol=0.05):
            yield (
                f"pos_weight is positive / negative, {float(given.min()):.2g} to {float(given.max()):.2g}, so rare "
                "targets count even less; use negative / positive"
            )
        return


def _are_classes(y: Tensor) -> bool:
    """Whether targets are numbers of classes, also 0.0 and 1.0."""
    is_binary = bool(((y == 0) | (y == 1)).all())
    return is_binary or (not y.is_floating_point() and int(y.min()) >= 0)


def is_proportional(one: Tensor, other: Tensor) -> bool:
    """Whether two positive vectors differ by a factor only, and vary threefold or more."""
    if not bool((one > 0).all()) or not bool((other > 0).all()) or float(other.max()) < 3 * float(other.min()):
        return False
    ratio = one / other
    return float(ratio.max()) < 1.01 * float(ratio.min())
