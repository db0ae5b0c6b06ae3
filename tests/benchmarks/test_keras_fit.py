import copy
import sys
from typing import Any

import pytest
import torch
from conftest import require

if sys.version_info < (3, 11):
    pytest.skip("Keras needs Python 3.11", allow_module_level=True)
require(install="pip install -c constraints.txt -e '.[keras]'", package="keras")

from benchmarks import reference, step  # noqa: E402

from boltcutter.model.keras_convnet import KerasConvNet  # noqa: E402
from boltcutter.model.keras_model import keras  # noqa: E402


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # of Keras's own
def test_keras_computes_the_losses_of_the_hand_written_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []

    class Turns:
        def __init__(self, **options: Any) -> None:
            losses.clear()

        def end_step(self, loss: float) -> None:
            losses.append(loss)

    monkeypatch.setattr(reference, "StepTimer", Turns)
    keras.utils.set_random_seed(0)
    kept = {
        "inputs": torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8),
        "targets": torch.randint(0, 10, (40,)),
        "order": torch.randint(0, 40, (6, 16)),
        "total_steps": 6,
    }
    # A small rate: Adam's first steps go by the sign of the gradient, and turn rounding into whole steps.
    spec = {"device": "cpu", "precision": "32-true", "clip": 0.1, "seeds": [], "turns": {}}
    spec["optimizer"] = {"_target_": "torch.optim.AdamW", "lr": 0.001, "weight_decay": 0.1}
    spec["scheduler"] = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.001, "cycle_momentum": False}
    model = KerasConvNet((1, 8, 8), 10, dropout=0.0)
    start = copy.deepcopy(model.state_dict())
    reference.guide(model, kept, spec)
    by_hand = list(losses)
    model.load_state_dict(start)
    reference.keras(model, kept, spec)
    assert len(by_hand) == 6
    assert losses == pytest.approx(by_hand, rel=step.TOLERANCE)
