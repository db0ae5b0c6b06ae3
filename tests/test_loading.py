import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import flip_a_bit

from boltcutter.checkpoint import AtomicCheckpointIO
from boltcutter.storage import CheckpointError


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("hello"), "not a checkpoint, or cut short (5 bytes)"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not a checkpoint, or cut short"),
        (flip_a_bit, "damaged at its record"),
        (lambda path: torch.save({"state_dict": Evil()}, path), "holds more than tensors and plain types"),
        (lambda path: path.write_bytes(pickle.dumps(Evil())), "not a checkpoint"),
        (lambda path: torch.save([1, 2], path), "holds a list, not a checkpoint"),
        (lambda path: torch.save({"weight": torch.ones(1)}, path), "load them with init_from="),
    ],
    ids=["gone", "empty", "text", "truncated", "flipped", "malicious", "pickle", "list", "bare"],
)
def test_a_bad_file_is_told_in_one_line(saved: Path, spoil: Any, message: str) -> None:
    spoil(saved)
    with pytest.raises(CheckpointError) as error:
        AtomicCheckpointIO().load_checkpoint(saved)
    assert message in str(error.value)
    assert str(saved) in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("/tmp/never").exists()
