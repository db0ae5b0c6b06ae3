"""How far the references of a configuration expand: known before any of them is resolved, which would take forever."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

MAX_EXPANDED = 1 << 24  # characters of all texts together, with references resolved
PER_REFERENCE = 1000  # characters that take as long as OmegaConf takes to resolve a reference
MAX_TEXTS, MAX_CHAIN = 20_000, 100  # for which that is computed, and references that lead to another
MAX_NESTED = 16  # references within a reference
INNERMOST = re.compile(r"\$\{(?:\s*oc\.select:)?\s*([^${},]*)[^${}]*\}")

Text = tuple[tuple[str, ...], str]  # path of keys, and text


def texts_of(node: Any, path: tuple[str, ...] = ()) -> Iterator[Text]:
    """The texts of plain values, and their paths."""
    if isinstance(node, dict | list):
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from texts_of(inner, (*path, str(key)))
    elif isinstance(node, str):
        yield path, node


def named(path: tuple[str, ...], text: str) -> list[tuple[str, ...]] | None:
    """The keys that the text at a path refers to, of a computed key those above; None if there are none above."""
    found: list[tuple[str, ...]] = []
    left = text
    for _ in range(MAX_NESTED):
        for name in INNERMOST.findall(left):
            if not name.lstrip().startswith("oc."):  # which names a variable, or decodes one
                levels = len(name) - len(name.lstrip("."))
                above = path[: len(path) - levels] if levels else ()
                parts = (*above, *(part for part in re.split(r"[.\[\]/]+", name.strip()) if part))
                known = tuple(takewhile(lambda part: "\0" not in part, parts))
                if not known and parts:
                    return None
                found.append(known)
        if "${" not in (left := INNERMOST.sub("\0", left)):
            return found
    return None


def multiplies(node: Any, *, is_own: bool = False) -> str | None:
    """The key of a text with which references expand too far to be resolved; None if they do not.

    Args:
        node: Plain values.
        is_own: Whether what cannot be known counts as nothing: computed keys, and circles, which OmegaConf reports.
    """
    sizes = _expanded([*texts_of(node)], is_own=is_own)
    if sum(sizes.values()) <= MAX_EXPANDED:
        return None
    too_large = {path: size for path, size in sizes.items() if size > MAX_EXPANDED} or sizes
    smallest, _ = min(too_large.items(), key=lambda item: item[1])  # to which others refer
    return ".".join(smallest)


def _cost(text: str) -> int:
    return len(text) + PER_REFERENCE * text.count("${") + 1


def _expanded(texts: list[Text], *, is_own: bool) -> dict[tuple[str, ...], float]:
    """The characters that each text has with references resolved, or more; nothing if they are few in any case."""
    referring = {path: text for path, text in texts if "${" in text}
    longest = max((_cost(text) for _, text in texts), default=0)
    count = sum(text.count("${") for text in referring.values())  # each of which at most doubles something
    if count < 64 and len(texts) * longest * 2.0**count <= MAX_EXPANDED:
        return {}
    names = {path: named(path, text) for path, text in referring.items()}
    below: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path, _ in texts:
        for depth in range(1, len(path) + 1):
            below.setdefault(path[:depth], []).append(path)
    if not is_own and (len(texts) > MAX_TEXTS or any(found is None for found in names.values())):
        return dict.fromkeys(referring, math.inf)
    sizes: dict[tuple[str, ...], float] = {path: _cost(text) for path, text in texts if path not in referring}

    def size(path: tuple[str, ...], above: frozenset[tuple[str, ...]]) -> float:
        if path in above or len(above) > MAX_CHAIN:
            return 0 if is_own else math.inf
        if path not in sizes:
            reached = [
                other
                for name in names[path] or ()
                for other in (*below.get(name, ()), *(name[:k] for k in range(1, len(name)) if name[:k] in referring))
            ]
            sizes[path] = _cost(referring[path]) + sum(size(other, above | {path}) for other in reached)
        return sizes[path]

    return {path: size(path, frozenset()) for path, _ in texts if not is_own or path in referring}
