"""CUDA graphs that are not there: on the CPU, a capture records operations, and a replay computes them again.

As on a GPU, a capture computes nothing that lasts: memory that was there before has its values again, what was
allocated has none until the first replay, and generators draw as if nothing had been drawn. A replay runs no Python of
the step; it reads and writes the same memory, and random operations draw again. What would wait for the device fails in
a capture.
"""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from boltcutter.data.digits import Digits
from boltcutter.data.module import Splits
from boltcutter.model.mlp import MLP
from boltcutter.task.classification import Classification

aten = torch.ops.aten
ERROR = "CUDA error: operation not permitted when stream is capturing"
WAITING = {
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount, aten.is_nonzero),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave),
}
TO_HOST = {Tensor.cpu, Tensor.tolist, Tensor.numpy, Tensor.__array__}  # which need no operation on the CPU
GARBAGE = 0x7F  # of each byte of memory without values: a float32 of 3e38


def memory(tensor: Tensor) -> Tensor:
    """The values of a tensor, also of one of ``fake_gpu``."""
    return getattr(tensor, "host", tensor)


class HostAccess(TorchFunctionMode):
    """Refuses to copy to the host, which is no operation where tensors are there already."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The device itself is torch.device("cpu"), the host "cpu".
        if func in TO_HOST or (func is Tensor.to and any(type(a) is str for a in [*args[1:], *kwargs.values()])):
            raise RuntimeError(ERROR)
        return func(*args, **kwargs)


class Graph(TorchDispatchMode):
    """Has the methods of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.num_replays = 0
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # what was there before
        self._own: dict[int, torch.UntypedStorage] = {}
        self._host = HostAccess()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        self._generator = torch.get_rng_state()
        self._host.__enter__()
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        self._host.__exit__(None, None, None)
        for storage, values in self._saved.values():
            storage.copy_(values)
        for storage in self._own.values():
            if storage.nbytes():
                torch.tensor([], dtype=torch.uint8).set_(storage).fill_(GARBAGE)
        self._saved.clear()
        torch.set_rng_state(self._generator)

    def replay(self) -> None:
        self.num_replays += 1
        with torch.no_grad():
            for function, args, kwargs, outputs in self.calls:
                found = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for new, old in zip(found, outputs, strict=True):
                    if memory(new).data_ptr() != memory(old).data_ptr():
                        assert new.shape == old.shape
                        old.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in WAITING:
            raise RuntimeError(ERROR)
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                storage = memory(leaf).untyped_storage()
                if storage._cdata not in self._own and storage._cdata not in self._saved:
                    self._saved[storage._cdata] = storage, storage.clone()
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for output in outputs:
            storage = memory(output).untyped_storage()
            if storage._cdata not in self._saved:
                self._own[storage._cdata] = storage
        if not func.is_view:
            self.calls.append((func, args, kwargs, [output.detach() for output in outputs]))
        return result


class EmulatedGraphs:
    """Stands for ``boltcutter.task.cuda_graph.CudaGraphs``.

    Attributes:
        made: The graphs of all trainings, also those whose capture failed.
    """

    rate_dtype = torch.float64  # in which fused kernels of the CPU compute with a learning rate
    made: ClassVar[list[Graph]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def side_stream(self) -> Any:
        return nullcontext()

    @contextmanager
    def find_waits(self, found: list[str]) -> Iterator[None]:
        yield

    def capture(self, step: Callable[[], Any]) -> tuple[Graph, Any]:
        graph = Graph()
        self.made.append(graph)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            output = step()
        finally:
            graph.capture_end()
        return graph, output


class AllDigits(Digits):
    """Digits with a last short batch in each epoch of training."""

    def loader(self, split: Any, *, shuffle: bool = False, drop_last: bool = False) -> Any:
        return super().loader(split, shuffle=shuffle)


class MarkedDigits(AllDigits):
    """Digits of which one, in the train split, has a white pixel where all others are black."""

    def load(self) -> Splits:
        splits = super().load()
        splits.train.inputs[7, 0, 0, 0] = 255
        return splits


class OddDigits(AllDigits):
    """Digits of which some batches are half as large, at any place in a step."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        is_odd = bool(batch[1][0] < 2) and self.trainer is not None and self.trainer.training
        return [part[:30] for part in batch] if is_odd else batch


class AnySize(AllDigits):
    """Digits in batches of different sizes."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part[int(batch[1][0]) :] for part in batch]


class Poisoned(MLP):
    """Its outputs are NaN where a batch has a marked image."""

    def forward(self, inputs: Tensor) -> Tensor:
        is_marked = (inputs[:, 0, 0, 0] == 255).any()
        return super().forward(inputs) * torch.where(is_marked, math.nan, 1.0)


class Waits(MLP):
    """Its host waits for the device in each step."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs if self.training and outputs.sum().item() == math.pi else outputs * 1.0


class DrawsInPython(MLP):
    """Skips its last layer at random, decided by Python."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (0.5 if self.training and random.random() < 0.5 else 1.0)


class Counts(MLP):
    """Scales its outputs by the number of steps."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs) / (1 + self.calls / 10)


class ReplacesBuffer(MLP):
    """Keeps a running mean of its outputs in a new tensor each time."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, **mlp: Any) -> None:
        super().__init__(input_shape, num_classes, **mlp)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean()
        return outputs + self.mean


class LogsInStep(Classification):
    """Logs in each step."""

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.log("train/spread", outputs.detach().std())
        return super().mean_loss(outputs, targets)


class ChangesRate(Classification):
    """Sets the learning rate before the step, as recipes for a warm-up do."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class ReadsGradients(L.Callback):
    """Reads gradients in each step."""

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None: ...


class FreezesLater(L.Callback):
    """Freezes a layer after the first epoch."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        first = next(pl_module.model.parameters())
        first.requires_grad = trainer.current_epoch != 1


class StopsOnce(L.Callback):
    """Sends SIGTERM to the training at a step, unless it was resumed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.is_resumed = trainer.global_step > 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.is_resumed:
            os.kill(os.getpid(), signal.SIGTERM)


class KeepsWeights(L.Callback):
    """Keeps the weights of the end, also of a training that fails, and what stands for the loop."""

    weights: ClassVar[dict[str, Tensor]] = {}
    steps: ClassVar[Any] = None

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        run = vars(trainer.fit_loop.epoch_loop.automatic_optimization).get("run")
        type(self).steps = getattr(run, "__self__", None)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        type(self).weights = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
