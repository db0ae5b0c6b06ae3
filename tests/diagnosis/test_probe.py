from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import Base, digits
from programs.running import trainer_of

from boltcutter.diagnosis.probe import BudgetError, Probe, generator_state, set_generator_state, take


def test_a_step_is_called_with_the_index_of_its_loader(tmp_path: Path) -> None:
    seen = []

    class Several(Base):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            seen.append(dataloader_idx)

    module = Several()
    trainer = trainer_of(tmp_path)
    batch = next(iter(digits(32, 32)[0]))
    Probe(trainer, module, batch, batch).base("validation_step")
    assert seen == [0]


def test_passes_are_limited(tmp_path: Path) -> None:
    batch = next(iter(digits(32, 32)[0]))
    probe = Probe(trainer_of(tmp_path), Base(), batch, None)
    probe.most = 1
    assert probe.base("training_step") is probe.base("training_step")
    with pytest.raises(BudgetError):
        probe.run("training_step", batch, training=True)


@pytest.mark.parametrize("generator", [np.random.default_rng(0), np.random.RandomState(0)])
def test_generators_are_restored(generator: Any) -> None:
    state = generator_state(generator)
    first = generator.normal()
    set_generator_state(generator, state)
    assert generator.normal() == first


def test_only_tensors_with_a_row_for_each_sample_are_reordered() -> None:
    batch = {"x": torch.arange(4), "weights": torch.arange(3), "name": "a"}
    found = take(batch, torch.tensor([3, 2, 1, 0]))
    assert (found["x"].tolist(), found["weights"].tolist(), found["name"]) == ([3, 2, 1, 0], [0, 1, 2], "a")
