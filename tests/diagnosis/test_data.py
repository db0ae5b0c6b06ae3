"""Planted bugs of the data are named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import Program
from programs.running import assert_named, bugs_of

from boltcutter.diagnosis.data import workers_same_data


@pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about the small programs
@pytest.mark.parametrize("program", bugs_of("data"))
def test_a_planted_bug_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path)


@pytest.mark.parametrize(("index", "found"), [(3, 0), (7, 1)])
def test_batches_of_two_epochs_are_not_those_of_two_workers(index: int, found: int) -> None:
    loader = SimpleNamespace(num_workers=2)
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(batch_idx=index), train_dataloader=loader, overfit_batches=0)
    seen: Any = SimpleNamespace(hashes=[1, 2, 3, 4] * 2, step=7, has_data=True, trainer=trainer)
    assert len([*workers_same_data(seen)]) == found
