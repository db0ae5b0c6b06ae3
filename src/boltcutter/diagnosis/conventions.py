"""Conventions that the user's code breaks, by its own names: edges, coordinates, axes, steps of a return, and flips."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from boltcutter.diagnosis.arguments import Code, code_of
from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.source import is_function, namespaces_of, tree_of
from boltcutter.diagnosis.statements import called_name

SOURCES = re.compile(r"(src|source|sources|sender|senders)(_?(idx|index|ids|nodes))?")
TARGETS = re.compile(r"(dst|dest|target|targets|tgt|receiver|receivers)(_?(idx|index|ids|nodes))?")
EDGES = re.compile(r"edge", re.IGNORECASE)
SUMS = frozenset(("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"))
JOINED = re.compile(r"(?:cat|stack|concat|column_stack|hstack)\([\[(]([a-z](?:, [a-z])+)[\])]")
MOST_EDGES = 200_000
FLIPS = frozenset(("flip", "rot90", "roll", "hflip", "vflip", "fliplr", "flipud"))
DISCOUNTS = re.compile(r"gamma|discount", re.IGNORECASE)
BOOTSTRAPS = re.compile(r"next|boot|target|last|final", re.IGNORECASE)


def functions(seen: Evidence) -> Iterator[Code]:
    """As ``code_of``, and all functions of the files that have the classes of the module."""
    known = set[tuple[int, int]]()  # their files, by the names in them, and lines
    for code in code_of(seen):
        known.add((id(code.names), code.line))
        yield code
    for names in namespaces_of(seen.module):
        for function in [*names.values()]:
            if is_function(function) and function.__globals__ is names:
                line, tree = function.__code__.co_firstlineno, tree_of(function)
                if tree is not None and (id(names), line) not in known:
                    yield Code(function.__qualname__, tree, None, names, line)


def _said(code: Code, node: ast.AST) -> str:
    line = code.line + getattr(node, "lineno", 1) - 1
    return f"`{' '.join(ast.unparse(node).split())[:80]}` ({code.name}, line {line})"


@check("edges-reversed", "likely", at="probe")
def edges_reversed(seen: Evidence) -> Lines:
    """By its names, code takes the targets of edges for their sources, and the edges of a batch have a direction."""
    batches = [*seen.probe.batches.values()] if seen.probe is not None else []
    known = [b for b in batches if any(c.__module__.startswith("torch_geometric") for c in type(b).__mro__)]
    graphs = [t for batch in known if isinstance(t := getattr(batch, "edge_index", None), Tensor)]
    edges = [t for t in tensors_of([batches, graphs, *seen.module.buffers()]) if t.ndim == 2 and len(t) == 2]
    edges = [t for t in edges if not t.is_floating_point() and t.dtype != torch.bool and 2 < t.shape[1] <= MOST_EDGES]
    if not edges or all(map(_is_undirected, edges)):
        return
    is_reverse = any(getattr(part, "flow", "") == "target_to_source" for part in seen.module.modules())
    for code in code_of(seen):
        unpacked, summed = [*_unpacked_in_reverse(code)], [*_summed(code, SOURCES, TARGETS)]
        is_both = bool(summed) and any(True for _ in _summed(code, TARGETS, SOURCES))  # messages in both directions
        if bool(unpacked) != bool(summed) and not is_both:
            node = (unpacked or summed)[0]
            how = "unpacks the edges as targets and sources" if unpacked else "adds what targets have up at sources"
            yield Line(
                f"{_said(code, node)} {how}, so messages go against the edges, whose first row are the sources; "
                "exchange the two",
                "note" if unpacked and (not graphs or is_reverse) else None,  # as those of PyTorch Geometric
                subject=code.name,
            )


def _is_undirected(edges: Tensor) -> bool:
    one, other = (edges[i].long() * (int(edges.max()) + 1) + edges[1 - i] for i in (0, 1))
    return torch.equal(torch.unique(one), torch.unique(other))


def _unpacked_in_reverse(code: Code) -> Iterator[ast.AST]:
    for node in ast.walk(code.tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        names = [e.id for e in target.elts if isinstance(e, ast.Name)] if isinstance(target, ast.Tuple) else []
        is_reversed = len(names) == 2 and TARGETS.fullmatch(names[0]) and SOURCES.fullmatch(names[1])
        if isinstance(node, ast.Assign) and is_reversed and EDGES.search(ast.unparse(node.value)):
            yield node


def _summed(code: Code, at: re.Pattern[str], of: re.Pattern[str]) -> Iterator[ast.AST]:
    """Sums at some ends of edges of what others have."""
    for call in (n for n in ast.walk(code.tree) if isinstance(n, ast.Call) and called_name(n) in SUMS):
        indices = [n.id for arg in call.args for n in _outside_of_indices(arg) if isinstance(n, ast.Name)]
        inner = [n.id for arg in call.args for s in ast.walk(arg) if isinstance(s, ast.Subscript) for n in
                 ast.walk(s.slice) if isinstance(n, ast.Name)]  # fmt: skip
        if any(map(at.fullmatch, indices)) and any(map(of.fullmatch, inner)):
            yield call


def _outside_of_indices(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Subscript) and child is node.slice):
            yield from _outside_of_indices(child)


@check("coordinate-order", "likely", at="probe")
def other_coordinate(seen: Evidence) -> Lines:
    """Derivatives u_t and u_x are taken from a gradient in another order than that of the coordinates, as xt says."""
    for code in code_of(seen):
        for node in (n for n in ast.walk(code.tree) if isinstance(n, ast.Assign)):
            target = node.targets[0]
            names = [e.id for e in target.elts if isinstance(e, ast.Name)] if isinstance(target, ast.Tuple) else []
            calls = [n for n in ast.walk(node.value) if isinstance(n, ast.Call) and called_name(n) == "grad"]
            is_cut = re.search(r"unbind|split|chunk|\.T\b|\.t\(\)|\.mT\b", ast.unparse(node.value))
            if len(names) < 2 or not calls or len(calls[0].args) < 2 or not is_cut:
                continue
            by = _order(code, ast.unparse(calls[0].args[1]).strip("[]"))
            letters = [name[-1] for name in names if re.search(r"(^|_|d)[a-z]*[_d]?[xyzt]$", name)]
            if len(letters) == len(names) and sorted(by) == sorted(letters) and [*by] != letters:
                yield Line(
                    f"{_said(code, node)} takes the derivatives by {', '.join(letters)}, but {by} has "
                    f"{', '.join(by)} in its columns; unpack them in that order",
                    subject=code.name,
                )


def _order(code: Code, name: str) -> str:
    """The letters of coordinates in the order of the columns of what a name is: as it says, or is joined of."""
    for node in (n for n in ast.walk(code.tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name):
        if found := JOINED.search(ast.unparse(node)):
            return found[1].replace(", ", "")
    return name


@check("reshape-not-transpose", "likely", at="probe")
def reshape_by_names(seen: Evidence) -> Lines:
    """Code reshapes an array to its own sizes in another order, by their names, so that its rows are mixed."""
    for code in functions(seen):
        sizes: dict[str, tuple[str, int]] = {}  # of names: of which array, and its dimension
        for node in (n for n in ast.walk(code.tree) if isinstance(n, ast.Assign)):
            value, target = ast.unparse(node.value), node.targets[0]
            if found := re.fullmatch(r"(.+)\.shape\[(-?[0-9])\]", value):
                sizes[ast.unparse(target)] = (found[1], int(found[2]))
            elif isinstance(target, ast.Tuple) and (found := re.fullmatch(r"(.+)\.(shape|size\(\))", value)):
                sizes |= {ast.unparse(e): (found[1], i) for i, e in enumerate(target.elts)}
        for call in (n for n in ast.walk(code.tree) if isinstance(n, ast.Call)):
            if (
                called_name(call) not in ("reshape", "view")
                or not isinstance(call.func, ast.Attribute)
                or not call.args
            ):
                continue
            owner, args = ast.unparse(call.func.value), call.args
            args = [*args[0].elts] if isinstance(args[0], ast.Tuple | ast.List) else args
            dims = [sizes.get(ast.unparse(a), ("", 0)) for a in args]
            assigns = [n for n in ast.walk(code.tree) if isinstance(n, ast.Assign) and n.lineno <= call.lineno]
            is_new = any(owner == ast.unparse(target) for n in assigns for target in n.targets)
            if is_new or all(ast.unparse(a) == "1" for a in args[1:]):
                continue  # it is another array by then, or a vector
            own = [dim for array, dim in dims if array == owner]
            is_permuted = len(own) == len(args) and own != sorted(own) and sorted(own) == [*range(len(own))]
            if len(args) > 2 and (is_permuted or (dims[0][0] == owner and dims[0][1] == -1)):
                yield Line(
                    f"{_said(code, call)} begins with another dimension than {owner} has first, but a reshape keeps "
                    "the order of values, so its rows are mixed; did you mean transpose or permute?",
                    subject=code.name,
                )


@check("n-step-discount", "likely", at="probe")
def n_step(seen: Evidence) -> Lines:
    """A sum of several rewards is discounted by powers of gamma, but what follows them by gamma itself."""
    for code in code_of(seen):
        texts = {ast.unparse(t): ast.unparse(n.value) for n in ast.walk(code.tree) if isinstance(n, ast.Assign)
                 for t in n.targets}  # fmt: skip
        powers = [
            n for n in ast.walk(code.tree)
            if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow) and DISCOUNTS.search(ast.unparse(n.left))
            and not isinstance(n.right, ast.Constant) and re.search(r"range|\bk\b|\bi\b|steps", ast.unparse(n.right))
        ]  # fmt: skip
        for node in (n for n in ast.walk(code.tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add)):
            first = _first_factor(node.right)
            base = ast.unparse(powers[0].left) if powers else ""
            rest = ast.unparse(node.right).removeprefix(f"{base} *")
            left = ast.unparse(node.left)
            left += " ".join(value for name, value in texts.items() if re.search(rf"\b{re.escape(name)}\b", left))
            is_sum = "sum" in left and "**" in left and DISCOUNTS.search(rest) is None
            if powers and first is not node.right and ast.unparse(first) == base and is_sum and BOOTSTRAPS.search(rest):
                yield Line(
                    f"{_said(code, node)} discounts several rewards by powers of {base}, and the value behind them by "
                    f"{base} alone, as if it were one step later; write {base} ** n",
                    subject=code.name,
                )
                break


def _first_factor(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        node = node.left
    return node


@check("target-not-flipped", "likely", at="probe")
def flipped_apart(seen: Evidence) -> Lines:
    """Two parts of a sample are turned together, by one condition, but along different dimensions."""
    for code in code_of(seen):
        for body in (n.body for n in ast.walk(code.tree) if isinstance(n, ast.If)):
            turned: dict[str, tuple[str, ast.AST]] = {}
            for node in (n for n in body if isinstance(n, ast.Assign)):
                for name, value in _assigned(node):
                    if (turn := _turn(name, value)) is not None:
                        turned[name] = (turn, node)
            turns = {turn for turn, _ in turned.values()}
            if re.search(r"permute\(|2, 0, 1|to_tensor|ToTensor", ast.unparse(code.tree)):
                continue  # of pictures whose channels are last
            if len(turned) > 1 and len(turns) > 1:
                yield Line(
                    f"{_said(code, next(iter(turned.values()))[1])} turns {' and '.join(turned)} along different "
                    "dimensions, so they do not fit each other any more; turn all of them alike",
                    subject=code.name,
                )


def _assigned(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """Names, and what is assigned to each."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from ((ast.unparse(t), v) for t, v in zip(target.elts, value.elts, strict=True))
    elif isinstance(target, ast.Name):
        yield target.id, value


def _turn(name: str, value: Any) -> str | None:
    """How a value is turned that is assigned to its own name, if that is the same for all numbers of dimensions."""
    kind = called_name(value) if isinstance(value, ast.Call) else ""
    if kind not in FLIPS:
        return None
    owner = value.func.value if isinstance(value.func, ast.Attribute) else None
    args = [ast.unparse(a) for a in (*value.args, *(k.value for k in value.keywords))]
    if name in args:
        args.remove(name)
    elif owner is None or ast.unparse(owner) != name:
        return None
    dims = [d for arg in args for d in re.findall(r"-?[0-9]+", arg)]
    is_known = all(re.fullmatch(r"[-0-9, ()\[\]]*", arg) for arg in args) and all(d.startswith("-") for d in dims)
    return f"{kind} {dims}" if is_known and (dims or kind not in ("flip", "roll", "rot90")) else None
