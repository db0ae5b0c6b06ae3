"""Read from the Python files of another project what its configuration leaves open, without importing them."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from boltcutter.config.errors import ConfigError

IGNORED = {".git", ".venv", "venv", "env", "node_modules", "site-packages", "build", "dist", "__pycache__"}
MAX_SIZE = 1 << 20  # characters of a file
RESOLVERS = "register_new_resolver", "register_resolver"  # before OmegaConf 2.4, and from 2.4 on
NO_ARGUMENTS = {"LightningModule", "LightningDataModule", "Module", "Callback", "ABC", "Generic", "object"}
REGISTER = RESOLVERS[tuple(map(int, version("omegaconf").split(".")[:2])) >= (2, 4)]


class NotConstantError(ValueError):
    """An expression whose value only the program knows."""


class SourceFile:
    """A Python file of a project.

    Args:
        file: The file.
        root: The root folder of the project.

    Raises:
        ConfigError: It is not valid Python.
    """

    def __init__(self, file: Path, root: Path) -> None:
        self.file, self.root = file, root
        try:
            self.tree = ast.parse(file.read_text(errors="replace")[:MAX_SIZE])
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{file}: not valid Python ({type(error).__name__}); correct it") from None

    @cached_property
    def module(self) -> str:
        """The dotted name under which it is imported: from the root, or from ``src`` if that is no package itself."""
        path = self.file.relative_to(self.root).with_suffix("")
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        is_inside = parts[:1] == ("src",) and not (self.root / "src" / "__init__.py").is_file()
        package = self.root / "src" / (parts[1] if len(parts) > 1 else "")
        inside = is_inside and (package / "__init__.py").is_file()
        return ".".join(parts[1:] if inside else parts)

    @cached_property
    def names(self) -> dict[str, str]:
        """The dotted path of each name that it imports or defines."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[node.name] = f"{self.module}.{node.name}"
            elif isinstance(node, ast.Import):
                found |= {alias.asname or alias.name.partition(".")[0]: _bound(alias) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                package = self._package(node)
                found |= {alias.asname or alias.name: f"{package}.{alias.name}" for alias in node.names}
        return found

    @cached_property
    def assignments(self) -> list[tuple[str, ast.expr]]:
        """Each name to which an expression is assigned, anywhere in the file, with the expression."""
        return _assignments(self.tree)

    @property
    def assigned(self) -> dict[str, ast.expr]:
        """The expression that is last assigned to each name."""
        return dict(self.assignments)

    def assigned_at(self, node: ast.expr) -> dict[str, ast.expr]:
        """The expression of each name at a node: what is assigned above it in the function around it, else anywhere.

        Of a name that the branches of an ``if`` set differently, it is ``a if test else b``.
        """
        functions = [each for each in ast.walk(self.tree) if isinstance(each, ast.FunctionDef)]  # the outer ones first
        around = [each for each in functions if any(inner is node for inner in ast.walk(each))]
        found = self.assigned
        scopes: list[ast.Module | ast.FunctionDef] = [self.tree, *around]
        for scope in scopes:
            found = _assigned(scope.body, found, node if scope is scopes[-1] else None)
        return found

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Each call, with the last part of the name of what is called."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                yield (node.func.id if isinstance(node.func, ast.Name) else node.func.attr), node

    def place(self, node: ast.AST) -> str:
        """File and line of a node, from the root of the project."""
        return f"{self.file.relative_to(self.root)}:{getattr(node, 'lineno', 1)}"

    def path(self, node: ast.expr) -> str | None:
        """The dotted path of a class or function that a name refers to."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        first, dot, rest = ast.unparse(node).partition(".")
        return f"{self.names[first]}{dot}{rest}" if first in self.names else None

    def value(self, node: ast.expr) -> Any:
        """The plain value of an expression; a call of a class or function is a mapping with ``_target_``.

        Raises:
            NotConstantError: It has no such value.
        """
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(entry) for entry in node.elts]
        if isinstance(node, ast.Dict):
            return {ast.literal_eval(key): self.value(v) for key, v in zip(node.keys, node.values, strict=True) if key}
        if isinstance(node, ast.Name) and node.id in self.assigned:
            try:
                return self.value(self.assigned[node.id])
            except RecursionError:  # x = x
                raise NotConstantError(node.id) from None
        if isinstance(node, ast.Call):
            target, arguments = self.path(node.func), list(node.args)
            if target and target.endswith(".lazy_instance"):
                target = self.path(arguments.pop(0))
            if target and all(keyword.arg for keyword in node.keywords):
                positional = {"_args_": [self.value(entry) for entry in arguments]} if arguments else {}
                return {"_target_": target, **positional} | {str(k.arg): self.value(k.value) for k in node.keywords}
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError):
            raise NotConstantError(ast.unparse(node)) from None

    def constructors(self, name: str) -> Iterator[ast.arguments]:
        """The arguments of a class's constructor, or of a function, if this file defines it."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from (n.args for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
            elif isinstance(node, ast.FunctionDef) and node.name == name and node in self.tree.body:
                yield node.args

    def defaults(self, path: str) -> dict[str, Any]:
        """The constant defaults of the arguments of a class's constructor, if this file defines the class."""
        name = path.removeprefix(f"{self.module}.")
        for made in self.constructors(name) if path == f"{self.module}.{name}" else ():
            last = [*zip(reversed(made.args), reversed(made.defaults), strict=False)]
            last += [(a, d) for a, d in zip(made.kwonlyargs, made.kw_defaults, strict=True) if d]
            return {a.arg: d.value for a, d in last if isinstance(d, ast.Constant)}
        return {}

    def extract(self, statements: list[ast.stmt]) -> str:
        """Statements with the imports, functions and values of this file that they need, as the text of a module."""
        known: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            for name in _defined(node):
                known[name] = node
        needed, pending = [*statements], [*statements]
        while pending:
            names = {n.id for n in ast.walk(pending.pop()) if isinstance(n, ast.Name)} - {*dir(builtins)}
            new = [known[name] for name in sorted(names & known.keys()) if known[name] not in needed]
            needed, pending = [*needed, *new], [*pending, *new]
        order = {id(node): index for index, node in enumerate(self.tree.body)}
        ordered = sorted(needed, key=lambda node: order.get(id(node), len(order) + needed.index(node)))
        return "\n".join(ast.unparse(self._absolute(node)) for node in ordered)

    def unknown_names(self, call: ast.Call) -> list[str]:
        """The names in a call that the file itself does not define, such as arguments of the function around it."""
        given = {argument.arg for node in ast.walk(call) if isinstance(node, ast.arguments)
                 for argument in ast.walk(node) if isinstance(argument, ast.arg)}  # fmt: skip
        names = [node.id for node in ast.walk(call) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        given |= {node.id for node in ast.walk(call) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        known = {name for node in self.tree.body for name in _defined(node)} | {*dir(builtins)} | given
        return sorted({*names} - known)

    def _absolute(self, node: ast.stmt) -> ast.stmt:
        """An import as it is written outside of the file's package."""
        if isinstance(node, ast.ImportFrom) and node.level:
            return ast.ImportFrom(self._package(node), node.names, 0)
        return node

    def _package(self, node: ast.ImportFrom) -> str:
        """The module that names are imported from."""
        if not node.level:
            return node.module or ""
        parts = self.module.split(".") + (["__init__"] if self.file.name == "__init__.py" else [])
        return ".".join([*parts[: len(parts) - node.level], *filter(None, [node.module])])


def _assignments(tree: ast.AST) -> list[tuple[str, ast.expr]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [(target.id, node.value) for target in targets if isinstance(target, ast.Name)]
    return sorted(found, key=lambda pair: _position(pair[1]))


def _position(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _assigned(statements: list[ast.stmt], above: dict[str, ast.expr], end: ast.expr | None) -> dict[str, ast.expr]:
    """What each name has after statements, or at an expression in them; itself if it is bound in another way."""
    found = dict(above)
    for statement in statements:
        if end is not None and _position(statement) >= _position(end):
            break
        if isinstance(statement, ast.If):
            body, other = (_assigned(part, found, end) for part in (statement.body, statement.orelse))
            if end is not None and statement.end_lineno and end.lineno <= statement.end_lineno:
                is_below = bool(statement.orelse) and _position(statement.orelse[0]) <= _position(end)
                return other if is_below else body
            for name in {**body, **other}:
                values = [values[name] for values in (body, other) if name in values]
                is_same = values[0] is values[-1]
                found[name] = values[0] if is_same else ast.copy_location(ast.IfExp(statement.test, *values), statement)
        elif isinstance(statement, ast.Match):
            found = _assigned(_as_branches(statement), found, end)
        elif not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            for target, value in _bindings(statement, found):
                found |= _named(target, value)
            for part in ("body", "orelse", "finalbody"):
                found = _assigned(getattr(statement, part, []), found, end)
    return found


def _as_branches(match: ast.Match) -> list[ast.stmt]:
    """A ``match`` of values as the ``if`` and ``elif`` that do the same."""
    rest: list[ast.stmt] = []
    for case in reversed(match.cases):
        pattern = case.pattern
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and case.guard is None:
            rest = case.body
            continue
        test: ast.expr = ast.Name(ast.unparse(pattern))  # of which nothing is known
        if isinstance(pattern, ast.MatchValue) and case.guard is None:
            test = ast.Compare(match.subject, [ast.Eq()], [pattern.value])
        branch = ast.copy_location(ast.If(test, case.body, rest), pattern)
        branch.end_lineno = match.end_lineno
        rest = [branch]
    return rest


def _bindings(statement: ast.stmt, found: dict[str, ast.expr]) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a statement binds, with the expression, if there is one."""
    if isinstance(statement, ast.Assign):
        yield from ((target, statement.value) for target in statement.targets)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield statement.target, statement.value
    elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        left, right = found.get(statement.target.id), statement.value
        both: ast.expr = ast.BinOp(left or statement.target, statement.op, right)
        if isinstance(left, ast.List) and isinstance(right, ast.List) and isinstance(statement.op, ast.Add):
            both = ast.List([*left.elts, *right.elts])
        yield statement.target, ast.copy_location(both, statement)
    elif isinstance(statement, ast.For):
        yield statement.target, None
    elif isinstance(statement, ast.With):
        yield from ((item.optional_vars, None) for item in statement.items if item.optional_vars)


def _named(target: ast.expr, value: ast.expr | None) -> dict[str, ast.expr]:
    if isinstance(target, ast.Name):
        return {target.id: value or target}
    found: dict[str, ast.expr] = {}
    if isinstance(target, ast.Tuple | ast.List):
        is_listed = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        values = value.elts if is_listed and isinstance(value, ast.Tuple | ast.List) else [None] * len(target.elts)
        for part, one in zip(target.elts, values, strict=True):
            found |= _named(part, one)
    return found


def _bound(alias: ast.alias) -> str:
    return alias.name if alias.asname else alias.name.partition(".")[0]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    return [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]


def source_files(root: Path, *words: str) -> list[SourceFile]:
    """The Python files of a project that contain one of these words, those near the root first.

    Raises:
        ConfigError: One of them is not valid Python.
    """
    files = [file for file in root.rglob("*.py") if not IGNORED & {*file.relative_to(root).parts} and file.is_file()]
    files.sort(key=lambda file: (len(file.relative_to(root).parts), file))
    texts = ((file, file.read_text(errors="replace")) for file in files)
    return [SourceFile(file, root) for file, text in texts if any(word in text for word in words)]


def constructors(root: Path, name: str, below: tuple[str, ...] = ()) -> Iterator[ast.arguments | None]:
    """The arguments of a class's constructor, and of those of its bases that get the rest as keywords.

    Args:
        root: Folder of the project.
        name: The class, without its module.
        below: Classes that inherit from it.

    Yields:
        None for a class that the project's files do not define, and for one that reads its keywords itself.
    """
    if name in NO_ARGUMENTS or name in below:
        return
    for source in source_files(root, f"class {name}"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                made = next(source.constructors(name), None)
                yield from [made] if made else []
                if made and made.kwarg and _is_read(node, made.kwarg.arg):
                    yield None
                if made is None or made.kwarg:
                    for base in node.bases:
                        last = ast.unparse(base).partition("[")[0].rpartition(".")[2]
                        yield from constructors(root, last, (*below, name))
                return
    yield None


def _is_read(tree: ast.AST, name: str) -> bool:
    """Whether a mapping of keyword arguments is also used otherwise than passed on, as by ``name.get("size", 3)``."""
    nodes = [*ast.walk(tree)]
    passed = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg is None]
    return any(isinstance(node, ast.Name) and node.id == name and node not in passed for node in nodes)


def parameter(root: Path, name: str, argument: str) -> ast.arg | bool | None:
    """The argument of that name which a class takes, or a base; False if none does, None if that is not known.

    Args:
        root: Folder of the project.
        name: The class, without its module.
        argument: The argument.
    """
    unknown: bool | None = False
    for made in constructors(root, name):
        if made is None:
            unknown = None
            continue
        found = next((a for a in [*made.posonlyargs, *made.args, *made.kwonlyargs] if a.arg == argument), None)
        if found:
            return found
    return unknown


def resolvers(root: Path) -> tuple[str, list[tuple[str, str]]]:
    """The text of a module that registers the resolvers which a project's files register, and a note on each place."""
    texts, rows = list[str](), list[tuple[str, str]]()
    for source in source_files(root, *RESOLVERS):
        found = list[ast.stmt]()
        for name, call in source.calls():
            if name in RESOLVERS and call.args and isinstance(call.args[0], ast.Constant):
                resolver = str(call.args[0].value)
                if missing := source.unknown_names(call):
                    note = (
                        f"the resolver {resolver} needs {', '.join(missing)} of a function; register it there by hand"
                    )
                    rows.append((source.place(call), note))
                    continue
                rows.append((source.place(call), f"the resolver {resolver}"))
                if isinstance(call.func, ast.Attribute):
                    call.func.attr = REGISTER
                call.keywords = [k for k in call.keywords if k.arg != "replace"]
                call.keywords.append(ast.keyword("replace", ast.Constant(True)))
                found.append(ast.fix_missing_locations(ast.Expr(call)))
        for node in (node for node in source.tree.body if isinstance(node, ast.FunctionDef)):
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(RESOLVERS)]
            if (
                "resolver" in node.name
                and not node.args.args
                and any(not (call.args and isinstance(call.args[0], ast.Constant)) for call in calls)
            ):  # such as a loop over names
                texts.append(f"from {source.module} import {node.name}\n\n{node.name}()")
                rows.append((source.place(node), "the resolvers that it registers"))
        if found:
            texts.append(f"# From {source.file.relative_to(root)}\n{source.extract(found)}")
    return "\n\n".join(texts), rows
