"""Weights that are kept to be compared with trained ones, and that are these themselves: for probes only."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.source import own_classes, tree_of
from boltcutter.structure import flatten

# Calls that change nothing, and whose results share memory with what they are of.
SHARING = frozenset(
    (
        *("named_parameters", "parameters", "detach", "state_dict", "items", "values", "keys", "view_as"),
        *("zip", "dict", "list", "tuple", "enumerate", "flatten", "view", "reshape", "requires_grad_"),
    )
)
BUILTINS = {"zip": zip, "dict": dict, "list": list, "tuple": tuple, "enumerate": enumerate}
EMPTY = ("None", "{}", "[]", "dict()", "list()", "()")
SHIFT = 0.1  # by which weights are changed


class Method(NamedTuple):
    """A method of the user's code.

    Args:
        owner: A part of the module, or a callback.
        name: As ``Class.method``.
        tree: Its definition.
        line: Of its file, where it begins.
    """

    owner: Any
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
        methods = [*_methods_of(owner)]
        for name, (where, values) in _kept(methods).items():
            kept = [_evaluate(seen, owner, value) for value in values]
            if not all(_is_trained(seen, value) for value in kept):
                continue
            for difference in (d for method in methods for d in _differences(method.tree, name)):
                if _is_nothing(seen, owner, name, kept[0], difference):
                    text = " ".join(ast.unparse(difference.elt).split())[:80]
                    yield Line(
                        f"self.{name} ({where}) holds trained weights themselves, not copies, as detach() copies "
                        f"nothing, so `{text}` is always 0; use detach().clone()",
                        subject=f"{type(owner).__name__}.{name}",
                    )
                    break


def _methods_of(owner: Any) -> Iterator[Method]:
    for cls in own_classes(type(owner)):
        for value in vars(cls).values():
            tree = tree_of(value) if isinstance(value, types.FunctionType) else None
            if tree is not None and _is_called(type(owner), value):
                yield Method(owner, f"{cls.__name__}.{value.__name__}", tree, value.__code__.co_firstlineno)


def _is_called(cls: type, function: types.FunctionType) -> bool:
    """Whether a class has a method, or one in its place that calls ``super``."""
    last = getattr(getattr(cls, function.__name__, None), "__code__", function.__code__)
    return last is function.__code__ or "super" in last.co_names


def _kept(methods: list[Method]) -> dict[str, tuple[str, list[ast.expr]]]:
    """Attributes that are assigned: where, and all expressions that are not empty; without those that calls compute."""
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
                if is_own and ast.unparse(value) not in EMPTY:
                    where = f"{method.name}, line {method.line + node.lineno - 1}"
                    found.setdefault(target.attr, (where, []))[1].append(value)  # type: ignore[attr-defined]
    return found


def _is_pure(value: ast.expr) -> bool:
    """Whether an expression calls nothing but what shares memory."""
    calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
    names = [c.func.attr if isinstance(c.func, ast.Attribute) else getattr(c.func, "id", "") for c in calls]
    return {*names} <= SHARING and not any(
        isinstance(n, ast.Lambda | ast.NamedExpr | ast.Await) for n in ast.walk(value)
    )


def _evaluate(seen: Evidence, owner: Any, value: ast.expr) -> Any:
    """The value of an expression of ``self`` that changes nothing; None if it is another one."""
    if not _is_pure(value):
        return None
    code = compile(ast.fix_missing_locations(ast.Expression(value)), "anchor", "eval")
    names = {"self": owner, "pl_module": seen.module, "module": seen.module, "trainer": seen.trainer}
    try:
        with torch.no_grad():
            found = eval(code, {"__builtins__": BUILTINS, **names})  # noqa: S307  of the user's code, which calls nothing else
    except Exception:  # of what is not there yet, and names of the function
        return None
    return [*found] if isinstance(found, zip | enumerate | types.GeneratorType) else found


def _is_trained(seen: Evidence, value: Any) -> bool:
    """Whether a list or dict has weights of optimizers, and nothing else; a single one is no copy of a network."""
    if not isinstance(value, list | tuple | dict):
        return False
    tensors = [t for t in flatten(value) if isinstance(t, Tensor)]
    memory = {p.data_ptr() for p in seen.module.parameters() if id(p) in seen.owned}
    return len(tensors) > 0 and all(t.data_ptr() in memory for t in tensors if t.is_floating_point())


def _differences(tree: ast.FunctionDef, name: str) -> Iterator[ast.ListComp]:
    """Differences of an attribute from something else in a loop, as a list of all rounds."""

    def search(node: ast.AST, loops: list[ast.comprehension]) -> Iterator[ast.ListComp]:
        if isinstance(node, ast.For):
            loops = [*loops, ast.comprehension(node.target, node.iter, [], 0)]
        elif isinstance(node, ast.GeneratorExp | ast.ListComp):
            loops = [*loops, *(ast.comprehension(g.target, g.iter, [], 0) for g in node.generators)]
        pair: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            pair = [node.left, node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mse_loss"):
            pair = node.args[:2]
        texts = [ast.unparse(each) for each in (*pair, *(loop.iter for loop in loops))]
        if len(pair) == 2 and loops and any(f"self.{name}" in text for text in texts):
            yield ast.ListComp(ast.BinOp(pair[0], ast.Sub(), pair[1]), loops)
        for child in ast.iter_child_nodes(node):
            yield from search(child, loops)

    yield from search(tree, [])


def _is_nothing(seen: Evidence, owner: Any, name: str, kept: Any, difference: ast.ListComp) -> bool:
    """Whether all differences are 0, after trained weights have changed."""
    weights = [p for p in seen.module.parameters() if id(p) in seen.owned and p.is_floating_point()]
    before = [p.detach().clone() for p in weights]
    had, old = name in vars(owner), vars(owner).get(name)
    try:
        with torch.no_grad():
            for p in weights:
                p.mul_(1 + SHIFT).add_(SHIFT)
        vars(owner)[name] = kept
        found = _evaluate(seen, owner, difference)
    finally:
        with torch.no_grad():
            for p, value in zip(weights, before, strict=True):
                p.copy_(value)
        if had:
            vars(owner)[name] = old
        else:
            vars(owner).pop(name, None)
    tensors = [t for t in found if isinstance(t, Tensor)] if isinstance(found, list) else []
    return len(tensors) > 0 and len(tensors) == len(found) and not any(bool(t.any()) for t in tensors)
