"""What stands beside a line: numbers of parameters, losses and the batch, and one sample. Only findings ask for it."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from boltcutter.diagnosis.evidence import Evidence, sampled, tensors_of, values
from boltcutter.structure import flatten

MOST = 3  # parameters, losses and tensors
SIDE = 32  # pixels of a picture
FIRST = 8  # values of a tensor that is no picture
MOST_TEXT = 200


def facts_of(seen: Evidence, text: str, sample: Any = None) -> dict[str, Any]:
    """The evidence of a finding.

    Args:
        seen: What was seen when it was said.
        text: Of the line, which names parameters and layers.
        sample: Which shows it.

    Returns:
        ``numbers``, a list of ``of`` and its numbers, and ``sample``, as ``describe_sample`` returns it.
    """
    found = [*_parameters(seen, text), *_losses(seen), *_batch(seen)]
    shown = describe_sample(sample) if sample is not None else {}
    return {key: value for key, value in (("numbers", found), ("sample", shown)) if value}


def _parameters(seen: Evidence, text: str) -> Iterator[dict[str, Any]]:
    words = {word.rstrip(".") for word in re.findall(r"[\w.]+", text)}
    layers = {word for word in words if "." in word}  # others may be a word of the line
    named = [n for n in seen.parameters if n in words or n.rpartition(".")[0] in layers]
    for name in named[:MOST]:
        p = seen.parameters[name]
        groups = [g for o in seen.optimizers for g in o.param_groups if any(each is p for each in g["params"])]
        found: dict[str, Any] = {"of": name, "shape": list(p.shape), "trained": p.requires_grad and bool(groups)}
        if name in seen.start and p.numel():
            both = (values(each).float() for each in (seen.start[name], sampled(p)))
            found["rms_at_start"], found["rms"] = (_number(each.square().mean().sqrt()) for each in both)
        if p.grad is not None:
            found["gradient_rms"] = _number(values(p.grad).float().square().mean().sqrt())
        elif groups:
            found["gradient"] = "none"
        if groups and "lr" in groups[0]:
            found["lr"] = _number(groups[0]["lr"])
        yield found


def _losses(seen: Evidence) -> Iterator[dict[str, Any]]:
    calls = seen.graph.losses if seen.graph else seen.calls
    for call in calls[:MOST]:
        for name, tensor in (("prediction", call.prediction), ("target", call.target)):
            if isinstance(tensor, Tensor):
                yield {"of": f"{name} of {call.kind}", **numbers_of(tensor)}


def _batch(seen: Evidence) -> Iterator[dict[str, Any]]:
    batch, kind = seen.batch, "batch"
    if batch is None:
        batch, kind = seen.validation_batch, "validation batch"
    for number, tensor in enumerate(tensors_of(batch)[:MOST]):
        yield {"of": f"part {number} of the {kind}", **numbers_of(tensor)}


def numbers_of(tensor: Tensor) -> dict[str, Any]:
    """Shape, type, lowest, highest and mean value, and how many are not finite."""
    flat = values(tensor).reshape(-1)
    found: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if flat.numel():
        finite = flat[flat.isfinite()] if flat.is_floating_point() else flat
        if len(finite) < len(flat):
            found["non_finite"] = len(flat) - len(finite)
        if len(finite):
            found |= {"lowest": _number(finite.min()), "highest": _number(finite.max())}
            found["mean"] = _number(finite.double().mean())
    return found


def describe_sample(sample: Any) -> dict[str, Any]:
    """A picture, and the values of other fields.

    Returns:
        ``picture``: ``shape`` (C, H, W) and ``pixels``, uint8 in base64; ``fields``: texts by name.
    """
    found: dict[str, Any] = {}
    fields = {}
    for name, leaf in _named(sample):
        tensor = torch.as_tensor(leaf) if isinstance(leaf, Tensor | np.ndarray) and _is_numeric(leaf) else None
        if tensor is not None and "picture" not in found and (picture := _picture(tensor)) is not None:
            shape, pixels = list(picture.shape), picture.contiguous().numpy().tobytes()
            found["picture"] = {"shape": shape, "pixels": base64.b64encode(pixels).decode()}
        elif tensor is not None:
            first = ", ".join(f"{float(value):.4g}" for value in values(tensor).reshape(-1)[:FIRST])
            more = f", … ({' × '.join(map(str, tensor.shape))})" if tensor.numel() > FIRST else ""
            fields[name] = f"{first}{more}"
        else:
            fields[name] = str(leaf)[:MOST_TEXT]
    return {**found, "fields": fields} if fields else found


def _named(sample: Any) -> list[tuple[str, Any]]:
    if isinstance(sample, Mapping):
        return [(str(name), leaf) for name, value in sample.items() for leaf in flatten(value)]
    return [(str(number), leaf) for number, leaf in enumerate(flatten(sample))]


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or leaf.dtype.kind in "biuf"


def _picture(tensor: Tensor) -> Tensor | None:
    """Pixels of (C, H, W) or (H, W, C) with one or three channels; None of other shapes."""
    tensor = tensor.detach().cpu()
    if tensor.ndim == 3 and tensor.shape[0] not in (1, 3) and tensor.shape[2] in (1, 3):
        tensor = tensor.movedim(2, 0)
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3) or min(tensor.shape[1:]) < 4:
        return None
    if tensor.dtype == torch.uint8:
        scaled = tensor.float()
    else:
        finite = tensor.float().nan_to_num(0, 0, 0)
        low, high = min(0.0, float(finite.min())), max(1.0, float(finite.max()))
        scaled = (finite - low) / (high - low) * 255
    if max(scaled.shape[1:]) > SIDE:
        height, width = (max(1, round(size * SIDE / max(scaled.shape[1:]))) for size in scaled.shape[1:])
        scaled = F.adaptive_avg_pool2d(scaled, (height, width))
    return scaled.round().to(torch.uint8)


def _number(value: Any) -> float | None:
    number = float(value)
    return float(f"{number:.4g}") if math.isfinite(number) else None
