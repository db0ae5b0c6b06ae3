from pathlib import Path

import pytest
import torch
from conftest import QUICK, Script
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.strategy.tpu import HostCheckpointIO


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_are_written_and_read_by_the_wrapped_plugin(tmp_path: Path, asynchronous: bool) -> None:
    plugin = HostCheckpointIO(AtomicCheckpointIO(asynchronous=asynchronous))
    assert isinstance(plugin, _WrappingCheckpointIO)  # as Lightning requires
    path = tmp_path / "last.ckpt"
    plugin.save_checkpoint({"state_dict": {"weight": torch.arange(3)}, "epoch": 1}, path)
    plugin.wait()
    found = plugin.load_checkpoint(path)
    assert found["state_dict"]["weight"].tolist() == [0, 1, 2]
    assert found["epoch"] == 1
    plugin.remove_checkpoint(path)
    plugin.wait()
    assert not path.exists()


def test_a_missing_torch_xla_is_reported(script: Script, tmp_path: Path) -> None:
    done = script("train", *QUICK, "trainer=tpu", f"folder={tmp_path}/run")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: trainer.accelerator=tpu: this machine has no TPU")
    assert not (tmp_path / "run").exists()
