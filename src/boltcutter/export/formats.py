"""Formats that torch loads: programs of ``torch.export`` in float32, half precision or int8, and plain weights."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from boltcutter.export.program import Program
from boltcutter.export.settings import Batches, Format

MIN_WEIGHTS = 1024  # of a convolution or an embedding; smaller ones are not worth an approximation


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

    Linear layers are quantized by torchao. Convolutions and embeddings, for which torchao has no kernels, are stored as
    int8 and computed in float32.

    Args:
        dynamic: Whether linear layers also compute in int8, with the range of each row of activations found while
            running.
    """

    file: ClassVar[str] = "model.pt2"
    packages: ClassVar[tuple[str, ...]] = ("torchao",)

    def __init__(self, dynamic: bool = False) -> None:
        self.dynamic = dynamic

    def write(self, program: Program, path: Path, calibration: Batches) -> None:
        """Quantize a copy of the program, and write it."""
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

        clone = program.clone()
        quantize_(clone.core, Int8DynamicActivationInt8WeightConfig() if self.dynamic else Int8WeightOnlyConfig())
        quantize_weights(clone.core)
        save(without_torchao(clone.capture()), path)


class SafeTensors(Format):
    """Plain weights without a program, with the model's configuration in ``config.json``, and a model card."""

    file: ClassVar[str] = "model.safetensors"
    is_runnable: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("safetensors", "huggingface_hub")

    def write(self, program: Program, path: Path, calibration: Batches) -> None:
        """Write the weights; tied ones under one name."""
        from safetensors.torch import save_model

        save_model(program.core, str(path), metadata={"format": "pt"})


def save(program: ExportedProgram, path: Path) -> None:
    """Write a program with its graph compressed and without traces of the model's code, larger than a small model."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for name in TRACES:
                node.meta.pop(name, None)
    program.example_inputs = None
    with tempfile.TemporaryFile() as scratch:
        torch.export.save(program, scratch)
        with zipfile.ZipFile(scratch) as plain, zipfile.ZipFile(path, "w") as packed:
            for entry in plain.infolist():
                is_graph = entry.filename.endswith(".json")
                packed.writestr(entry.filename, plain.read(entry), zipfile.ZIP_DEFLATED if is_graph else None)


def quantize_weights(model: nn.Module) -> None:
    """Store the weights of convolutions and embeddings as int8, in place; they are converted when they are used."""
    for module in list(model.modules()):
        weight = getattr(module, "weight", None)
        is_supported = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding)
        if is_supported and isinstance(weight, Tensor) and weight.numel() >= MIN_WEIGHTS:
            weight = weight.detach().contiguous()
            largest = weight.abs().flatten(1).amax(1).clamp(min=1e-12)
            scale = (largest / 127).view(-1, *[1] * (weight.ndim - 1))
            del module.weight
            module.register_buffer("weight_int8", (weight / scale).round().to(torch.int8))
            module.register_buffer("weight_scale", scale)
            module.__class__ = type(f"Int8{type(module).__name__}", (Int8Weight, type(module)), {})


class Int8Weight(nn.Module):
    """A module whose weight is stored as int8."""

    weight_int8: Tensor
    weight_scale: Tensor

    @property
    def weight(self) -> Tensor:
        """The weight, dequantized."""
        return self.weight_int8.to(self.weight_scale.dtype) * self.weight_scale


def without_torchao(program: ExportedProgram) -> ExportedProgram:
    """Replace operators of torchao by those of torch, so that the file can be loaded without torchao."""
    from torch._inductor.decomposition import decompositions  # where torchao registers those of its operators

    targets = {node.target for node in program.graph.nodes if getattr(node.target, "namespace", None) == "torchao"}
    found: ExportedProgram = program.run_decompositions({target: decompositions[target] for target in targets})
    return found
