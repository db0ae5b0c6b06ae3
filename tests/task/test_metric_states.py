import pytest
import torch
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix
from torchmetrics.regression import MeanSquaredError

from boltcutter.task.metric_states import get_state, merge_states, set_state

SCORES = torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(12) % 3


class MeanOfBatches(Metric):
    """Has a state that is averaged over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, values: torch.Tensor) -> None:
        done = self._update_count - 1  # without the current one
        self.mean = (self.mean * done + values.mean()) / (done + 1)

    def compute(self) -> torch.Tensor:
        mean: torch.Tensor = self.mean
        return mean


@pytest.mark.parametrize(
    ("metric", "inputs"),
    [
        (MulticlassAUROC(3), (SCORES, CLASSES)),
        (MulticlassAUROC(3, thresholds=5), (SCORES, CLASSES)),
        (MulticlassConfusionMatrix(3), (SCORES, CLASSES)),
        (CatMetric(), (SCORES[:, 0],)),
        (MeanSquaredError(), (SCORES[:, 0], SCORES[:, 1])),
        (MaxMetric(), (SCORES,)),
        (MinMetric(), (SCORES,)),
        (SumMetric(), (SCORES,)),
        (MeanMetric(), (SCORES,)),
        (MeanOfBatches(), (SCORES,)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Metric) else "",
)
def test_merged_states_equal_a_single_process(metric: Metric, inputs: tuple[torch.Tensor, ...]) -> None:
    ranks = [metric.clone(), metric.clone()]
    for batch, rank in ((slice(0, 4), ranks[0]), (slice(4, 8), ranks[0]), (slice(8, 12), ranks[1])):
        metric.update(*(values[batch] for values in inputs))
        rank.update(*(values[batch] for values in inputs))
    again = metric.clone()
    again.reset()
    set_state(again, merge_states(metric, [get_state(rank) for rank in ranks]))
    assert torch.allclose(again.compute(), metric.compute())


@pytest.mark.parametrize("updated", [False, True])
def test_saved_states_are_restored(updated: bool) -> None:
    metric = MulticlassAUROC(3)
    if updated:
        metric.update(SCORES, CLASSES)
    again = MulticlassAUROC(3)
    set_state(again, get_state(metric))
    again.update(SCORES, CLASSES)
    metric.update(SCORES, CLASSES)
    assert torch.equal(again.compute(), metric.compute())


@pytest.mark.parametrize("metric", [MulticlassConfusionMatrix(3), MulticlassAUROC(3)], ids=["sum", "list"])
def test_a_saved_state_is_a_copy_with_the_number_of_updates(metric: Metric) -> None:
    metric.update(SCORES[:4], CLASSES[:4])
    state, expected = get_state(metric), metric.clone()
    for name in metric._defaults:  # a metric may add in place
        value = getattr(metric, name)
        for tensor in value if isinstance(value, list) else [value]:
            tensor.zero_()
    metric.update(SCORES, CLASSES)
    again = metric.clone()
    again.reset()
    set_state(again, state)
    assert (again.update_count, again.update_called) == (1, True)
    assert torch.equal(again.compute(), expected.compute())  # without torchmetrics' warning that there is no update
    merged = merge_states(metric, [state, get_state(metric)])
    set_state(again, merged)
    assert again.update_count == 3


def test_states_without_reduction_cannot_be_merged() -> None:
    metric = PearsonCorrCoef()
    metric.update(SCORES[:, 0], SCORES[:, 1])
    with pytest.raises(ValueError, match=r"PearsonCorrCoef\.\w+ has no reduction"):
        merge_states(metric, [get_state(metric)] * 2)


class Labelled(torch.Tensor):
    """A tensor with metadata, as libraries of medical images have."""


def test_states_are_plain_tensors() -> None:
    metric = CatMetric(nan_strategy="disable")
    metric.update(torch.ones(2).as_subclass(Labelled))
    state = get_state(metric)
    assert [type(value) for value in state["value"]] == [torch.Tensor]
