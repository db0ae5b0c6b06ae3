"""Judge the references in the record of somebody else: what they compute, how they multiply, and what they read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from boltcutter.config.errors import ConfigError, one_line
from boltcutter.config.redaction import VARIABLE, looks_secret
from boltcutter.files import REMEDY
from boltcutter.project import BUILTIN_CONFIGS, Project, private_variables

MAX_EXPANDED = 1 << 24  # characters of all texts together, with references resolved
PER_REFERENCE = 1000  # characters that take as long as OmegaConf takes to resolve a reference
MAX_TEXTS, MAX_CHAIN = 20_000, 100  # for which that is computed, and references that lead to another
MAX_NESTED = 16  # references within a reference
# A reference to another key or to an environment variable. Other resolvers compute values, which may contain _target_.
PLAIN_REFERENCE = re.compile(
    r"\$\{\s*(?:oc\.(?:env|select):\s*[\w.]+\s*(?:,[^{}]*)?|oc\.decode:\s*\$\{oc\.env:\w+(?:,[\w.+-]*)?\}\s*|[\w.\[\]/\0-]+\s*)\}"
)
INNERMOST = re.compile(r"\$\{(?:\s*oc\.select:)?\s*([^${},]*)[^${}]*\}")
WHOLE = re.compile(r"\$\{[^{}]*\}|\$\{oc\.decode:\s*\$\{[^{}]*\}\s*\}")  # a text that is one reference and nothing else

Text = tuple[tuple[str, ...], str]  # path of keys, and text


def check_references(node: Any, where: str, project: Project | None) -> None:
    """Check all references in a part of a record.

    Raises:
        ConfigError: They would multiply, compute values, read the environment where no file in configs does, or send it
            elsewhere.
    """
    check_number(node, where)
    texts = [(path, text) for path, text in _texts(node) if "${" in text]
    if text := next((text for _, text in texts if _computes(text)), None):
        raise ConfigError(
            f"{where}: its record.json has {one_line(text[:200])}, which computes a value or reads a secret; {REMEDY}"
        )
    reading = [(path, text) for path, text in texts if "oc.env" in text]
    known = known_texts(project) if reading else frozenset()
    if text := next((text for path, text in reading if (path[-1:], text) not in known), None):
        raise ConfigError(
            f"{where}: its record.json has {one_line(text[:200])}, which reads your environment, as no file "
            f"in configs does; {REMEDY}"
        )
    if text := next(_spreading(texts, {path for path, _ in reading}, known), None):
        raise ConfigError(
            f"{where}: its record.json has {one_line(text[:200])}, which holds a value of your environment; {REMEDY}"
        )


def check_number(node: Any, where: str) -> None:
    """Check that references are few enough to be resolved.

    Raises:
        ConfigError: They are not, or multiply.
    """
    every = list(_texts(node))
    if (count := sum("${" in text for _, text in every)) and _expanded(every) > MAX_EXPANDED:
        raise ConfigError(f"{where}: its record.json has {count} texts with references, which multiply; {REMEDY}")


def _texts(node: Any, path: tuple[str, ...] = ()) -> Iterator[Text]:
    if isinstance(node, dict | list):
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _texts(inner, (*path, str(key)))
    elif isinstance(node, str):
        yield path, node


def _computes(text: str) -> bool:
    """Whether a text has resolvers that could create a ``_target_``, as ``oc.create``, or reads a secret variable."""
    left = text
    for _ in range(MAX_NESTED):  # from the innermost reference outwards
        left = PLAIN_REFERENCE.sub("\0", left)
    return "${" in left or any(looks_secret(name) or name in private_variables for name in VARIABLE.findall(text))


def _named(path: tuple[str, ...], text: str) -> list[tuple[str, ...]] | None:
    """The keys that a text refers to; None if one of them is computed."""
    found: list[tuple[str, ...]] = []
    left = text
    for _ in range(MAX_NESTED):
        for name in INNERMOST.findall(left):
            if not name.lstrip().startswith("oc."):  # which names a variable, or decodes one
                if "\0" in name:
                    return None
                levels = len(name) - len(name.lstrip("."))
                above = path[: len(path) - levels] if levels else ()
                found.append((*above, *(part for part in re.split(r"[.\[\]/]+", name.strip()) if part)))
        if "${" not in (left := INNERMOST.sub("\0", left)):
            return found
    return None


def _reaches(name: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether a reference to a key leads to the text at a path: there, below, or above, from where it may lead on."""
    length = min(len(name), len(path))
    return name[:length] == path[:length]


def _cost(text: str) -> int:
    return len(text) + PER_REFERENCE * text.count("${") + 1


def _expanded(texts: list[Text]) -> float:
    """The characters that all texts have together with references resolved, or more; infinite in a circle."""
    referring = {path: text for path, text in texts if "${" in text}
    longest = max((_cost(text) for _, text in texts), default=0)
    doublings = sum(text.count("${") - 1 for text in referring.values())
    if doublings < 64 and (bound := len(texts) * longest * 2.0**doublings) <= MAX_EXPANDED:
        return bound
    names = {path: _named(path, text) for path, text in referring.items()}
    if len(texts) > MAX_TEXTS or any(found is None for found in names.values()):
        return math.inf
    below: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path, _ in texts:
        for depth in range(1, len(path) + 1):
            below.setdefault(path[:depth], []).append(path)
    sizes: dict[tuple[str, ...], float] = {path: _cost(text) for path, text in texts if path not in referring}

    def size(path: tuple[str, ...], above: frozenset[tuple[str, ...]]) -> float:
        if path in above or len(above) > MAX_CHAIN:
            return math.inf
        if path not in sizes:
            reached = [
                other
                for name in names[path] or ()
                for other in (*below.get(name, ()), *(name[:k] for k in range(1, len(name)) if name[:k] in referring))
            ]
            sizes[path] = _cost(referring[path]) + sum(size(other, above | {path}) for other in reached)
        return sizes[path]

    return sum(size(path, frozenset()) for path, _ in texts)


def _spreading(texts: list[Text], reading: set[tuple[str, ...]], known: frozenset[Any]) -> Iterator[str]:
    """Yield texts that would hold a value of the environment beside others, as in an address."""
    spread = set(reading)
    while spread:
        more = set()
        for path, text in texts:
            if path in spread or (names := _named(path, text)) == []:
                continue
            if names is None or any(_reaches(name, other) for name in names for other in spread):
                more.add(path)
                if not WHOLE.fullmatch(text) and (path[-1:], text) not in known:
                    yield text
        if not more:
            return
        spread |= more


@cache
def known_texts(project: Project | None) -> frozenset[tuple[tuple[str, ...], str]]:
    """The texts with references in configuration files of the project and of the library, with their last keys."""
    folders = {*(project.config_dirs if project else ()), BUILTIN_CONFIGS}
    found = set()
    for file in (file for folder in folders for file in Path(folder).rglob("*.yaml")):
        text = file.read_text()
        if "${" in text:
            found |= {(path[-1:], value) for path, value in _texts(yaml.safe_load(text)) if "${" in value}
    return frozenset(found)
