from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from boltcutter.task.classification import Classification

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0], [1.0, 1.0, 1.0], [-60.0, 80.0, 0.0]])
TARGETS = torch.tensor([0, 2, 1, 1])


def task(**options: Any) -> Classification:
    return Classification(nn.Identity(), optimizer=partial(SGD, lr=0.1), **options)


def test_losses_are_cross_entropy_in_nats() -> None:
    expected = -LOGITS.softmax(-1).log()[range(4), TARGETS]
    torch.testing.assert_close(task().losses(LOGITS, TARGETS), expected)


def test_label_smoothing_only_while_training() -> None:
    module = task(label_smoothing=0.3)
    nats = -LOGITS.log_softmax(-1)
    smooth = 0.7 * nats[range(4), TARGETS] + 0.3 * nats.mean(-1)
    torch.testing.assert_close(module.train().losses(LOGITS, TARGETS), smooth)
    torch.testing.assert_close(module.eval().losses(LOGITS, TARGETS), nats[range(4), TARGETS])


def test_class_weights() -> None:
    module = task(class_weights=[1, 0.5, 10])
    expected = F.cross_entropy(LOGITS, TARGETS, reduction="none") * torch.tensor([1, 10, 0.5, 0.5])
    torch.testing.assert_close(module.losses(LOGITS, TARGETS), expected)
    assert not module.state_dict()


class Focal(Classification):
    """Overrides the losses."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = super().losses(outputs, targets)
        return (1 - (-losses).exp()) * losses


def test_mean_loss_is_the_mean_of_losses() -> None:
    module = [task(), task(label_smoothing=0.3), task(class_weights=[1, 0.5, 10])]
    for each in (*module, Focal(nn.Identity(), optimizer=partial(SGD, lr=0.1))):
        mean = each.train().mean_loss(LOGITS, TARGETS)
        torch.testing.assert_close(mean, each.losses(LOGITS, TARGETS).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_predictions_are_probabilities(dtype: torch.dtype) -> None:
    probabilities = task().predictions(LOGITS.to(dtype))
    assert probabilities.shape == (4, 3)
    assert probabilities.min() >= 0
    torch.testing.assert_close(probabilities.double().sum(-1), torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.equal(probabilities.argmax(-1), LOGITS.argmax(-1))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_label_smoothing_out_of_range(smoothing: float) -> None:
    with pytest.raises(ValueError, match=rf"^task\.label_smoothing={smoothing} is not in \[0, 1\); try 0\.1$"):
        task(label_smoothing=smoothing)


def test_negative_class_weights() -> None:
    with pytest.raises(ValueError, match=r"^task\.class_weights=\[1, -1\] .* 0 or more for each class"):
        task(class_weights=[1, -1])
