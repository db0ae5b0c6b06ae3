"""Metrics of torchmetrics in collections have the same values while training as when they are evaluated alone."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection, classification, regression
from torchmetrics.wrappers import MetricTracker, MinMaxMetric

from boltcutter.callback.metrics import SeparateMetrics

CLASSES, SAMPLES = 4, 16
ARGUMENTS = {"num_classes": CLASSES, "num_labels": CLASSES, "num_groups": 2, "beta": 2.0, "p": 3.0, "threshold": 0.5}
ARGUMENTS |= {f"min_{name}": 0.2 for name in ("recall", "precision", "specificity", "sensitivity")}
VARIANTS: list[dict[str, Any]] = [{}, *({"average": average} for average in ("micro", "macro", "weighted", "none"))]
VARIANTS += [{"ignore_index": 0}, {"ignore_index": 1}, {"thresholds": 5}, {"top_k": 2}, {"squared": False}]
DISTRIBUTIONS = ("KLDivergence", "JensenShannonDivergence")


def inputs(name: str) -> tuple[Tensor, ...]:
    """Predictions and targets for a metric; of the first samples all classes are 3, and predictions are right."""
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    targets[:4] = CLASSES - 1
    scores = torch.rand(SAMPLES, CLASSES, generator=draw)
    scores[:4, CLASSES - 1] = 2.0
    labels = torch.randint(2, (SAMPLES, CLASSES), generator=draw)
    labels[:4] = 1
    if name.startswith("Multiclass"):
        return scores.softmax(-1), targets
    if name.startswith("Multilabel"):
        return (scores / 2).clamp(0, 1), labels
    if name.startswith("BinaryFair") or name.startswith("BinaryGroup"):
        return scores[:, 3] / 2, labels[:, 0], torch.arange(SAMPLES) % 2
    if name.startswith("Binary"):
        return scores[:, 3] / 2, labels[:, 0]
    if name in DISTRIBUTIONS:
        return scores.softmax(-1), scores.flip(0).softmax(-1)
    if name == "ContinuousRankedProbabilityScore":
        return scores, scores[:, 1]
    if name == "CosineSimilarity":
        return scores, scores.flip(0)
    values = scores[:, 0].clone()
    values[:4] = scores[:4, 1]
    return scores[:, 1], values


def build() -> dict[str, Metric]:
    """All metrics that can be built, in the variants that each accepts and can compute."""
    found: dict[str, Metric] = {}
    for package in (classification, regression):
        for name, kind in sorted(vars(package).items()):
            if not isinstance(kind, type) or (package is classification and not name.startswith(("Bin", "Multi"))):
                continue  # the others return one of these
            parameters = inspect.signature(kind.__init__).parameters.values()
            needed = {p.name: ARGUMENTS[p.name] for p in parameters if p.name in ARGUMENTS and p.default is p.empty}
            if name.startswith("Multiclass"):
                needed["num_classes"] = CLASSES
            for variant in VARIANTS:
                if set(variant) <= {p.name for p in parameters}:
                    try:
                        metric = kind(**needed, **variant)
                        for samples in (2, SAMPLES):  # of the sanity check, and of validation
                            for batch in torch.arange(samples).split(2):
                                metric.update(*(value[batch] for value in inputs(name)))
                            metric.compute()
                            metric.reset()
                    except (ValueError, RuntimeError, IndexError):
                        continue  # is not implemented, or needs more samples or a package that is not installed
                    found[f"{name}{''.join(f'-{value}' for value in variant.values())}".replace(".", "_")] = metric
    return found


class Scores(L.LightningModule):
    """Holds the metrics in one collection for each kind of inputs, as torchmetrics recommends."""

    def __init__(self, metrics: dict[str, Metric], create: Callable[..., nn.Module] = MetricCollection) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        kinds: dict[tuple[Any, ...], dict[str, Metric]] = {}
        for name, metric in metrics.items():
            kinds.setdefault(tuple(value.sum().item() for value in inputs(name)), {})[name] = metric.clone()
        self.collections = nn.ModuleList(create(found) for found in kinds.values())
        self.inputs = [inputs(next(iter(found))) for found in kinds.values()]
        self.values: dict[str, Any] = {}

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.weight**2

    def validation_step(self, batch: list[Tensor]) -> None:
        for collection, values in zip(self.collections, self.inputs, strict=True):
            collection.update(*(value[batch[0]] for value in values))  # type: ignore[operator]

    def on_validation_epoch_end(self) -> None:
        for collection in self.collections:
            self.values |= {name: metric.compute() for name, metric in collection.items()}  # type: ignore[operator]
            collection.reset()  # type: ignore[operator]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(module: Scores, *callbacks: L.Callback) -> dict[str, Any]:
    """Values of a validation that follows a sanity check with two samples."""
    data = DataLoader(TensorDataset(torch.arange(SAMPLES)), 2)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=1,
        limit_train_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, data, data)
    return module.values


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(same, one, other))
    return torch.equal(torch.nan_to_num(one, nan=-7), torch.nan_to_num(other, nan=-7))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of metrics that need more samples or memory
def test_metrics_in_a_collection_have_the_values_that_they_have_alone() -> None:
    metrics = build()
    assert len(metrics) > 150
    found = train(Scores(metrics), SeparateMetrics())
    for name, metric in metrics.items():
        for batch in torch.arange(SAMPLES).split(2):
            metric.update(*(value[batch] for value in inputs(name)))
        assert same(found[name], metric.compute()), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_groups_that_the_user_names_are_kept() -> None:
    pair = {
        "MulticlassAll": classification.MulticlassAccuracy(CLASSES, average="micro"),
        "MulticlassNo0": classification.MulticlassAccuracy(CLASSES, average="micro", ignore_index=0),
    }
    named = Scores(pair, lambda found: MetricCollection(found, compute_groups=[["MulticlassAll"], ["MulticlassNo0"]]))  # type: ignore[arg-type]
    train(named, SeparateMetrics())
    (collection,) = named.collections
    assert collection.compute_groups == {0: ["MulticlassAll"], 1: ["MulticlassNo0"]}
    by_chance = train(Scores(pair))  # without the callback, to show what it prevents
    assert same(by_chance["MulticlassAll"], by_chance["MulticlassNo0"])
    assert not same(named.values["MulticlassAll"], named.values["MulticlassNo0"])


class Extremes(L.LightningModule):
    """Keeps the smallest and largest mean over validation samples, and its history."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.range, self.own = MinMaxMetric(MeanMetric()), MinMaxMetric(MeanMetric())
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0][:, None].float()).mean()

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        for metric in (self.range, self.own, self.tracker):
            metric.update(batch[0].float())

    def on_validation_epoch_end(self) -> None:
        self.values = {"own": self.own.compute(), "tracked": self.tracker.compute_all()}
        self.log_dict(self.range.compute())
        self.own.reset()
        self.range.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_training_forgets_what_the_sanity_check_has_computed() -> None:
    module = Extremes()
    values = train(module, SeparateMetrics())  # type: ignore[arg-type]
    mean = (SAMPLES - 1) / 2
    assert {name: float(value) for name, value in values["own"].items()} == {"raw": mean, "min": mean, "max": mean}
    assert values["tracked"].tolist() == [mean]
    assert module.trainer.callback_metrics["min"] == mean
