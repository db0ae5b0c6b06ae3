"""Only what no other test would notice: that names are there is tested by ``tests/test_private_names.py``."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, ModelCheckpoint
from torch import nn

from boltcutter import internals
from boltcutter.api.objects import _order


def test_reading_a_checkpoint_does_not_import_lightning() -> None:
    code = "import sys, boltcutter.internals, boltcutter.checkpoint.unpickle; "
    code += "sys.exit('lightning' in sys.modules or 'torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_batch_norms_of_all_kinds_are_recognized() -> None:
    for module in (nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.LazyBatchNorm2d(), nn.SyncBatchNorm(2)):
        assert isinstance(module, internals.BatchNorm)
        assert isinstance(module, internals.NormWithStatistics)
    assert isinstance(nn.InstanceNorm2d(2), internals.NormWithStatistics)
    assert not isinstance(nn.InstanceNorm2d(2), internals.BatchNorm)


def test_a_trainer_is_found_only_where_there_is_one() -> None:
    task = L.LightningModule()
    assert internals.find_trainer(task) is None
    task.trainer = trainer = L.Trainer(logger=False, accelerator="cpu")
    assert internals.find_trainer(task) is trainer


def test_callbacks_have_the_order_of_lightning() -> None:
    callbacks: list[Any] = [ModelCheckpoint(), EarlyStopping("loss"), BatchSizeFinder(), ModelCheckpoint(monitor="x")]
    trainer: Any = L.Trainer(logger=False, accelerator="cpu", callbacks=callbacks, enable_progress_bar=False)
    assert [c for c in trainer.callbacks if c in callbacks] == sorted(callbacks, key=_order)


def test_an_attribute_is_replaced_until_an_error() -> None:
    owner = SimpleNamespace(value=1)

    def fail() -> None:
        with internals.replaced(owner, "value", 2):
            assert owner.value == 2
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        fail()
    assert owner.value == 1


def test_only_some_tensors_of_a_task_are_moved() -> None:
    task = nn.Linear(2, 2)
    kept = task.bias
    internals.move_some(task, torch.device("meta"), lambda tensor: tensor.ndim == 2)
    assert task.weight.is_meta
    assert task.bias is kept
    assert not kept.is_meta
    assert vars(task)["_device"] == torch.device("meta")
