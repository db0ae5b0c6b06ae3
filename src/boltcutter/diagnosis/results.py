"""Results of dropout, norms and activations in a pass of the user's own step that nothing reads: for probes only."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from boltcutter.diagnosis.evidence import tensors_of
from boltcutter.diagnosis.source import is_own_file

DROPOUTS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"))
NORMS = frozenset(("layer_norm", "group_norm", "instance_norm", "rms_norm"))
ACTIVATIONS = frozenset(("relu", "gelu", "silu", "leaky_relu", "elu", "mish", "hardswish", "relu6"))
FOLLOWED = DROPOUTS | NORMS | ACTIVATIONS
SHAPES = frozenset(("size", "dim", "numel", "__len__", "is_floating_point", "stride", "data_ptr"))

Place = tuple[types.CodeType, int]
MOST_PLACES = 4


class Result(NamedTuple):
    """What a function has returned.

    Args:
        name: Of the function.
        number: Of its call, of all calls of that function.
        tensor: Its result, which is kept, so that its identity is its own.
        places: The user's code that has called it, and the line, from the inside out.
    """

    name: str
    number: int
    tensor: Tensor
    places: tuple[Place, ...] = ()


class Unread(NamedTuple):
    """A result that nothing reads.

    Args:
        name: Of the function.
        number: Of its call.
        shape: Of the result.
        memory: Of its first element.
        places: The user's code that has called it, and the line, from the inside out.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    memory: int
    places: tuple[Place, ...]


class Results:
    """Results that no operation has read until now, in a pass in which gradients are enabled."""

    def __init__(self) -> None:
        self.kept: dict[int, Result] = {}
        self.counts = Counter[str]()
        self.is_paused = False  # while a probe reads them

    def follow(self, name: str, args: Any, kwargs: Any, given: Sequence[Tensor], result: Any) -> None:
        """Note what a function has read, and made."""
        if self.is_paused:
            return
        if name not in SHAPES and (name != "__get__" or isinstance(result, Tensor)):
            for t in given:
                self.kept.pop(id(t), None)
        if name in FOLLOWED:
            self.counts[name] += 1
            is_new = isinstance(result, Tensor) and not any(result is t for t in given)
            if is_new and torch.is_grad_enabled() and (name not in DROPOUTS or drops(args, kwargs)):
                self.kept[id(result)] = Result(name, self.counts[name], result, places_of(sys._getframe()))

    def passed(self, part: nn.Module, args: Any, output: Any) -> None:
        """A hook: what a module with weights returns may be one of several outputs, of which a step uses some."""
        if part._modules and any(True for _ in part.parameters()):
            for t in tensors_of(output):
                self.kept.pop(id(t), None)

    def unread(self, output: Any) -> list[Unread]:
        """What nothing has read, the step does not return, and no list or attribute holds."""
        for t in tensors_of(output):
            self.kept.pop(id(t), None)
        kept, own = [*self.kept.values()], Result("", 0, torch.zeros(()))
        self.kept.clear()
        least = sys.getrefcount(own.tensor)
        free = [each for each in kept if sys.getrefcount(each.tensor) <= least]
        return [Unread(r.name, r.number, tuple(r.tensor.shape), r.tensor.data_ptr(), r.places) for r in free]


def drops(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a dropout is active."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    is_active = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(p > 0 and is_active)


def places_of(frame: types.FrameType | None) -> tuple[Place, ...]:
    """The user's functions that are being called, and their lines, from the inside out."""
    found: list[Place] = []
    while frame is not None and len(found) < MOST_PLACES:
        if is_own_file(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
