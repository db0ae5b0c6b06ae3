"""Weights that are kept to be compared with trained ones, and that are these themselves: for probes only."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from boltcutter.diagnosis.arguments import member_of
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.source import own_classes, tree_of
from boltcutter.diagnosis.statements import called_name

READS = frozenset(("named_parameters", "parameters", "state_dict"))
# Calls that change nothing, and whose results share memory with what they are of.
SHARING = READS | {"detach", "items", "values", "keys", "zip", "dict", "list", "tuple", "enumerate", "requires_grad_"}
EMPTY = ("None", "{}", "[]", "dict()", "list()", "()")


class Method(NamedTuple):
    """A method of the user's code.

    Args:
        name: As ``Class.method``.
        tree: Its definition.
        line: Of its file, where it begins.
    """

    name: str
    tree: ast.FunctionDef
    line: int


@check("constant-term", "likely", at="probe")
def differs_from_itself(seen: Evidence) -> Lines:
    """Weights that code keeps in an attribute share memory with trained ones, from which it subtracts them."""
    callbacks = [c for c in getattr(seen.trainer, "callbacks", []) if not type(c).__module__.startswith("boltcutter.")]
    known = set[type]()
    for owner in (*seen.module.modules(), *callbacks):
        if type(owner) in known:
            continue
        known.add(type(owner))
        methods = [*_methods_of(type(owner))]
        for name, (where, values) in _kept(methods).items():
            networks = [_network_of(seen, owner, value) for value in values]
            if networks[0] is None or any(each is not networks[0] for each in networks):
                continue
            for text, trained in (found for method in methods for found in _differences(method.tree, name)):
                if _network_of(seen, owner, trained) is networks[0]:
                    yield Line(
                        f"self.{name} ({where}) holds trained weights themselves, not copies, as detach() copies "
                        f"nothing, so `{text}` is always 0; use detach().clone()",
                        subject=f"{type(owner).__name__}.{name}",
                    )
                    break


def _methods_of(kind: type) -> Iterator[Method]:
    for cls in own_classes(kind):
        for value in vars(cls).values():
            tree = tree_of(value) if isinstance(value, types.FunctionType) else None
            if tree is not None and _is_called(kind, value):
                yield Method(f"{cls.__name__}.{value.__name__}", tree, value.__code__.co_firstlineno)


def _is_called(cls: type, function: types.FunctionType) -> bool:
    """Whether a class has a method, or one in its place that calls ``super``."""
    last = getattr(getattr(cls, function.__name__, None), "__code__", function.__code__)
    return last is function.__code__ or "super" in last.co_names


def _kept(methods: list[Method]) -> dict[str, tuple[str, list[ast.expr]]]:
    """Attributes that are assigned: where, and all expressions that are not empty."""
    found: dict[str, tuple[str, list[ast.expr]]] = {}
    for method in methods:
        for node in ast.walk(method.tree):
            if not isinstance(node, ast.Assign):
                continue
            pairs = [(target, node.value) for target in node.targets]
            for target, value in [*pairs]:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs += zip(target.elts, value.elts, strict=False)
            for target, value in pairs:
                is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                if isinstance(target, ast.Attribute) and is_own and ast.unparse(value) not in EMPTY:
                    where = f"{method.name}, line {method.line + node.lineno - 1}"
                    found.setdefault(target.attr, (where, []))[1].append(value)
    return found


def _network_of(seen: Evidence, owner: Any, value: ast.expr) -> nn.Module | None:
    """The network, of which an optimizer has all weights, whose weights an expression lists; None if it copies any."""
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    reads = [call.func for call in calls if called_name(call) in READS]
    if {called_name(call) for call in calls} - SHARING or len(reads) != 1 or not isinstance(reads[0], ast.Attribute):
        return None
    first, *path = ast.unparse(reads[0].value).split(".")
    found = {"self": owner, "pl_module": seen.module, "module": seen.module}.get(first)
    for name in path:
        found = member_of(found, name)
    is_trained = isinstance(found, nn.Module) and all(id(p) in seen.owned for p in found.parameters())
    return found if is_trained else None


def _differences(tree: ast.FunctionDef, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Differences of an attribute's values from what a loop goes through beside them: their text, and the latter."""

    def search(node: ast.AST, bound: dict[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
        loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
        for loop in loops:
            bound = {**bound, **dict(_bound(loop.target, loop.iter))}
        pair: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            pair = [node.left, node.right]
        elif isinstance(node, ast.Call) and called_name(node) == "mse_loss":
            pair = node.args[:2]
        for one, other in (pair, pair[::-1]) if len(pair) == 2 else ():
            source = bound.get(one.id) if isinstance(one, ast.Name) else None
            is_kept = ast.unparse(other).startswith(f"self.{name}[")
            is_kept |= isinstance(other, ast.Name) and ast.unparse(bound.get(other.id, one)).startswith(f"self.{name}")
            if source is not None and is_kept and not ast.unparse(source).startswith(f"self.{name}"):
                yield " ".join(ast.unparse(node).split())[:80], source
        for child in ast.iter_child_nodes(node):
            yield from search(child, bound)

    yield from search(tree, {})


def _bound(target: ast.expr, values: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The names that a loop binds, each with what it goes through; of names and values, that of the values."""
    parts = target.elts if isinstance(target, ast.Tuple) else []
    name = called_name(values) if isinstance(values, ast.Call) else ""
    if isinstance(values, ast.Call) and name == "zip" and len(parts) == len(values.args):
        for part, each in zip(parts, values.args, strict=True):
            yield from _bound(part, each)
    elif isinstance(values, ast.Call) and name == "enumerate" and len(parts) == 2:
        yield from _bound(parts[1], values.args[0])
    elif name in ("named_parameters", "items") and len(parts) == 2 and isinstance(parts[1], ast.Name):
        yield parts[1].id, values
    elif isinstance(target, ast.Name):
        yield target.id, values
