import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from boltcutter.task.base import Task
from boltcutter.task.classification import Classification
from boltcutter.task.errors import CompilerError, MismatchError, TotalStepsError, call_with_batch

LABELS = torch.tensor([1, 2, 2])


class Mean(Classification):
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "message"),
    [
        (
            Classification,
            torch.zeros(3, 2),
            LABELS,
            r"^Classification.losses \(classification.py:\d+\): Target 2 is out of bounds; outputs: \(3, 2\) float32; "
            r"targets: \(3,\) int64 from 1 to 2; outputs should have the shape \(N, C\), and targets",
        ),
        (Classification, torch.zeros(3, 1, 3), LABELS, r"outputs: \(3, 1, 3\) float32; targets"),
        (Classification, (torch.zeros(3, 3),), LABELS, "outputs: a tuple; targets"),
        (Classification, torch.zeros(3, 3), LABELS.float(), r"targets: \(3,\) float32; outputs should"),
        (Mean, torch.zeros(3, 3), LABELS, 'Mean.losses: returned one value .*; use reduction="none"'),
    ],
)
def test_a_loss_that_fails_is_explained(task: type[Task], outputs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        call_with_batch(task(nn.Linear(1, 1), optimizer=SGD).losses, outputs, targets)


def test_errors_of_memory_are_unchanged() -> None:
    def fail(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match=r"^CUDA out of memory"):
        call_with_batch(fail, LABELS, LABELS)


@pytest.mark.parametrize("error", [CompilerError, MismatchError, TotalStepsError])
def test_users_see_the_message_without_a_traceback(error: type[Exception]) -> None:
    assert error("task.compile=xla ...").hide_traceback  # type: ignore[attr-defined]
