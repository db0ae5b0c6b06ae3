"""Judge the references in the record of somebody else: what they compute, how they multiply, and what they read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from boltcutter.config.errors import ConfigError, one_line
from boltcutter.config.redaction import VARIABLE, looks_secret
from boltcutter.config.references import MAX_NESTED, Text, multiplies, named, texts_of
from boltcutter.config.values import read_plain_yaml
from boltcutter.files import REMEDY
from boltcutter.project import BUILTIN_CONFIGS, Project, private_variables

# A reference to another key or to an environment variable. Other resolvers compute values, which may contain _target_.
PLAIN_REFERENCE = re.compile(
    r"\$\{\s*(?:oc\.(?:env|select):\s*[\w.]+\s*(?:,[^{}]*)?|oc\.decode:\s*\$\{oc\.env:\w+(?:,[\w.+-]*)?\}\s*|[\w.\[\]/\0-]+\s*)\}"
)
WHOLE = re.compile(r"\$\{[^{}]*\}|\$\{oc\.decode:\s*\$\{[^{}]*\}\s*\}")  # a text that is one reference and nothing else


def check_references(node: Any, where: str, project: Project | None) -> None:
    """Check all references in a part of a record.

    Raises:
        ConfigError: They would multiply, compute values, read the environment where no file in configs does, or send it
            elsewhere.
    """
    check_number(node, where)
    texts = [(path, text) for path, text in texts_of(node) if "${" in text]
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
    """Check that references can be followed, and are few enough to be resolved.

    Raises:
        ConfigError: They compute values, or multiply.
    """
    if text := next((text for _, text in texts_of(node) if "${" in text and _computes(text)), None):
        raise ConfigError(
            f"{where}: its record.json has {one_line(text[:200])}, which computes a value or reads a secret; {REMEDY}"
        )
    if key := multiplies(node):
        raise ConfigError(
            f"{where}: its record.json has references which multiply, as in {one_line(key[:200])}; {REMEDY}"
        )


def _computes(text: str) -> bool:
    """Whether a text has resolvers that could create a ``_target_``, as ``oc.create``, or reads a secret variable."""
    left = text
    for _ in range(MAX_NESTED):  # from the innermost reference outwards
        left = PLAIN_REFERENCE.sub("\0", left)
    return "${" in left or any(looks_secret(name) or name in private_variables for name in VARIABLE.findall(text))


def _reaches(name: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether a reference to a key leads to the text at a path: there, below, or above, from where it may lead on."""
    length = min(len(name), len(path))
    return name[:length] == path[:length]


def _spreading(texts: list[Text], reading: set[tuple[str, ...]], known: frozenset[Any]) -> Iterator[str]:
    """Yield texts that would hold a value of the environment beside others, as in an address."""
    spread = set(reading)
    while spread:
        more = set()
        for path, text in texts:
            if path in spread or (names := named(path, text)) == []:
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
    """The texts with references in configuration files of the project and of the library, with their last keys.

    A file that cannot be read allows nothing: it may be an option that the user is writing, and that nothing selects.
    """
    texts = (text for text in (project or Project(BUILTIN_CONFIGS)).option_texts() if "${" in text)
    found = (item for text in texts for item in texts_of(read_plain_yaml(text)))
    return frozenset((path[-1:], value) for path, value in found if "${" in value)
