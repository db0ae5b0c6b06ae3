"""What a training records of itself."""

from pathlib import Path

import torch

from boltcutter.run.folder import read_record


def test_a_checkpoint_has_the_run_id_and_commit(trained: Path) -> None:
    provenance = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)["boltcutter"]
    known = read_record(trained)
    assert (provenance["run"], provenance["commit"]) == (known["id"], known["git"]["commit"])
    assert provenance["attempt"] == 1
    assert provenance["save"] > 1


def test_the_start_of_a_training_is_recorded(trained: Path) -> None:
    known = read_record(trained)
    assert len(known["data"]) == 16  # fingerprint
    assert len(known["loggers"]) == 2  # that of metrics.csv besides
    assert known["wandb"]["id"] == known["id"]
