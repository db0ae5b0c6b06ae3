"""A GPU that is not there: its tensors are computed on the CPU, and what would wait for it is recorded."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda:0")
aten = torch.ops.aten
# Operations whose results, or the sizes of these, the host has to wait for.
WAITING = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.bincount, aten._unique2}
PLACE = ("/boltcutter/", "/lightning/", "/torchmetrics/")


class DeviceTensor(Tensor):
    """A tensor that says that it is on a GPU; ``host`` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device("meta"),
        )  # a build without CUDA has no automatic differentiation for tensors of that device
        made.host = host
        return made

    is_cuda, is_meta, is_cpu = True, False, False
    device = property(lambda _: DEVICE)

    def tolist(self) -> Any:
        gpu().wait("tolist")
        return self.host.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


@dataclass
class Stream:
    """A queue of the device, by name."""

    name: str
    log: list[Any] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        self.log.append((self.name, "waits for", event.stream))

    def wait_stream(self, stream: Stream) -> None:
        self.log.append((self.name, "waits for", stream.name))

    def query(self) -> bool:
        return True


class Event:
    """Recorded in a stream; the host waits for it by ``synchronize``."""

    def __init__(self, **_: Any) -> None:
        self.stream, self.step = "", -1

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self.step = (stream or gpu().current).name, gpu().step

    def synchronize(self) -> None:
        if self.step == gpu().step:  # what was queued in an earlier step is done by now
            gpu().wait("Event.synchronize")

    def query(self) -> bool:
        return self.step < gpu().step


class FakeGPU(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, tensors of ``cuda:0`` can be made.

    Attributes:
        waits: The step, and where it was, of each time that the host waited for the device.
        log: What was done in which stream: copies, kernels, and for what they wait.
        step: Set by a callback.
    """

    active: FakeGPU | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[tuple[int, str]] = []
        self.log: list[Any] = []
        self.step = 0
        self.default = Stream("default", self.log)
        self._of_thread = threading.local()

    @property
    def current(self) -> Stream:
        return getattr(self._of_thread, "stream", self.default)

    def wait(self, what: str) -> None:
        frames = ((f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(None))
        own = [f"{Path(file).name}:{line} {name}" for file, line, name in frames if any(p in file for p in PLACE)]
        self.waits.append((self.step, f"{what} at {' < '.join(own[:4])}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.stream = self.current, stream
        try:
            with self if threading.current_thread() is not threading.main_thread() else nullcontext():
                yield
        finally:
            self._of_thread.stream = before


def gpu() -> FakeGPU:
    assert FakeGPU.active is not None
    return FakeGPU.active


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU; its results are on the device if an argument is, or if it is asked for that."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor)]
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    packet = func.overloadpacket
    if inputs and packet in WAITING:
        gpu().wait(packet.__name__)
    to_host = inputs and target is not None and target.type == "cpu"
    if packet is aten.copy_ and isinstance(args[0], Tensor) and not isinstance(args[0], DeviceTensor) and inputs:
        to_host = True
    non_blocking = kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2])
    if to_host and not non_blocking:
        gpu().wait("copy to the host")
    from_host = packet is aten._to_copy and not inputs and target is not None and target.type == "cuda"
    if from_host or inputs:
        gpu().log.append((gpu().current.name, "copy" if from_host else str(packet.__name__)))
    args, kwargs = tree_map_only(DeviceTensor, lambda t: t.host, (args, kwargs))
    if target is not None and target.type == "cuda":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if (
        packet is aten._to_copy
        and inputs
        and not to_host
        and not func.is_view
        and kwargs.keys() <= {"device", "non_blocking"}
    ):
        return inputs[0]  # it is there already
    results = func(*args, **kwargs)
    if from_host and not func.is_view and any(results is arg for arg in args):
        results = results.clone()
    on_device = target.type == "cuda" if target is not None else bool(inputs) and not to_host
    if not on_device:
        return results
    hosts = {id(t.host): t for t in inputs}
    return tree_map_only(Tensor, lambda t: hosts[id(t)] if id(t) in hosts else DeviceTensor(t), results)


class FakeStrategy(SingleDeviceStrategy):
    """Trains on the device."""

    def __init__(self) -> None:
        super().__init__(device=DEVICE)


class CountSteps(L.Callback):
    """Says at which step the device is."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        gpu().step = trainer.global_step

    def on_validation_start(self, *_: Any) -> None:
        gpu().step = -1

    def on_train_epoch_end(self, *_: Any) -> None:
        gpu().step = -1


@contextmanager
def fake_gpu(patch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    """Let torch and Lightning find the device."""
    mode = FakeGPU.active = FakeGPU()
    for name, value in {
        "_lazy_init": lambda: None,
        "Event": Event,
        "Stream": lambda *_, **__: Stream("copies", mode.log),
        "current_stream": lambda *_: mode.current,
        "stream": mode.stream,
        "max_memory_allocated": lambda *_: 0,
        "get_device_name": lambda *_: "fake",
        "manual_seed": lambda *_: None,
        "set_device": lambda *_: None,
        "empty_cache": lambda: None,
        "is_initialized": lambda: True,
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(
        DeviceTensor, "record_stream", lambda self, stream: mode.log.append(("recorded", stream.name)), raising=False
    )
    patch.setattr(Tensor, "pin_memory", lambda self, *_: self)
    make = torch.tensor  # the one function that no mode sees
    patch.setattr(torch, "tensor", lambda *a, device=None, **o: make(*a, **o).to(device or "cpu"))
    patch.setattr(CPUAccelerator, "setup_device", lambda *_: None)
    try:
        with mode:
            yield mode
    finally:
        FakeGPU.active = None
