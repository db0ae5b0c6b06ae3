"""Formats that ONNX Runtime and other engines load: ONNX in float32, int8 and int4."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from boltcutter.export.program import Program
from boltcutter.export.settings import Batches, ExportError, Format


class ONNX(Format):
    """An ONNX file with a dynamic batch size, written by the exporter of ``torch.export`` programs."""

    file: ClassVar[str] = "model.onnx"
    packages: tuple[str, ...] = ("onnx", "onnxscript", "onnxruntime")

    def write(self, program: Program, path: Path, calibration: Batches) -> None:
        """Write the file, with external data beside it if it is larger than 2 GB."""
        convert(program).save(path)


class StaticInt8(ONNX):
    """An ONNX file whose matrix products and convolutions compute in int8, with ranges from validation samples.

    In convolutional networks, the rarest 0.01 % of activations are clipped, so that the others are rounded less.
    """

    def write(self, program: Program, path: Path, calibration: Batches) -> None:
        """Write the float32 file, find the ranges, and quantize it."""
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        with tempfile.TemporaryDirectory() as scratch:
            plain, prepared = Path(scratch) / "plain.onnx", Path(scratch) / "prepared.onnx"
            convert(program).save(plain)
            # Shapes are known from the exporter; symbolic inference would need sympy's names of dimensions.
            quant_pre_process(plain, prepared, skip_symbolic_shape=True)
            types, excluded = choose_nodes(prepared)
            options = {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"], "CalibPercentile": 99.99}
            with redirect_stdout(StringIO()):  # which reports each step
                quantize_static(
                    prepared,
                    path,
                    Calibration(program.graph_inputs, calibration()),
                    quant_format=QuantFormat.QDQ,
                    op_types_to_quantize=types,
                    nodes_to_exclude=excluded,
                    per_channel=True,
                    activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8,
                    reduce_range=True,  # else CPUs without VNNI saturate sums of two products, in 16 bits
                    calibrate_method=CalibrationMethod.Percentile if "Relu" in types else CalibrationMethod.MinMax,
                    extra_options={**options, "CalibStridedMinMax": 1},  # batches, whose activations are in memory
                )


class Int4(ONNX):
    """An ONNX file whose linear layers have packed weights in int4, with a scale for each block of a row.

    Convolutions and embeddings stay in float32.
    """

    def write(self, program: Program, path: Path, calibration: Batches) -> None:
        """Quantize the weights of the float32 file."""
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        model = convert(program).model_proto
        split_linear_layers(model)
        # Blocks of 32 weights share a scale and a zero point; the computation is in int8.
        quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=False, accuracy_level=4)
        quantizer.process()
        if not any(node.op_type == "MatMulNBits" for node in quantizer.model.model.graph.node):
            raise ExportError(
                f"export=int4: {type(program.core).__name__} has no linear layer to quantize; use export=int8"
            )
        quantizer.model.save_model_to_file(str(path))


class Calibration:
    """Passes inputs to the quantizer of ONNX Runtime, which selects batches and calls ``get_next`` until it is None."""

    def __init__(self, names: list[str], batches: Iterable[tuple[Tensor, ...]]) -> None:
        arrays = ([tensor.numpy() for tensor in tensors] for tensors in batches)
        self.feeds = [dict(zip(names, feed, strict=True)) for feed in arrays]
        self.selected = iter(self.feeds)

    def __len__(self) -> int:
        return len(self.feeds)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Select batches."""
        self.selected = iter(self.feeds[start_index:end_index])

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch, by name of the input."""
        return next(self.selected, None)


def convert(program: Program) -> Any:
    """Convert a program to ONNX.

    Raises:
        ExportError: An operation has no ONNX equivalent.
    """
    try:
        found: Any = torch.onnx.export(
            program.capture(),
            dynamo=True,
            verbose=False,
            input_names=program.graph_inputs,
            output_names=program.graph_outputs,
        )
        for part in (found.model.graph, *found.model.graph):  # traces of the code, which are larger than a small model
            part.metadata_props.clear()
        return found
    except ExportError:
        raise
    except Exception as error:  # the exporter raises many types
        causes = [line.strip() for line in str(error).splitlines() if "Error" in line or "No ONNX function" in line]
        text = " ".join((causes or str(error).splitlines() or [type(error).__name__])[-1].split())[:300]
        raise ExportError(
            f"export: {type(program.core).__name__} cannot be converted to ONNX: {text}; use export=torch"
        ) from error


def choose_nodes(path: Path) -> tuple[list[str], list[str]]:
    """Choose what to quantize in an ONNX file.

    Returns:
        Types of nodes to quantize, and names of nodes of these types to leave in float32: post-processing, and the
        products of activations in attention, whose ranges int8 cannot represent.
    """
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    layers = [
        index
        for index, node in enumerate(graph.node)
        if node.op_type in ("Conv", "Gemm", "MatMul") and constants & set(node.input[:2])
    ]
    after = [node.name for node in graph.node[max(layers, default=-1) + 1 :]]
    products = [node.name for at, node in enumerate(graph.node) if node.op_type == "MatMul" and at not in layers]
    is_convolutional = any(node.op_type == "Conv" for node in graph.node)  # then sums and maxima stay in int8, too
    return ["Conv", "Gemm", "MatMul", *(["Relu", "MaxPool", "Add"] if is_convolutional else [])], after + products


def split_linear_layers(model: Any) -> None:
    """Replace each ``Gemm`` with constant weights by ``MatMul`` and ``Add``, in place, which the quantizer supports."""
    from onnx import helper, numpy_helper

    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        is_plain = all(attributes.get(name, 1) == 1 for name in ("alpha", "beta")) and not attributes.get("transA")
        if node.op_type != "Gemm" or node.input[1] not in constants or not is_plain:
            nodes.append(node)
            continue
        weight, (output,) = node.input[1], node.output
        if attributes.get("transB"):
            values = np.ascontiguousarray(numpy_helper.to_array(constants[weight]).T)
            weight = f"{weight}_transposed"
            graph.initializer.append(numpy_helper.from_array(values, weight))
        has_bias = len(node.input) > 2
        product = f"{output}_product" if has_bias else output
        nodes.append(helper.make_node("MatMul", [node.input[0], weight], [product], name=f"{node.name}_product"))
        if has_bias:
            nodes.append(helper.make_node("Add", [product, node.input[2]], [output], name=node.name))
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
