"""Compilation by XLA: torchax converts the model to a JAX function, whose forward and backward passes are jitted."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.utils.dlpack
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from boltcutter.internals import replaced
from boltcutter.task.errors import CompilerError
from boltcutter.topology import PlannedTraining

REMEDY = "try task.compile=true"


class XLA:
    """Runs the forward and backward passes as two XLA programs; parameters, gradients and the loss stay torch tensors.

    Gradient clipping, gradient accumulation, the optimizer and checkpoints are therefore unaffected. Tensors are shared
    by DLPack, without a copy if they are on the same device. Programs are recompiled for other shapes or dtypes of the
    inputs, and if parameters are frozen or unfrozen.

    Raises:
        CompilerError: torchax is not installed.

    Source: Frostig, Johnson and Leary, Compiling machine learning programs via high-level tracing, 2018.
    """

    def __init__(self, model: nn.Module) -> None:
        for text in self.missing():
            raise CompilerError(text)
        self.model = model
        self._traces: list[str] = []  # a description of the inputs for each compilation
        self._programs: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    @staticmethod
    def missing() -> Iterator[str]:
        """What this machine lacks."""
        if not (find_spec("jax") and find_spec("torchax")):
            yield (
                "task.compile=xla: torchax and jax are not installed; pip install 'boltcutter[xla]' "
                f"(Python 3.11 or later), or {REMEDY}"
            )

    @staticmethod
    def refusals(planned: PlannedTraining) -> Iterator[str]:
        """Strategies that shard the model, and autocast."""
        strategy, precision = planned.strategy, planned.precision
        is_sharded = isinstance(strategy, ModelParallelStrategy | FSDPStrategy | DeepSpeedStrategy)
        if is_sharded or str(strategy).startswith(("fsdp", "deepspeed")):
            name = strategy if isinstance(strategy, str) else type(strategy).__name__
            yield (
                f"task.compile=xla does not support {name}, which shards the model over ranks; "
                f"use trainer=ddp, or {REMEDY}"
            )
        if precision.endswith("-mixed") or precision.startswith("transformer-engine"):
            yield (
                f"task.compile=xla does not support trainer.precision={precision}, as autocast has no effect on "
                "XLA programs; try 32-true or bf16-true"
            )

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs."""
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        outputs: Tensor = _Function.apply(self, inputs, list(trainable), *trainable.values())  # type: ignore[no-untyped-call, unused-ignore]
        return outputs

    def recompile_reasons(self) -> list[str]:
        """Return the reason of each recompilation so far."""
        return [f"{new}, previously {old}" for old, new in zip(self._traces, self._traces[1:], strict=False)]

    def forward(self, inputs: Tensor, trainable: dict[str, Tensor]) -> tuple[Tensor, Any]:
        """Run the forward pass and update buffers; return outputs and the residuals for the backward pass."""
        forward, _ = self._programs = self._programs or self._compile(inputs.device)
        state = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        rest = {name: tensor for name, tensor in state.items() if name not in trainable}
        # From torch's generator, so that dropout depends on the seed and continues in a resumed run.
        key = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)
        modes = tuple(module.training for module in self.model.modules())
        with _enable_x64(trainable):
            outputs, changed, pullback = forward(
                _to_jax(trainable), _to_jax(rest), _to_jax(inputs), _to_jax(key), modes
            )
        for name, value in changed.items():
            state[name].copy_(_to_torch(value))
        return _to_torch(outputs), pullback

    def backward(self, pullback: Any, gradient: Tensor) -> dict[str, Tensor]:
        """Return gradients by parameter name, none of which share memory."""
        assert self._programs
        with _enable_x64({"": gradient}):
            arrays = self._programs[1](pullback, _to_jax(gradient))
        used, gradients = {gradient.data_ptr()}, dict[str, Tensor]()
        for name, array in arrays.items():
            tensor = _to_torch(array)
            # XLA may share memory between equal gradients, which clipping in place would then scale twice.
            gradients[name] = tensor.clone() if tensor.data_ptr() in used else tensor
            used.add(tensor.data_ptr())
        return gradients

    def _compile(self, device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
        _import_jax(device)
        import jax
        import torchax
        from torchax import interop

        environment = torchax.default_env()

        def run(trainable: Any, rest: Any, inputs: Any, key: Any) -> tuple[Any, Any]:
            self._traces.append(f"inputs {tuple(inputs.shape)} of {inputs.dtype}")
            state = interop.torch_view({**trainable, **rest})
            key = jax.lax.bitcast_convert_type(key, "uint32")
            with environment, environment.override_property(prng=key), _as_compiler_error(self.model):
                outputs = torch.func.functional_call(self.model, state, (interop.torch_view(inputs),))
            buffers = interop.jax_view({name: state[name] for name in rest})
            return interop.jax_view(outputs), {name: new for name, new in buffers.items() if new is not rest[name]}

        def forward(trainable: Any, rest: Any, inputs: Any, key: Any, modes: Any) -> tuple[Any, Any, Any]:
            outputs, pullback, changed = jax.vjp(lambda it: run(it, rest, inputs, key), trainable, has_aux=True)
            return outputs, changed, pullback

        def backward(pullback: Any, gradient: Any) -> Any:
            return pullback(gradient)[0]

        return jax.jit(forward, static_argnums=4), jax.jit(backward)

    def __reduce__(self) -> tuple[Any, ...]:
        return XLA, (self.model,)  # a copy compiles its own programs


def batch_norm(
    inputs: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Replace torchax's ``torch.nn.functional.batch_norm``, which does not update running statistics."""
    axes = [0, *range(2, inputs.ndim)]
    shape = [1, -1] + [1] * (inputs.ndim - 2)
    if training or mean is None or variance is None:
        batch_mean, batch_variance = inputs.mean(axes), inputs.var(axes, correction=0)  # (C,)
        if mean is not None and variance is not None:
            count = inputs.numel() // inputs.shape[1]
            mean.mul_(1 - momentum).add_(momentum * batch_mean)
            variance.mul_(1 - momentum).add_(momentum * count / (count - 1) * batch_variance)
    else:
        batch_mean, batch_variance = mean, variance
    outputs = (inputs - batch_mean.view(shape)) * (batch_variance.view(shape) + eps).rsqrt()
    if weight is not None:
        outputs = outputs * weight.view(shape)
    return outputs if bias is None else outputs + bias.view(shape)


class _Function(torch.autograd.Function):
    """Records the two programs in torch's autograd graph."""

    @staticmethod
    def forward(ctx: Any, compiler: XLA, inputs: Tensor, names: Sequence[str], *parameters: Tensor) -> Tensor:
        outputs, ctx.pullback = compiler.forward(inputs, dict(zip(names, parameters, strict=True)))
        ctx.compiler, ctx.names = compiler, names
        ctx.save_for_backward(*parameters)  # detects in-place changes before the backward pass
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors is not None
        gradients = ctx.compiler.backward(ctx.pullback, gradient)
        return None, None, None, *(gradients[name] for name in ctx.names)


@contextmanager
def _as_compiler_error(model: nn.Module) -> Iterator[None]:
    """Convert exceptions of torchax and JAX."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)  # int64 becomes int32
            yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:160].rstrip(".")
        raise CompilerError(
            f"task.compile=xla: {type(model).__name__} cannot be traced ({type(error).__name__}: {reason}); {REMEDY}"
        ) from error


@contextmanager
def _enable_x64(tensors: dict[str, Tensor]) -> Iterator[None]:
    """Enable 64-bit types in JAX if a tensor is float64."""
    import jax

    with jax.enable_x64(any(tensor.dtype == torch.float64 for tensor in tensors.values())):
        yield


def _to_jax(tensors: Any) -> Any:
    """Convert torch tensors to JAX arrays, without a copy if possible."""
    import jax

    if isinstance(tensors, dict):
        return {name: _to_jax(tensor) for name, tensor in tensors.items()}
    return jax.dlpack.from_dlpack(tensors.detach().contiguous())


def _to_torch(array: Any) -> Tensor:
    """Convert a JAX array to a torch tensor, after its computation."""
    tensor: Tensor = torch.utils.dlpack.from_dlpack(array.block_until_ready())
    return tensor


def _import_jax(device: torch.device) -> None:
    """Import JAX and torchax, without their side effects on torch."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave GPU memory to torch
    import jax

    try:
        jax.devices(device.type)
    except RuntimeError as error:
        raise CompilerError(
            f"task.compile=xla: JAX has no {device.type} device; set trainer.accelerator=cpu, or {REMEDY}"
        ) from error
    # Data loader workers are forked from this process, but do not use JAX.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    with (
        # torchax would register a torch device, which torch.compile and DDP would take for an accelerator.
        replaced(torch.utils, "rename_privateuse1_backend", lambda *_: None),
        replaced(torch, "_register_device_module", lambda *_: None),
        replaced(OpOverloadPacket, "__getattr__", _overload_or_placeholder),
    ):
        import torchax

        environment = torchax.default_env()  # registers the operations
    environment.override_op_definition(F.batch_norm, batch_norm)
    environment._should_use_torchax_tensor = lambda device: True  # also trace tensors that are created in the program
    for cls in (torchax.tensor.Tensor, torchax.view.View):
        cls.device = property(lambda tensor: torch.device("meta"))


def _overload_or_placeholder(packet: OpOverloadPacket, name: str, original: Any = OpOverloadPacket.__getattr__) -> Any:
    """An overload; a placeholder for those with named tensors, removed in torch 2.13, which torchax needs on import."""
    try:
        return original(packet, name)
    except AttributeError:
        if name.startswith("_"):
            raise
        return f"{packet}.{name}"
