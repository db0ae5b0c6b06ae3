from types import SimpleNamespace

import pytest
import torch
from torch import nn

from boltcutter_parallel.internals import move_some, replaced


def test_an_attribute_is_replaced_until_an_error() -> None:
    owner = SimpleNamespace(value=1)

    def fail() -> None:
        with replaced(owner, "value", 2):
            assert owner.value == 2
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        fail()
    assert owner.value == 1


def test_only_some_tensors_of_a_task_are_moved() -> None:
    task = nn.Linear(2, 2)
    kept = task.bias
    move_some(task, torch.device("meta"), lambda tensor: tensor.ndim == 2)
    assert task.weight.is_meta
    assert task.bias is kept
    assert not kept.is_meta
    assert vars(task)["_device"] == torch.device("meta")
