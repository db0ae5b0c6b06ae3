"""Planted bugs of samples, which only a trial shows, are named."""

from pathlib import Path

import pytest
import torch
from programs import Program
from programs.running import assert_named, bugs_of

from boltcutter.diagnosis.samples import numbers_rows
from boltcutter.diagnosis.trial import Trial


@pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about the small programs
@pytest.mark.parametrize("program", bugs_of("samples", probed=True))
def test_a_planted_bug_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path, Trial(with_data=True))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([[0, 1, 2], [1, 2, 3]]), True),  # edges
        (torch.tensor([0, 1, 2, 3]), False),  # a value of each row
        (torch.tensor([[0, 1], [1, 2]]), False),  # of fewer rows
        (torch.tensor(3), False),
        (torch.tensor([], dtype=torch.int64), False),
        (torch.tensor([[0j, 3j]]), False),
        (torch.tensor([[0.0, 3.0]]), False),
    ],
)
def test_numbers_of_rows_are_known(values: torch.Tensor, expected: bool) -> None:
    assert numbers_rows(values, 4) == expected
