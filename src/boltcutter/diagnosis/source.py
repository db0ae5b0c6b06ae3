"""What the user's code mentions: read from the bytecode of its classes, not executed."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache, partial, partialmethod
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeGuard

import lightning as L
from torch import nn

LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "torchmetrics.", "builtins", "typing", "abc")
OWN = str(Path(__file__).parents[1]) + os.sep
STANDARD = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
SKIPPED = ("__init__", "configure_optimizers")
# Code with one of these names may take hold of any module.
DYNAMIC = frozenset(
    ("children", "_modules", "named_children", "getattr", "modules", "get_submodule", "attrgetter", "vars")
)
# Code with one of these names may change what is trained later.
TIMED = frozenset(
    (
        *("current_epoch", "global_step", "batch_idx", "requires_grad_", "requires_grad", "unfreeze", "freeze"),
        *("set_grad_enabled", "max_epochs", "estimated_stepping_batches", "step_count", "num_updates"),
        *("steps", "n_steps", "iteration", "epoch"),
    )
)
UNKNOWN = compile("getattr", "unknown", "exec")  # stands for code that cannot be read


def is_mentioned(module: L.LightningModule, parameter: str, trainer: L.Trainer | None = None) -> bool:
    """Whether any code but ``__init__`` mentions a parameter, or a module that it is in.

    Every class on the path is searched, with its bases up to those of torch and Lightning, the classes of the module
    and of callbacks, and functions beside them. A layer of torch uses its parameters.
    """
    parts, owner = parameter.split("."), module
    others = [*own_classes(type(module)), *callback_classes(trainer)]
    shared = {code for cls in others for code in (*codes(cls), *_functions_beside(cls))}
    for name in parts:
        classes = own_classes(type(owner))
        is_index = re.fullmatch("[0-9]+", name)  # in a list of modules
        if not classes and not is_index:
            return True
        if not is_index:
            found = shared.union(*(codes(cls) for cls in classes), *(_functions_beside(cls) for cls in classes))
            if not any(name in c.co_names or name in c.co_consts or DYNAMIC & {*c.co_names} for c in found):
                return False
        owner = owner._modules.get(name) if isinstance(owner, nn.Module) else None  # type: ignore[assignment]
        if owner is None:
            break
    return True


def depends_on_time(module: L.LightningModule) -> bool:
    """Whether code of the module may change what is trained later."""
    found = codes_of(module)
    return any(TIMED & {*code.co_names, *code.co_varnames[code.co_argcount :]} or code is UNKNOWN for code in found)


def is_own_file(file: str | None) -> bool:
    """Whether a file is the user's: none of this library, of Python, of an installed package or without a path."""
    return bool(file) and "-packages" not in str(file) and not str(file).startswith(("<", OWN, *STANDARD))


def is_installed(part: nn.Module) -> bool:
    """Whether a part is of an installed package, other than torch."""
    name = type(part).__module__
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "-packages" in file and not f"{name}.".startswith(LIBRARIES)


def is_of_package(module: nn.Module) -> bool:
    """Whether all classes of a module and its parts are of installed packages, and it is no task of Boltcutter."""
    parts = [part for part in module.modules() if own_classes(type(part))]
    return not type(module).__module__.startswith("boltcutter.") and all(map(is_installed, parts))


def own_names() -> Iterator[dict[str, Any]]:
    """The names of the user's own files."""
    for module in [*sys.modules.values()]:
        if is_own_file(getattr(module, "__file__", None)):
            yield vars(module)


def namespaces_of(module: nn.Module) -> list[dict[str, Any]]:
    """The global names of the files in which the user's classes of a module and its parts are."""
    files = {cls.__module__ for part in module.modules() for cls in own_classes(type(part))}
    return [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules]


def says(module: nn.Module, pattern: re.Pattern[str], *, inner: bool = True) -> bool:
    """Whether a name or a text in the classes of a module and its parts matches, those of ``__init__`` included."""
    classes = {cls for part in (module.modules() if inner else [module]) for cls in own_classes(type(part))}
    found = [cls.__name__ for cls in classes] + [cls.__doc__ or "" for cls in classes]
    for code in (code for cls in classes for value in vars(cls).values() for code in _codes(value)):
        found += [
            *code.co_names,
            *code.co_varnames,
            *code.co_freevars,
            *(c for c in code.co_consts if isinstance(c, str)),
        ]
    return any(pattern.search(text) for text in found)


def codes_of(module: nn.Module) -> set[types.CodeType]:
    """The code of all methods of a module and its parts, but of those that create modules and optimizers."""
    return {code for part in module.modules() for cls in own_classes(type(part)) for code in codes(cls)}


def codes_of_users(module: nn.Module, trainer: L.Trainer) -> set[types.CodeType]:
    """The code of a module, as of ``codes_of``, and of the user's callbacks."""
    return codes_of(module).union(*(codes(cls) for cls in callback_classes(trainer)))


def unpacked_names(step: Any) -> list[str]:
    """The names that a step, or a method to which it passes its batch, gives to the parts: ``x, y = batch``."""
    function, owner = getattr(step, "__func__", None), getattr(step, "__self__", None)
    tree = tree_of(function) if isinstance(function, types.FunctionType) else None
    if tree is None or len(tree.args.args) < 2:
        return []
    given = tree.args.args[1].arg
    first = next((s for s in tree.body if isinstance(s, ast.Assign)), None)
    target = first.targets[0] if first and isinstance(first.value, ast.Name) and first.value.id == given else None
    if isinstance(target, ast.Tuple):
        return [name.id if isinstance(name, ast.Name) else "_" for name in target.elts]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        passes = bool(call.args) and isinstance(call.args[0], ast.Name) and call.args[0].id == given
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        method = getattr(type(owner), name, None)
        if passes and isinstance(method, types.FunctionType) and method is not function:
            return unpacked_names(getattr(owner, name))
        parts = call.args[0].value if call.args and isinstance(call.args[0], ast.Starred) else None
        if isinstance(parts, ast.Name) and parts.id == given and isinstance(method, types.FunctionType):
            inner = tree_of(method)  # self.loss(*batch)
            return [argument.arg for argument in inner.args.args[1:]] if inner is not None else []
    return []


@lru_cache(maxsize=1024)
def tree_of(function: types.FunctionType) -> ast.FunctionDef | None:
    """The definition of a function, without its decorators; None if it is of an installed package, or has no source."""
    function = inspect.unwrap(function)
    if "-packages" in function.__code__.co_filename:
        return None
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # typed in, or generated
        return None
    return body[0] if body and isinstance(body[0], ast.FunctionDef) else None


def is_only_in_branches(part: nn.Module, key: str) -> bool:
    """Whether methods of a part, but ``__init__``, mention an attribute only where ``if self.…`` leaves it out."""
    trees = [tree_of(value) for _, value in members(type(part)) if is_function(value) and value.__name__ != "__init__"]
    left, uses = set[ast.AST](), set[ast.AST]()
    for node in (node for tree in trees if tree is not None for node in ast.walk(tree)):
        if isinstance(node, ast.If | ast.IfExp) and (is_true := _holds(node.test, part)) is not None:
            branch = node.orelse if is_true else node.body
            left |= {inner for each in (branch if isinstance(branch, list) else [branch]) for inner in ast.walk(each)}
        if isinstance(node, ast.Attribute) and node.attr == key:
            uses.add(node)
    return bool(uses) and uses <= left


def _holds(test: ast.expr, part: nn.Module) -> bool | None:
    """Whether ``self.name``, ``not self.name`` or ``self.name is None`` is true of a part; None of other conditions."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _holds(test.operand, part)
        return None if inner is None else not inner
    is_none = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot) and len(test.ops) == 1
    read = test.left if is_none and isinstance(test, ast.Compare) else test
    if not isinstance(read, ast.Attribute) or not isinstance(read.value, ast.Name) or read.value.id != "self":
        return None
    if read.attr == "training" or not hasattr(part, read.attr):
        return None
    value = getattr(part, read.attr)
    if isinstance(test, ast.Compare):
        return (value is None) == isinstance(test.ops[0], ast.Is)
    return bool(value) if isinstance(value, bool | int | float | str | NoneType) else None


def callback_classes(trainer: L.Trainer | None) -> list[type]:
    """The classes of the callbacks that the user has written."""
    kinds = [type(callback) for callback in getattr(trainer, "callbacks", [])]
    return [cls for kind in kinds if not f"{kind.__module__}.".startswith("boltcutter.") for cls in own_classes(kind)]


def own_classes(cls: type) -> list[type]:
    """A class and its bases, without those of torch and Lightning."""
    return [c for c in cls.__mro__ if not f"{c.__module__}.".startswith(LIBRARIES)]


def members(cls: type) -> Iterator[tuple[type, Any]]:
    """What a class and its bases define, with the class that does, but not what another class on the way replaces."""
    hidden = set[str]()
    for each in own_classes(cls):
        found = {name: value for name, value in vars(each).items() if name not in hidden}
        yield from ((each, value) for value in found.values())
        # One that calls super() replaces nothing.
        hidden.update(name for name, value in found.items() if not any("super" in c.co_names for c in _codes(value)))


@cache
def codes(cls: type) -> tuple[types.CodeType, ...]:
    """The code of all methods of a class, but of those that create its modules and optimizers."""
    return tuple(code for name, value in vars(cls).items() if name not in SKIPPED for code in _codes(value))


def functions_beside(cls: type) -> list[types.FunctionType]:
    """The functions in the same file."""
    beside = vars(sys.modules.get(cls.__module__, types)).values()
    return [v for v in beside if isinstance(v, types.FunctionType) and v.__module__ == cls.__module__]


def is_function(value: object) -> TypeGuard[types.FunctionType]:
    """Whether a member of a class is a method with code in Python."""
    return isinstance(value, types.FunctionType)


@cache
def _functions_beside(cls: type) -> tuple[types.CodeType, ...]:
    """The code of functions in the same file."""
    return tuple(code for function in functions_beside(cls) for code in _codes(function, with_classes=False))


def _codes(value: Any, *, with_classes: bool = True) -> Iterator[types.CodeType]:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        for function in (value.fget, value.fset):
            yield from _codes(function)
    elif isinstance(value, partial | partialmethod):
        yield from _codes(value.func)
    elif isinstance(value, types.FunctionType):
        stack: list[types.CodeType] = [value.__code__]
        while stack:
            code = stack.pop()
            yield code
            inner = [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
            stack += [c for c in inner if with_classes or "__qualname__" not in c.co_names]  # of a class in a function
        functions = [getattr(value, "__wrapped__", None), *(_content(cell) for cell in value.__closure__ or ())]
        for function in functions:  # of a decorator
            if isinstance(function, types.FunctionType) and function.__code__ is not value.__code__:
                yield from _codes(function)
    elif hasattr(value, "__get__") and callable(value) and not isinstance(value, type):
        yield UNKNOWN  # a compiled or scripted method


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


class Place(NamedTuple):
    """A function of the user's code.

    Args:
        name: As ``Class.method``.
        tree: Its definition.
        owner: The layer whose class has it.
        line: Of its file, where it begins.
    """

    name: str
    tree: ast.FunctionDef
    owner: nn.Module
    line: int


def functions_of(module: nn.Module, others: Iterable[Any] = ()) -> Iterator[Place]:
    """The methods of the classes of a module, its parts and others, without those of installed packages."""
    seen = set[types.CodeType]()
    for part in (*module.modules(), *others):
        for cls, value in members(type(part)):
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            if not isinstance(function, types.FunctionType) or function.__code__ in seen:
                continue
            seen.add(function.__code__)
            tree = tree_of(function)
            if tree is not None:
                yield Place(f"{cls.__name__}.{function.__name__}", tree, part, function.__code__.co_firstlineno)
