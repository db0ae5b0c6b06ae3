from pathlib import Path

import pytest
from replay.conftest import Replayed

from boltcutter.config.errors import ConfigError
from boltcutter.replay.job import Done, folder_of, newest_before, ranks_of


def test_the_newest_checkpoint_before_a_step_is_chosen() -> None:
    saved = [(100, "a"), (200, "b"), (300, "c")]
    assert newest_before(saved, 250) == (200, "b")
    assert newest_before(saved, 200) == (100, "a")
    assert newest_before(saved, 100) == (0, None)


def test_losses_are_means_over_ranks_and_batches() -> None:
    ranks = [{"losses": {"10": ["1.0", "2.0"], "9": ["nan"]}}, {"losses": {"10": ["3.0", "6.0"]}}]
    losses = Done(ranks, []).losses()
    assert list(losses) == [9, 10]
    assert losses[10] == 3.0


def test_runs_are_found(replayed: Replayed, tmp_path: Path) -> None:
    assert folder_of(str(replayed.run)) == replayed.run
    assert ranks_of(replayed.run) == 1
    with pytest.raises(ConfigError, match="with: missing"):
        folder_of(None, "with")
    with pytest.raises(ConfigError, match="no run there"):
        folder_of(str(tmp_path))
