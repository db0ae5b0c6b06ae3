"""What stays of Python code when other files are dropped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from project.mentions import Gone
from project.names import WIDTH


class Edit(NamedTuple):
    """``text`` from ``start`` to ``end`` becomes ``new``."""

    start: int
    end: int
    new: str = ""


def prune_code(text: str, gone: Gone, *, tests: bool, whole: str) -> str:
    """Leave out what names something that is dropped, then what nobody uses any more.

    Of all code, elements of constants and of decorators go: rows of a table, cases of a test. Of tests, statements too.

    Args:
        text: What is left already of ``whole``.
        gone: What is dropped.
        tests: Whether these are tests.
        whole: The code as the template has it.
    """
    before = _Code(whole, gone, tests).used()
    pruned = _Code(text, gone, tests)
    while edits := pruned.imports() or pruned.elements() or pruned.statements() or pruned.orphans(before):
        pruned.apply(edits)
    return re.sub(r"\n{4,}", "\n\n\n", pruned.text).rstrip("\n") + "\n"


class _Code:
    def __init__(self, text: str, gone: Gone, tests: bool) -> None:
        self.text, self.gone, self.tests = text, gone, tests
        self.dead: set[str] = set()  # names that stood for what is dropped
        self.fixtures: set[str] = set()  # likewise, asked for as arguments
        self._parse()

    def _parse(self) -> None:
        self.tree = ast.parse(self.text)
        self.names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def apply(self, edits: list[Edit]) -> None:
        for start, end, new in sorted(edits, reverse=True):
            self.text = self.text[:start] + new + self.text[end:]
        self._parse()

    def used(self) -> set[str]:
        """Names that are read anywhere, and arguments, which may be fixtures."""
        names = {node.id for node in self.names if isinstance(node.ctx, ast.Load)}
        return names | {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}

    def imports(self) -> list[Edit]:
        """Of what is dropped."""
        edits = []
        for node in self.tree.body:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            origin = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
            going = {alias.name for alias in node.names if self.gone.mention.search(f"{origin} {alias.name}")}
            self.dead |= {alias.asname or alias.name for alias in node.names if alias.name in going}
            edits += self._without(node, going)
        return edits

    def elements(self) -> list[Edit]:
        """Of tables, and of decorators."""
        edits: list[Edit] = []
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                one = isinstance(node.value, ast.List) and all(_is_word(element) for element in node.value.elts)
                if not (one and self.tests):  # the words of one command make sense together or not at all
                    edits += self._elements_below(node.value, all_may_go=not isinstance(node.value, ast.List))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                for decorator in node.decorator_list if self.tests else ():
                    edits += self._elements_below(decorator, all_may_go=False)
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Dict):
                        edits += self._elements_below(inner.value, all_may_go=False)
        return edits

    def statements(self) -> list[Edit]:
        """Tests, and what they share."""
        edits = []
        for node in self.tree.body if self.tests else []:
            if self._tells(*self._span(node)) or self._asks(node):
                edits.append(self._whole(node))
                self.dead.update(_names(node))
                if isinstance(node, ast.FunctionDef) and any("fixture" in ast.dump(d) for d in node.decorator_list):
                    self.fixtures.add(node.name)
        return edits

    def orphans(self, before: set[str]) -> list[Edit]:
        """What was used, and is not."""
        lost, edits = before - self.used(), []
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound = {alias.name: (alias.asname or alias.name).partition(".")[0] for alias in node.names}
                edits += self._without(node, {name for name, own in bound.items() if own in lost})
            elif self.tests and _names(node) and lost.issuperset(_names(node)):
                edits.append(self._whole(node))
                self.dead.update(_names(node))
        return edits

    def _tells(self, start: int, end: int) -> bool:
        if self.gone.mention.search(self.text[start:end]):
            return True
        return bool(self.dead) and any(
            node.id in self.dead and start <= self._place(node)[0] < end for node in self.names
        )

    def _asks(self, node: ast.stmt) -> bool:
        return any(isinstance(inner, ast.arg) and inner.arg in self.fixtures for inner in ast.walk(node))

    def _elements_below(self, node: ast.expr, *, all_may_go: bool) -> list[Edit]:
        found = list(_elements(node))
        places = [(self._place(first)[0] - 2 * double, self._place(last)[1]) for first, last, double in found]
        going = [self._tells(*place) for place in places]
        if not places:
            below = (child.value if isinstance(child, ast.keyword) else child for child in ast.iter_child_nodes(node))
            inner = (self._elements_below(child, all_may_go=False) for child in below if isinstance(child, ast.expr))
            return [edit for edits in inner for edit in edits]
        if all(going) and self.tests and not all_may_go:
            return []  # nothing would be left to try
        return self._cut_out(places, going, isinstance(node, ast.Tuple))

    def _cut_out(self, places: list[tuple[int, int]], going: list[bool], is_tuple: bool) -> list[Edit]:
        """Elements with their commas: lines where they have some to themselves, else runs of neighbours."""
        edits = []
        first = 0  # of the run that we are in
        for at, (start, end) in enumerate(places):
            first = first if at and going[at - 1] else at
            begin = self.text.rfind("\n", 0, start) + 1
            rest = re.compile(r",?[ \t]*(#[^\n]*)?\n").match(self.text, end)
            if going[at] and rest and not self.text[begin:start].strip():
                edits.append(Edit(begin, rest.end()))
                going[at] = False
            elif going[at] and at + 1 == len(places):
                comma = "," if is_tuple and first == 1 else ""  # of a single element
                edits.append(Edit(places[first - 1][1] if first else places[0][0], end, comma))
            elif going[at] and not going[at + 1]:
                edits.append(Edit(places[first][0], places[at + 1][0]))
        return edits

    def _without(self, node: ast.Import | ast.ImportFrom, going: set[str]) -> list[Edit]:
        """An import without some of its names."""
        if not going:
            return []
        kept = [alias for alias in node.names if alias.name not in going]
        if not kept:
            return [self._whole(node)]
        node.names = kept
        line = ast.unparse(node)
        if len(line) > WIDTH:
            head, _, names = line.partition(" import ")
            line = f"{head} import (\n" + "".join(f"    {name},\n" for name in names.split(", ")) + ")"
        return [Edit(*self._place(node), line)]

    def _whole(self, node: ast.stmt) -> Edit:
        """A statement with the comment above it, and the blank lines that kept it apart."""
        start, end = self._span(node)
        first = self.text.count("\n", 0, start)
        last = self.text.count("\n", 0, end)
        while first and self.lines[first - 1].startswith("#"):
            first -= 1
        if last + 1 >= len(self.lines) or not self.lines[last + 1].strip():
            while first and not self.lines[first - 1].strip():
                first -= 1
        return Edit(self.starts[first], self.starts[last + 1])

    def _span(self, node: ast.stmt) -> tuple[int, int]:
        start, end = self._place(node)
        for decorator in getattr(node, "decorator_list", []):
            start = min(start, self._place(decorator)[0] - 1)
        return start, end

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node begins and ends in the text; Python counts bytes within a line."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        pairs = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        start, end = (self.starts[row - 1] + len(self.lines[row - 1].encode()[:col].decode()) for row, col in pairs)
        return start, end


def _is_word(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred | ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _elements(node: ast.expr) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Beginning and end of each element of a literal, and whether it is ``**``."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield key or value, value, key is None
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        for element in node.elts:
            yield element, element, False


def _names(node: ast.stmt) -> set[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
