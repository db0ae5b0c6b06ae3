from pathlib import Path
from typing import Any

import pytest
import torch

from boltcutter.checkpoint import AtomicCheckpointIO, CheckpointError, load


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, path = AtomicCheckpointIO(), tmp_path / "checkpoints" / "last.ckpt"
    writer.save_checkpoint({"step": torch.tensor(1)}, path)

    def full(checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"last\.ckpt: not written \(.*No space left on device\); the checkpoint"):
        writer.save_checkpoint({"step": torch.tensor(2)}, path)
    assert load(path) == {"step": torch.tensor(1)}
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]
