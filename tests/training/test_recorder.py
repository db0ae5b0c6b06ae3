"""What a training records of itself."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boltcutter.environment import reads
from boltcutter.run.folder import read_record, update_record
from boltcutter.training.recorder import Recorder


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


def test_variables_that_only_steps_read_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_GAIN", "1.5")
    cfg: Any = SimpleNamespace(place=SimpleNamespace(folder=tmp_path), reproduce=None)
    trainer: Any = SimpleNamespace(is_global_zero=True)
    update_record(tmp_path, id="a")
    recorder = Recorder(cfg)
    with reads.observed():
        recorder.on_train_start(trainer, trainer)
        assert "PLANTED_GAIN" not in read_record(tmp_path)["environment"]["variables"]
        assert os.environ.get("PLANTED_GAIN") == "1.5"
        recorder.on_train_end(trainer, trainer)
    assert read_record(tmp_path)["environment"]["variables"]["PLANTED_GAIN"] == "1.5"
