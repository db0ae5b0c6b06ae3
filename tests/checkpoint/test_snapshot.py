from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from boltcutter.checkpoint import io
from boltcutter.checkpoint.io import AtomicCheckpointIO
from boltcutter.checkpoint.snapshot import HostSnapshot


def test_a_snapshot_does_not_change_with_its_original() -> None:
    state = torch.arange(6.0)
    checkpoint = {
        "state_dict": {"w": state},
        "callbacks": {"c": {"list": [1], "queue": deque([state])}},
        "n": (1, state),
    }
    snapshot = HostSnapshot().copy(checkpoint)
    state.fill_(-1)
    checkpoint["callbacks"]["c"]["list"].append(2)  # type: ignore[call-overload, index]
    for found in (snapshot["state_dict"]["w"], snapshot["callbacks"]["c"]["queue"][0], snapshot["n"][1]):
        assert found.tolist() == [0, 1, 2, 3, 4, 5]
    assert snapshot["callbacks"]["c"]["list"] == [1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t()[1:],
        torch.tensor(3),
        torch.empty(0, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_tensors_of_all_kinds_are_copied(tensor: torch.Tensor) -> None:
    found = HostSnapshot().copy({"a": tensor})["a"]
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(found.to_dense(), tensor.to_dense())
    assert not tensor.numel() or found.data_ptr() != tensor.data_ptr() if found.layout is torch.strided else True


def test_memory_is_reused_and_shared_as_in_the_original() -> None:
    weight, other = torch.ones(1000), torch.zeros(1000)
    snapshot, checkpoint = HostSnapshot(), {"w": weight, "tied": weight, "rows": weight[10:], "other": other}
    first = snapshot.copy(checkpoint)
    places = {tensor.untyped_storage().data_ptr() for tensor in first.values()}
    assert len(places) == 2
    weight.fill_(2)
    second = snapshot.copy(checkpoint)
    assert {tensor.untyped_storage().data_ptr() for tensor in second.values()} == places
    assert {name: float(tensor[0]) for name, tensor in second.items()} == {"w": 2, "tied": 2, "rows": 2, "other": 0}


def test_training_waits_only_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    threads: list[threading.Thread] = []
    save = torch.save

    def record(*args: Any) -> None:
        threads.append(threading.current_thread())
        save(*args)

    monkeypatch.setattr(io.torch, "save", record)
    for asynchronous in (True, False):
        store = AtomicCheckpointIO(asynchronous=asynchronous)
        for place in (tmp_path / "last.ckpt", "memory://snapshot/last.ckpt"):
            store.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, place)
            assert store.load_checkpoint(place)["state_dict"]["w"].tolist() == [1, 1, 1]
        store.teardown()
    assert [thread is threading.main_thread() for thread in threads] == [False, False, True, True]
