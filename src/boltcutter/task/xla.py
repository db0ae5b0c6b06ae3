"""Training through XLA: torchax turns the model into a JAX function, whose passes run as machine code of their own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.utils.dlpack
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from boltcutter.task.compiler import NoCompiler

ELSEWHERE = "take task.compile=true, torch's own compiler"


class XLA:
    """Runs forward and backward pass as two XLA programs; loss, gradients and weights remain torch's.

    So clipping, accumulation, the optimizer and checkpoints are what they are without it. Tensors are handed over
    without a copy where both have them in the same memory. Programs are made anew for inputs of another shape or type,
    and where parts of the model begin or cease to be trained.

    Args:
        model: Takes one tensor and gives one.
        strategy: Of the trainer.

    Raises:
        NoCompiler: torchax is not installed, or the strategy cuts the model.

    Source: Frostig, Johnson and Leary, Compiling machine learning programs via high-level tracing, 2018.
    """

    def __init__(self, model: nn.Module, strategy: Any) -> None:
        if not (find_spec("jax") and find_spec("torchax")):
            raise NoCompiler(
                "task.compile=xla: torchax and jax are not installed; pip install -e '.[xla]' (Python 3.11 or later), "
                f"or {ELSEWHERE}"
            )
        cuts = isinstance(strategy, ModelParallelStrategy | FSDPStrategy | DeepSpeedStrategy)
        if cuts or getattr(strategy, "strategy_name", "") == "pipeline":
            raise NoCompiler(
                f"task.compile=xla: {type(strategy).__name__} cuts the model over ranks, and XLA would see one part; "
                f"take trainer=ddp, or {ELSEWHERE}"
            )
        plugin = getattr(strategy, "precision_plugin", None)
        if isinstance(plugin, MixedPrecision | TransformerEnginePrecision):
            raise NoCompiler(
                f"task.compile=xla: trainer.precision={plugin.precision} mixes precisions within the model, where XLA "
                "does not see it; try 32-true or bf16-true"
            )
        self.model = model
        self._seen: list[str] = []  # what programs were made for
        self._programs: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """What the model makes of ``inputs``."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        outputs: Tensor = _Passes.apply(self, inputs, list(trained), *trained.values())  # type: ignore[no-untyped-call]
        return outputs

    def recompiled(self) -> list[str]:
        """Why programs were made anew, once for each time, so far."""
        return [f"{now}, and before {before}" for before, now in zip(self._seen, self._seen[1:], strict=False)]

    def forward(self, inputs: Tensor, trained: dict[str, Tensor]) -> tuple[Tensor, Any]:
        """Outputs, and what the backward pass takes; buffers, as statistics of BatchNorm, are brought up to date.

        Raises:
            NoCompiler: torchax has no counterpart for something that the model does.
        """
        forward, _ = self._programs = self._programs or self._compile(inputs.device)
        state = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        rest = {name: tensor for name, tensor in state.items() if name not in trained}
        # Drawn from torch's generator, so that dropout is what the seed, or a resumed run, makes it.
        key = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)
        modes = tuple(part.training for part in self.model.modules())
        with _widths(trained):
            outputs, changed, pullback = forward(_lent(trained), _lent(rest), _lent(inputs), _lent(key), modes)
        for name, value in changed.items():
            state[name].copy_(_given(value))
        return _given(outputs), pullback

    def backward(self, pullback: Any, gradient: Tensor) -> dict[str, Tensor]:
        """Gradients by the parameters' names, each in memory of its own."""
        assert self._programs
        with _widths({"": gradient}):
            found = self._programs[1](pullback, _lent(gradient))
        taken, gradients = {gradient.data_ptr()}, dict[str, Tensor]()
        for name, value in found.items():
            tensor = _given(value)
            # Equal gradients may share memory, where clipping one in place would clip it twice.
            gradients[name] = tensor.clone() if tensor.data_ptr() in taken else tensor
            taken.add(tensor.data_ptr())
        return gradients

    def _compile(self, device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
        _load(device)
        import jax
        import torchax
        from torchax import interop

        environment = torchax.default_env()

        def run(trained: Any, rest: Any, inputs: Any, key: Any) -> tuple[Any, Any]:
            self._seen.append(f"inputs {tuple(inputs.shape)} of {inputs.dtype}")
            state = interop.torch_view({**trained, **rest})
            key = jax.lax.bitcast_convert_type(key, "uint32")
            with environment, environment.override_property(prng=key), _told(self.model):
                outputs = torch.func.functional_call(self.model, state, (interop.torch_view(inputs),))
            after = interop.jax_view({name: state[name] for name in rest})
            return interop.jax_view(outputs), {name: now for name, now in after.items() if now is not rest[name]}

        def forward(trained: Any, rest: Any, inputs: Any, key: Any, modes: Any) -> tuple[Any, Any, Any]:
            outputs, pullback, changed = jax.vjp(lambda it: run(it, rest, inputs, key), trained, has_aux=True)
            return outputs, changed, pullback

        def backward(pullback: Any, gradient: Any) -> Any:
            return pullback(gradient)[0]

        return jax.jit(forward, static_argnums=4), jax.jit(backward)

    def __reduce__(self) -> tuple[Any, ...]:
        return XLA, (self.model, None)  # a copy makes programs of its own


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
    """As ``torch.nn.functional.batch_norm``; that of torchax leaves ``mean`` and ``variance`` as they were."""
    axes = [0, *range(2, inputs.ndim)]
    shape = [1, -1] + [1] * (inputs.ndim - 2)
    if training or mean is None or variance is None:
        now, spread = inputs.mean(axes), inputs.var(axes, correction=0)  # (C,)
        if mean is not None and variance is not None:
            count = inputs.numel() // inputs.shape[1]
            mean.mul_(1 - momentum).add_(momentum * now)
            variance.mul_(1 - momentum).add_(momentum * count / (count - 1) * spread)
    else:
        now, spread = mean, variance
    outputs = (inputs - now.view(shape)) * (spread.view(shape) + eps).rsqrt()
    if weight is not None:
        outputs = outputs * weight.view(shape)
    return outputs if bias is None else outputs + bias.view(shape)


class _Passes(torch.autograd.Function):
    """The two passes, as torch's record of operations has them."""

    @staticmethod
    def forward(ctx: Any, owner: XLA, inputs: Tensor, names: Sequence[str], *trained: Tensor) -> Tensor:
        outputs, ctx.pullback = owner.forward(inputs, dict(zip(names, trained, strict=True)))
        ctx.owner, ctx.names = owner, names
        ctx.save_for_backward(*trained)  # so that torch tells if they are changed before the backward pass
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors is not None
        gradients = ctx.owner.backward(ctx.pullback, gradient)
        return None, None, None, *(gradients[name] for name in ctx.names)


@contextmanager
def _told(model: nn.Module) -> Iterator[None]:
    """Say in one line what cannot be made a program of.

    Raises:
        NoCompiler: In place of what torchax or JAX raised.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)  # int64 becomes int32
            yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:160].rstrip(".")
        raise NoCompiler(
            f"task.compile=xla: {type(model).__name__} cannot be made a program of ({type(error).__name__}: {reason}); "
            f"{ELSEWHERE}"
        ) from error


@contextmanager
def _widths(tensors: dict[str, Tensor]) -> Iterator[None]:
    """Let JAX have numbers of 64 bits where the model has."""
    import jax

    with jax.enable_x64(any(tensor.dtype == torch.float64 for tensor in tensors.values())):
        yield


def _lent(tensors: Any) -> Any:
    """Torch's tensors as JAX has them, in the same memory where it can be."""
    import jax

    if isinstance(tensors, dict):
        return {name: _lent(tensor) for name, tensor in tensors.items()}
    return jax.dlpack.from_dlpack(tensors.detach().contiguous())


def _given(array: Any) -> Tensor:
    """JAX's array as a tensor, once it is computed."""
    tensor: Tensor = torch.utils.dlpack.from_dlpack(array.block_until_ready())
    return tensor


def _load(device: torch.device) -> None:
    """Import JAX and torchax, with what keeps them from disturbing the rest.

    Raises:
        NoCompiler: JAX has no such device.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of a GPU's memory from torch
    import jax

    try:
        jax.devices(device.type)
    except RuntimeError as error:
        raise NoCompiler(
            f"task.compile=xla: JAX has no {device.type} device here; take trainer.accelerator=cpu, or {ELSEWHERE}"
        ) from error
    # Processes that load data are forked from this one, and use no JAX.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    with _unregistered(), _missing_overloads():
        import torchax

        environment = torchax.default_env()  # loads the operations
    environment.override_op_definition(F.batch_norm, batch_norm)
    environment._should_use_torchax_tensor = lambda device: True  # what is made within a program is part of it
    for kind in (torchax.tensor.Tensor, torchax.view.View):
        kind.device = property(lambda tensor: torch.device("meta"))


@contextmanager
def _unregistered() -> Iterator[None]:
    """Keep torchax from naming a device of torch, which would then take it for an accelerator and ask it in vain.

    Torch's compiler does so, and DDP.
    """
    names = ((torch.utils, "rename_privateuse1_backend"), (torch, "_register_device_module"))
    found = [(owner, name, getattr(owner, name)) for owner, name in names]
    for owner, name, _ in found:
        setattr(owner, name, lambda *args: None)
    try:
        yield
    finally:
        for owner, name, function in found:
            setattr(owner, name, function)


@contextmanager
def _missing_overloads() -> Iterator[None]:
    """Stand-ins for operations of named tensors, which torch 2.13 has no more but torchax names when it is imported."""
    found = OpOverloadPacket.__getattr__

    def get(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return found(packet, name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return f"{packet}.{name}"

    OpOverloadPacket.__getattr__ = get  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = found  # type: ignore[method-assign]
