"""Formats that torch loads: programs of ``torch.export`` in float32, half precision or int8, and plain weights."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.utils import fuse_conv_bn_weights

from boltcutter.export.program import Program
from boltcutter.export.settings import Batches, Format

MIN_WEIGHTS = 1024  # of a layer; smaller ones are not worth an approximation
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
STORED = (*CONVOLUTIONS, nn.Embedding)  # layers whose weights are stored as int8, and converted when they are used
TRACES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")  # metadata of nodes


class TorchExport(Format):
    """A program of ``torch.export``, for ``torch.export.load``.

    Args:
        dtype: Precision of the weights and of the computation.
    """

    file: ClassVar[str] = "model.pt2"

    def __init__(self, dtype: Literal["float32", "bfloat16", "float16"] = "float32") -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)

    def write(self, program: Program, path: Path, calibration: Batches) -> None:
        """Write the program."""
        if self.dtype != torch.float32:
            program = program.convert(self.dtype)
        save(program.capture(), path)


class Int8(Format):
    """A program of ``torch.export`` with weights in int8, one scale for each output channel.

    Layers are computed in float32. A BatchNorm is folded into the convolution before it.

    Args:
        dynamic: Whether linear layers compute in int8, by torchao, with the range of each row of activations found
            while running.
    """

    file: ClassVar[str] = "model.pt2"

    def __init__(self, dynamic: bool = False) -> None:
        self.dynamic = dynamic
        self.packages = ("torchao",) if dynamic else ()

    def write(self, program: Program, path: Path, calibration: Batches) -> None:
        """Quantize a copy of the program, and write it."""
        clone = program.clone()
        fold_batch_norms(clone, program.capture())
        if self.dynamic:
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, MappingType, quantize_

            # Of both signs of activations only the range in use, as in quantization-aware training.
            quantize_(clone.core, Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC))
        quantize_weights(clone.core, STORED if self.dynamic else (*STORED, nn.Linear))
        save(without_torchao(clone.capture()) if self.dynamic else clone.capture(), path)


class SafeTensors(Format):
    """Plain weights without a program, with the model's configuration in ``config.json``, and a model card."""

    file: ClassVar[str] = "model.safetensors"
    is_runnable: ClassVar[bool] = False
    packages: tuple[str, ...] = ("safetensors", "huggingface_hub")

    def write(self, program: Program, path: Path, calibration: Batches) -> None:
        """Write the weights; tied ones under one name."""
        from safetensors.torch import save_model

        save_model(program.core, str(path), metadata={"format": "pt"})


def save(program: ExportedProgram, path: Path) -> None:
    """Write a program compressed, and without traces of the model's code, which are larger than a small model."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for name in TRACES:
                node.meta.pop(name, None)
    program.example_inputs = None
    with tempfile.TemporaryFile() as scratch:
        torch.export.save(program, scratch)
        with zipfile.ZipFile(scratch) as plain, zipfile.ZipFile(path, "w") as packed:
            for entry in plain.infolist():
                name = entry.filename.partition("/")[2]
                if name != ".data/serialization_id":  # which is optional
                    method = zipfile.ZIP_DEFLATED if entry.file_size > 256 else zipfile.ZIP_STORED
                    packed.writestr(f"m/{name}", plain.read(entry), method)  # short, since each entry has it twice


def fold_batch_norms(program: Program, captured: ExportedProgram) -> None:
    """Scale each convolution as the BatchNorm that follows does, in place, so that only a shift is left of it."""
    names = {**captured.graph_signature.inputs_to_parameters, **captured.graph_signature.inputs_to_buffers}

    def find_owner(tensor: Any) -> str:
        """Name of the module of a tensor, if nothing else uses it."""
        is_owned = isinstance(tensor, torch.fx.Node) and tensor.name in names and len(tensor.users) == 1
        return names[tensor.name].rpartition(".")[0] if is_owned else ""

    for node in captured.graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default and len(node.args[0].users) == 1:
            source, mean = node.args[0], node.args[3]
            conv = program.get_submodule(find_owner(source.args[1]) if len(source.args) > 1 else "")
            norm = program.get_submodule(name := find_owner(mean))
            if isinstance(conv, CONVOLUTIONS) and isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                statistics: Any = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
                conv.weight, shift = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics)
                conv.bias = None
                program.set_submodule(name, Shift(shift.view(-1, *[1] * (conv.weight.ndim - 2))))


def quantize_weights(model: nn.Module, types: tuple[type[nn.Module], ...]) -> None:
    """Store the weights of layers as int8, in place; they are converted when they are used."""
    found: dict[Tensor, tuple[Tensor, Tensor]] = {}  # a tied weight is stored once
    for module in list(model.modules()):
        weight = getattr(module, "weight", None)
        if isinstance(module, types) and isinstance(weight, Tensor) and weight.numel() >= MIN_WEIGHTS:
            if weight not in found:
                plain = weight.detach().contiguous()
                largest = plain.abs().flatten(1).amax(1).clamp(min=1e-12)
                scale = (largest / 127).to(torch.bfloat16).view(-1, *[1] * (plain.ndim - 1))
                found[weight] = (plain / scale.float()).round().to(torch.int8), scale  # which compensates its rounding
            del module.weight
            for name, tensor in zip(("weight_int8", "weight_scale"), found[weight], strict=True):
                module.register_buffer(name, tensor)
            module.__class__ = type(f"Int8{type(module).__name__}", (Int8Weight, type(module)), {})


class Shift(nn.Module):
    """What is left of a BatchNorm after a convolution that has its scale."""

    shift: Tensor

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, ...) to the same shape."""
        return x + self.shift


class Int8Weight(nn.Module):
    """A module whose weight is stored as int8."""

    weight_int8: Tensor
    weight_scale: Tensor

    @property
    def weight(self) -> Tensor:
        """The weight, dequantized."""
        return self.weight_int8.float() * self.weight_scale.float()


def without_torchao(program: ExportedProgram) -> ExportedProgram:
    """Replace operators of torchao by those of torch, so that the file can be loaded without torchao."""
    from torch._inductor.decomposition import decompositions  # where torchao registers those of its operators

    targets = {node.target for node in program.graph.nodes if getattr(node.target, "namespace", None) == "torchao"}
    found: ExportedProgram = program.run_decompositions({target: decompositions[target] for target in targets})
    return found
