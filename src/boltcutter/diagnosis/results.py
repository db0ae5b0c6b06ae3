"""Results of dropout, norms and activations in a pass of the user's own step that nothing reads: for probes only."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.evidence import tensors_of
from boltcutter.diagnosis.source import is_own_file

DROPOUTS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"))
NORMS = frozenset(("layer_norm", "group_norm", "instance_norm", "rms_norm"))
ACTIVATIONS = frozenset(("relu", "gelu", "silu", "leaky_relu", "elu", "mish", "hardswish", "relu6"))
FOLLOWED = DROPOUTS | NORMS | ACTIVATIONS
SHAPES = frozenset(("size", "dim", "numel", "__len__", "is_floating_point", "stride", "data_ptr"))

MOST_COPIES = 64  # that are kept
UNCHANGED = frozenset(("requires_grad_", "retain_grad_", "detach_", "share_memory_", "rename_", "pin_memory_"))

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


class Copies:
    """What indices have copied, and operations change in place, in a pass."""

    def __init__(self) -> None:
        self.numbers = WeakTensorKeyDictionary()  # copies, and views of them: the number of the copy
        self.changed: dict[int, tuple[list[Tensor], str, tuple[Place, ...]]] = {}  # by number, what nothing has read
        self.made: list[tuple[Place, ...]] = []  # of each copy, the line that has made it

    def follow(self, name: str, args: Any, given: Sequence[Tensor], result: Any) -> None:
        """Follow copies to an operation that changes them, and to one that reads them."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        of = self.numbers[first] if first is not None and first in self.numbers else None
        is_change = name == "__setitem__" or (name[-1:] == "_" != name[-2:-1] and name not in UNCHANGED)
        is_view = isinstance(result, Tensor) and first is not None and shares_memory(result, first)
        for t in given if name not in SHAPES else ():
            if t in self.numbers and not (t is first and (is_change or is_view)):
                self.changed.pop(self.numbers[t], None)
        if is_change and of is not None and first is not None:
            if len(self.changed) < MOST_COPIES or of in self.changed:
                kept = self.changed[of][0] if of in self.changed else []
                self.changed[of] = ([*kept, first], name, places_of(sys._getframe()))
        elif is_view and of is not None and result is not first:
            self.numbers[result] = of
        elif name == "__getitem__" and isinstance(result, Tensor) and result.numel() and not is_view:
            self.made.append(places_of(sys._getframe())[:1])
            self.numbers[result] = len(self.made) - 1

    def unread(self) -> str:
        """What was changed, and never read, by a statement that does nothing else; empty if there is none."""
        for number, (tensors, name, places) in self.changed.items():
            if self.made[number] == places[:1] != () and (text := statement_that_only_writes(*places[0])):
                return (
                    f"`{text}` ({places[0][0].co_name}, line {places[0][1]}): {name} changes a copy of "
                    f"{tuple(tensors[0].shape)}, which indices have made, and which nothing reads; assign it: "
                    "tensor[index] = value"
                )
        return ""


def is_part(t: Tensor, whole: Tensor) -> bool:
    """Whether a tensor is a view of another one, or of the same memory."""
    return t.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def shares_memory(t: Tensor, whole: Tensor) -> bool:
    """Whether a tensor is of the memory of another one, or it cannot be known, as of those of ``torch.func``."""
    try:
        return is_part(t, whole)
    except (RuntimeError, NotImplementedError):
        return True


def statement_that_only_writes(code: types.CodeType, line: int) -> str:
    """A statement that calls a method of what an index returns, or sets an item of it; empty for others."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):  # typed in, or generated
        return ""
    line += 1 - code.co_firstlineno
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
    statement = inside[-1] if inside else None
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        owner = getattr(statement.value.func, "value", None)
    elif isinstance(statement, ast.Assign | ast.AugAssign):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        owner = target.value if isinstance(target, ast.Subscript) else None
    else:
        return ""
    while isinstance(owner, ast.Call | ast.Attribute):  # store[index].view(-1).copy_(…)
        owner = owner.func if isinstance(owner, ast.Call) else owner.value
    return " ".join(ast.unparse(statement).split())[:80] if isinstance(owner, ast.Subscript) else ""


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
