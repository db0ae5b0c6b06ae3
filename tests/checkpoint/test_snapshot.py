from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from boltcutter.checkpoint import checkpoint_io as io
from boltcutter.checkpoint import snapshot
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.snapshot import HostSnapshot


def test_a_snapshot_does_not_change_with_its_original() -> None:
    state = torch.arange(6.0)
    checkpoint = {
        "state_dict": {"w": state},
        "callbacks": {"c": {"list": [1], "queue": deque([state])}},
        "n": (1, state),
    }
    copied = HostSnapshot().copy(checkpoint)
    state.fill_(-1)
    checkpoint["callbacks"]["c"]["list"].append(2)  # type: ignore[call-overload, index]
    for found in (copied["state_dict"]["w"], copied["callbacks"]["c"]["queue"][0], copied["n"][1]):
        assert found.tolist() == [0, 1, 2, 3, 4, 5]
    assert copied["callbacks"]["c"]["list"] == [1]


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
    host, checkpoint = HostSnapshot(), {"w": weight, "tied": weight, "rows": weight[10:], "other": other}
    first = host.copy(checkpoint)
    places = {tensor.untyped_storage().data_ptr() for tensor in first.values()}
    assert len(places) == 2
    weight.fill_(2)
    second = host.copy(checkpoint)
    assert {tensor.untyped_storage().data_ptr() for tensor in second.values()} == places
    assert {name: float(tensor[0]) for name, tensor in second.items()} == {"w": 2, "tied": 2, "rows": 2, "other": 0}


def test_memory_of_a_gpu_is_copied_to_pinned_memory_and_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    allocate, copy = snapshot._allocate, torch.UntypedStorage.copy_

    def allocated(size: int, *, pinned: bool) -> torch.UntypedStorage:
        calls.append(("allocate", pinned))
        return allocate(size, pinned=False)

    def copied(storage: Any, source: Any, non_blocking: bool = False) -> Any:
        calls.append(("copy", non_blocking))
        return copy(storage, source)

    stream = SimpleNamespace(synchronize=lambda: calls.append(("wait", None)))
    monkeypatch.setattr(snapshot, "_allocate", allocated)
    monkeypatch.setattr(torch.UntypedStorage, "copy_", copied)
    monkeypatch.setattr(torch.UntypedStorage, "device", torch.device("cuda", 0), raising=False)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: stream)
    found = HostSnapshot().copy({"a": torch.ones(3), "b": torch.zeros(2)})
    assert calls == [("allocate", True), ("copy", True)] * 2 + [("wait", None)]
    assert found["a"].tolist() == [1, 1, 1]


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
