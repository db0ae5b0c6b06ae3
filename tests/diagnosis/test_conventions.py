"""Planted bugs of conventions, which only a trial shows, are named."""

from pathlib import Path

import pytest
from programs import Program
from programs.running import assert_named, bugs_of

from boltcutter.diagnosis.trial import Trial


@pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about the small programs
@pytest.mark.parametrize("program", bugs_of("conventions", probed=True))
def test_a_planted_bug_is_named(program: Program, tmp_path: Path) -> None:
    assert_named(program, tmp_path, Trial(with_data=True))
