"""Whole training steps as CUDA graphs: forward and backward pass, clipping and optimizer, captured and replayed."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torchmetrics import Metric

from boltcutter.internals import is_accumulating
from boltcutter.protocols import FollowsReplay
from boltcutter.structure import children, map_tensors, tensors
from boltcutter.task.compiler import CUDA_GRAPH

WARM_UP = 3  # optimizer steps before a capture; the last one is examined
MAX_CAPTURES = 3  # a step that changes more often is not captured again
MAX_OTHER_SHAPES = 50  # batches in a row, after which their shape is captured
HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
LOSS = "train/loss"  # what the base class of tasks logs within a step
BASE = "boltcutter.task.base"
Kind = tuple[bool, bool]  # whether a batch is the first one of its step, and whether it is the last one


class CaptureError(Exception):
    """Something in the step would not be repeated by a replay."""


class CudaGraphs:
    """What is done by CUDA; tests replace it by an emulation on the CPU.

    Args:
        device: A CUDA device.
    """

    rate_dtype = torch.float32  # in which fused kernels read the learning rate from memory

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()  # graphs of one training are never replayed at the same time

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Compute in the stream of captures: workspaces of libraries and nodes of autograd belong to a stream."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    @contextmanager
    def find_waits(self, found: list[str]) -> Iterator[None]:
        """Add the places where the host waits for the device, at which a capture would fail."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for each in caught:
            if "synchronizing CUDA operation" in str(each.message):
                found.append(f"{Path(each.filename).name}:{each.lineno}")
            elif "Synchronization debug mode" not in str(each.message):  # torch says that it may miss some
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """Record what a step computes, without computing it.

        Returns:
            The graph, with a method ``replay``, and what the step returned: tensors that each replay overwrites.
        """
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        state, graph = generator.get_state(), torch.cuda.CUDAGraph()
        gc.collect()  # an older graph must not be freed meanwhile
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        with self.side_stream():
            try:
                # Another thread may copy the next batches meanwhile.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    output = step()
                except BaseException:
                    with suppress(RuntimeError):  # it fails, too, for the same reason
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                with suppress(RuntimeError):  # the generator would still count as one that is captured
                    generator.graphsafe_set_state(torch.Generator(self.device).graphsafe_get_state())
                    generator.set_state(state)
                raise
        return graph, output


class Captured(NamedTuple):
    """A graph, and the memory that it writes."""

    graph: Any
    output: Any  # of Lightning's loop: the loss
    loss: Tensor | None  # before Lightning divides it by the number of accumulated batches
    calls: list[tuple[Callable[..., Any], Any, Any]]  # updates of metrics, with their arguments
    gradients: list[tuple[Tensor, Tensor | None]]  # of each parameter


class CapturedSteps:
    """Stands for Lightning's automatic optimization: captures its steps, and replays them for further batches.

    Python runs only in a capture, so whatever a step does besides computing is found there, and done after each replay:
    progress, updates of metrics, the logged loss, hooks of the optimizer, and what callbacks do (``FollowsReplay``).
    Steps that cannot be replayed run as ever: the first ones, batches of another shape, a last one of fewer accumulated
    batches, and those at which a callback looks. What forbids captures is reported in one line.

    Args:
        trainer: Of a single device.
        task: The task.
        graphs: Captures on the device.

    Attributes:
        reason: Why steps are not captured.
        num_replayed: Batches that were replayed.
    """

    def __init__(self, trainer: Any, task: Any, graphs: Any) -> None:
        self.trainer, self.task, self.graphs = trainer, task, graphs
        self.loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self.reason: str | None = None
        self.num_replayed = 0
        self._optimizer: Any = None
        self._rates: list[Tensor] = []  # the learning rate of each group, as a graph reads it
        self._values: list[Any] = []
        self._captures = 0
        vars(self.loop)["run"] = self.run

    def _begin(self, optimizer: Any) -> None:
        """Find what forbids captures before the first step, or capture anew."""
        self._optimizer, self._steps, self._is_examined = optimizer, 0, False
        self._captured: dict[Kind, Captured] = {}
        self._inputs: Any = None  # the batch that graphs read
        self._shape: Any = None
        self._constants: dict[str, Any] = {}
        self._is_static = False  # whether the gradients of this step were begun by a graph
        self._others = 0  # batches of another shape in a row
        self._looking = [callback for callback in self.trainer.callbacks if hasattr(callback, "is_looking")]
        self._callbacks = [callback for callback in self.trainer.callbacks if isinstance(callback, FollowsReplay)]
        if reason := next(self._find_reasons(optimizer), None):
            del vars(self.loop)["run"]
            self._forbid(reason)

    def _begin_again(self, optimizer: Any, what: str) -> None:
        self._begin(optimizer)
        self._captures += 1
        if self.reason is None and self._captures == MAX_CAPTURES:
            self._forbid(f"{what} changes again and again")

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> Any:
        """Run a batch."""
        if optimizer is not self._optimizer:
            self._begin(optimizer)
            if self.reason is not None:
                return self.loop.run(optimizer, batch_idx, kwargs)
        count, batch = self.trainer.accumulate_grad_batches, kwargs.get("batch")
        kind = is_first, steps = not batch_idx % count, not is_accumulating(self.trainer)
        self._set_rates(optimizer)
        if self.reason is not None:
            return self._run_eager(optimizer, batch_idx, kwargs, steps)
        is_other = self._shape is not None and _shape_of(batch) != self._shape
        self._others = self._others + 1 if is_other else 0
        if self._captured and (constants := self._read_constants(optimizer)) != self._constants:
            self._begin_again(optimizer, _difference(self._constants, constants))
        elif self._others == MAX_OTHER_SHAPES:
            self._begin_again(optimizer, "the shape of batches")
        if is_other and not self._captured:  # a short batch was examined, or this is one
            self._is_examined = is_other = False
        is_partial = steps and self.trainer.fit_loop.epoch_loop.batch_progress.current.ready % count
        is_eager = self.reason is not None or is_other or is_partial or any(each.is_looking for each in self._looking)
        if is_eager or (self._is_examined and not is_first and not self._is_static):
            self._is_static = False
            return self._run_eager(optimizer, batch_idx, kwargs, steps)
        if not self._is_examined:
            run = self._run_eager if self._steps < WARM_UP - 1 else self._examine
            return run(optimizer, batch_idx, kwargs, steps)
        if kind not in self._captured and not self._capture(kind, optimizer, batch_idx, kwargs):
            return self._run_eager(optimizer, batch_idx, kwargs, steps)
        self._is_static = True
        return self._replay(kind, optimizer, batch)

    # Steps that are not replayed

    def _find_reasons(self, optimizer: Any) -> Iterator[str]:
        """What forbids captures, and is known before the first step."""
        name, groups = type(optimizer).__name__, getattr(optimizer, "param_groups", [])
        if not groups or not all(group.get("fused") or group.get("capturable") for group in groups):
            yield f"{name} is neither fused nor capturable, so the host takes part in its step; see optimizer.fused"
        elif optimizer._optimizer_step_pre_hooks:
            yield f"{name} has hooks before its step"
        others = [(callback, Callback) for callback in self.trainer.callbacks if callback not in self._callbacks]
        for owner, base in (*others, (self.task, L.LightningModule)):
            for hook in HOOKS if base is Callback else (*HOOKS, "optimizer_step"):
                own = vars(owner).get(hook, getattr(type(owner), hook, None))
                if callable(own) and own is not getattr(base, hook):
                    yield f"{type(owner).__name__}.{hook} is called within each step"
        for callback in self._callbacks:
            if reason := callback.refuses_capture(optimizer):
                yield reason

    def _forbid(self, reason: str) -> None:
        self.reason = reason
        self._captured.clear()
        rank_zero_warn(f"task.compile={CUDA_GRAPH}: {reason}; steps run without CUDA graphs, as by false")

    def _run_eager(self, optimizer: Any, batch_idx: int, kwargs: Any, steps: bool) -> Any:
        """Run a batch as ever, with the learning rate in memory as in a graph, so that steps round alike."""
        with self.graphs.side_stream(), self._rates_in_memory(optimizer):
            output = type(self.loop).run(self.loop, optimizer, batch_idx, kwargs)
        self._steps += steps
        return output

    def _examine(self, optimizer: Any, batch_idx: int, kwargs: Any, steps: bool) -> Any:
        """Run a batch as ever, and find what a replay would not repeat."""
        before, found = self._read_state(optimizer), list[str]()
        with self.graphs.find_waits(found), self._observed(found):
            output = self._run_eager(optimizer, batch_idx, kwargs, steps)
        self._is_examined, self._shape = steps, _shape_of(kwargs["batch"])
        if found:
            self._forbid(f"the step logs, or waits for the device, at {found[0]}")
        elif changed := _difference(before, self._read_state(optimizer)):
            self._forbid(f"{changed} changes in each step, which a replay would not repeat")
        return output

    def _read_state(self, optimizer: Any) -> dict[str, Any]:
        """What a step may change in Python: numbers and references of modules and optimizer, generators of the host."""
        found: dict[str, Any] = {"the state of Python's generator": random.getstate()}
        found["the state of NumPy's generator"] = repr(np.random.get_state())
        if self.graphs.device.type != "cpu":
            found["the state of the CPU's generator"] = torch.get_rng_state().numpy().tobytes()
        for path, module in self.task.named_modules():
            values = {} if isinstance(module, Metric) else vars(module) | dict(module.named_buffers(recurse=False))
            for name in values.keys() - {"_current_fx_name", "gradient_norm"}:
                if values[name] is None or isinstance(values[name], bool | int | float | str | Tensor):
                    found[f"{type(module).__name__}.{path and path + '.'}{name}"] = values[name]
        for index, values in enumerate(optimizer.state.values()):
            found |= {f"{type(optimizer).__name__}.state[{index}][{name}]": value for name, value in values.items()}
        return found

    def _read_constants(self, optimizer: Any) -> dict[str, Any]:
        """What a graph does not read anew."""
        found: dict[str, Any] = {}
        for index, group in enumerate(optimizer.param_groups):
            found[f"what group {index} trains"] = [*map(id, group["params"])]
            found |= {f"optimizer.{k} ({index})": v for k, v in group.items() if k not in ("params", "lr")}
        found["memory of weights"] = [*map(Tensor.data_ptr, self._weights)]
        found["requires_grad"] = [weight.requires_grad for weight in self._weights]
        found["mode of layers"] = [module.training for module in self._modules]
        for name in ("gradient_clip_val", "accumulate_grad_batches"):
            found[f"trainer.{name}"] = getattr(self.trainer, name)
        return found

    # The learning rate

    def _set_rates(self, optimizer: Any) -> None:
        """Write learning rates that have changed to the memory from which graphs read them."""
        groups = optimizer.param_groups
        if len(self._rates) != len(groups):
            options: Any = {"dtype": self.graphs.rate_dtype, "device": self.graphs.device}
            self._rates, self._values = [torch.zeros((), **options) for _ in groups], [0.0] * len(groups)
        for index, group in enumerate(groups):
            if isinstance(value := group["lr"], Tensor):
                self._rates[index].copy_(value)
            elif value != self._values[index]:
                self._rates[index].fill_(value)
                self._values[index] = value

    @contextmanager
    def _rates_in_memory(self, optimizer: Any) -> Iterator[None]:
        """Let an optimizer read its learning rates from memory; its other hooks and schedulers see the numbers."""
        kept = [group["lr"] for group in optimizer.param_groups]

        def restore(*_: Any) -> None:
            for group, rate, value in zip(optimizer.param_groups, self._rates, kept, strict=False):
                if group["lr"] is rate:
                    group["lr"] = value

        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        handle = optimizer.register_step_post_hook(restore)
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
        try:
            yield
        finally:
            restore()
            handle.remove()

    # Captures

    def _capture(self, kind: Kind, optimizer: Any, batch_idx: int, kwargs: Any) -> bool:
        """Capture a step of this kind, and restore what Lightning has counted meanwhile.

        Returns:
            Whether it was captured; if not, captures are now forbidden.
        """
        if not self._captured:
            self._inputs = map_tensors(kwargs["batch"], torch.clone)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        progress, logs = self.loop.optim_progress.state_dict(), dict(self.task._step_logs)
        calls, losses, found = list[Any](), list[Tensor](), list[str]()
        error = None
        with self._observed(found, calls, losses), self._capturable(optimizer):
            try:
                run = partial(type(self.loop).run, self.loop, optimizer, batch_idx, kwargs | {"batch": self._inputs})
                graph, output = self.graphs.capture(run)
                if found:
                    raise CaptureError(f"the step logs, or computes a metric, at {found[0]}")
            except Exception as raised:
                error = raised
        self.loop.optim_progress.load_state_dict(progress)
        self.task._step_logs = logs
        vars(optimizer).pop("found_inf", None)  # of the guard, which belongs to the graph
        if error is not None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            text = str(error).strip().partition("\n")[0][:200]
            self._forbid(text if isinstance(error, CaptureError) else f"{type(error).__name__} in a capture: {text}")
            return False
        if not self._captured:
            self._weights = [*self.task.parameters(), *self.task.buffers()]
            self._modules = [*self.task.modules()]
            self._constants = self._read_constants(optimizer)
        loss = losses[0] if losses else None
        self._captured[kind] = Captured(graph, output, loss, calls, [(p, p.grad) for p in parameters])
        return True

    @contextmanager
    def _capturable(self, optimizer: Any) -> Iterator[None]:
        """Let nothing but the step run: hooks follow after each replay."""
        hooks = optimizer._optimizer_step_post_hooks
        kept, flags = dict(hooks), [group.get("capturable") for group in optimizer.param_groups]
        hooks.clear()
        for group, flag in zip(optimizer.param_groups, flags, strict=True):
            if flag is not None:
                group["capturable"] = True  # a fused step is, but torch refuses it without the flag
        vars(self.task)["is_capturing"] = True
        try:
            with self._rates_in_memory(optimizer):
                yield
        finally:
            del vars(self.task)["is_capturing"]
            hooks.clear()
            hooks.update(kept)
            for group, flag in zip(optimizer.param_groups, flags, strict=True):
                if flag is not None:
                    group["capturable"] = flag

    @contextmanager
    def _observed(self, found: list[str], calls: list[Any] | None = None, losses: Any = None) -> Iterator[None]:
        """Note what a step logs; in a capture also the loss, and the updates of metrics, instead of making them."""
        task, changed = self.task, list[tuple[Any, str, Any]]()

        def log(name: str, *args: Any, **options: Any) -> None:
            if name != LOSS or type(task).training_step.__module__ != BASE:
                found.append(name)
            original_log(name, *args, **options)

        def training_step(*args: Any, **options: Any) -> Any:
            output = original_step(*args, **options)
            loss = output.get("loss") if isinstance(output, dict) else output
            losses.extend([loss.detach()] if isinstance(loss, Tensor) else [])
            return output

        def replace(owner: Any, name: str, value: Any) -> None:
            changed.append((owner, name, vars(owner).get(name)))
            vars(owner)[name] = value

        def record(call: Callable[..., Any]) -> Callable[..., None]:
            return lambda *args, **options: calls.append((call, args, options))  # type: ignore[union-attr]

        original_log, original_step = task.log, task.training_step
        replace(task, "log", log)
        if calls is not None:
            replace(task, "training_step", training_step)
            replace(task, "_accumulate", record(task._accumulate))
            for name, metric in task.named_modules():
                if isinstance(metric, Metric):
                    replace(metric, "update", record(metric.update))
                    replace(metric, "forward", partial(_note, found, name))
        try:
            yield
        finally:
            for owner, name, value in reversed(changed):
                vars(owner).pop(name)
                if value is not None:
                    vars(owner)[name] = value

    # Replays

    def _replay(self, kind: Kind, optimizer: Any, batch: Any) -> Any:
        """Replay a step for a batch, then do what it would have done in Python."""
        captured, (is_first, steps), progress = self._captured[kind], kind, self.loop.optim_progress.optimizer
        if steps:
            progress.step.increment_ready()
        for static, tensor in zip(tensors(self._inputs), tensors(batch), strict=True):
            static.copy_(tensor, non_blocking=True)
        captured.graph.replay()
        self.num_replayed += 1
        if is_first:
            for increment in ("increment_ready", "increment_started", "increment_completed"):
                getattr(progress.zero_grad, increment)()
        for parameter, gradient in captured.gradients:
            if parameter.grad is not gradient:  # a step without the graph has others
                parameter.grad = gradient
        for call, args, options in captured.calls:  # with copies, as the next replay overwrites the tensors
            call(*map_tensors(args, torch.clone), **map_tensors(options, torch.clone))
        every = self.trainer.log_every_n_steps
        if captured.loss is not None and every and (self.task.global_step + 1) % every == 0:
            self.task._step_logs[LOSS] = captured.loss.clone()
        if steps:
            for callback in self._callbacks:
                callback.after_replay(self.trainer, self.task, optimizer)
            for hook in tuple(optimizer._optimizer_step_post_hooks.values()):
                hook(optimizer, (), {})
            progress.step.increment_completed()
        return map_tensors(captured.output, torch.clone)


def _note(found: list[str], name: str, *_: Any, **__: Any) -> None:
    found.append(name)


def _shape_of(batch: Any) -> Any:
    """What must be equal in batches for which a step is replayed."""
    if isinstance(batch, Tensor) and not batch.is_nested:
        return batch.shape, batch.stride(), batch.dtype
    if batch is None or isinstance(batch, bool | int | float | str):
        return batch
    parts = None if isinstance(batch, Tensor | PackedSequence) else children(batch)
    if parts is None:
        return object()  # is equal to nothing
    return [type(batch), [*batch] if isinstance(batch, Mapping) else None, *map(_shape_of, parts)]


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Name of a value that differs; tensors do if they are other ones."""
    for name in [*before, *(after.keys() - before.keys())]:
        one, two = before.get(name), after.get(name)
        if one is not two and (isinstance(one, Tensor) or isinstance(two, Tensor) or one != two):
            return name
    return ""
