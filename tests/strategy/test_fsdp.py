import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from boltcutter.checkpoint import AtomicCheckpointIO
from boltcutter.storage import CheckpointError
from boltcutter.strategy.fsdp import FSDPStrategy


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.fixture
def strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FSDPStrategy:
    monkeypatch.chdir(tmp_path)
    made = FSDPStrategy(checkpoint_io=AtomicCheckpointIO())
    made.model, made._lightning_module = nn.Linear(1, 1), mock.Mock()
    monkeypatch.setattr(made, "broadcast", lambda value, src=0: value)  # there is one process
    return made


@pytest.mark.parametrize("evil", [{"state_dict": {}, "x": Evil()}, {"state_dict": Evil()}], ids=["beside", "weights"])
def test_a_checkpoint_is_never_run_as_code(strategy: FSDPStrategy, evil: Any) -> None:
    torch.save(evil, "last.ckpt")
    with pytest.raises(CheckpointError, match="would execute code"):
        strategy.load_checkpoint("last.ckpt")
    assert not Path("evil").exists()


def test_a_folder_is_refused(strategy: FSDPStrategy) -> None:
    Path("last.ckpt").mkdir()
    with pytest.raises(ValueError, match=r"^trainer\.strategy\.state_dict_type=sharded: last\.ckpt is a folder"):
        strategy.load_checkpoint("last.ckpt")
