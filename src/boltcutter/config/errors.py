"""The errors of a configuration: what the user wrote, why it is wrong and how to correct it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class ConfigError(Exception):
    """Mistakes in what the user wrote, each of which is reported in one line, whatever it quotes."""

    def __init__(self, *mistakes: object) -> None:
        super().__init__(*(quoted(str(mistake)) for mistake in mistakes))

    def __str__(self) -> str:
        return "\n".join(self.args)


def hint(word: str, known: Iterable[Any], cutoff: float = 0.6) -> str:
    """``; did you mean …?`` where something known is at least as similar to ``word`` as ``cutoff``, else nothing."""
    near = difflib.get_close_matches(word, map(str, known), 1, cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def one_line(error: object, limit: int | None = None) -> str:
    """An error's text on one line; with a limit, as part of a sentence of at most this many characters."""
    if isinstance(error, OSError) and error.filename and error.strerror:  # instead of "[Errno 2] …"
        error = f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    text = " ".join(str(error).split())
    if limit is None:
        return text
    return (text if len(text) <= limit else f"{text[:limit]}…").rstrip(".;")


def printable(text: str) -> str:
    """Return a text in which control characters but line ends are escaped, as a terminal would execute them."""
    if text.replace("\n", "").isprintable():  # at once, as a log may have a hundred million characters
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    """Return a text on one line, in which control characters are escaped."""
    return printable(text).replace("\n", "\\n")


@contextmanager
def as_config_error() -> Iterator[None]:
    """Convert an error of a component into a ConfigError of one line.

    Raises:
        ConfigError: In place of a ValueError, OSError or ImportError.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(one_line(error)) from error


@contextmanager
def prefix_errors(setting: str, *kinds: type[Exception]) -> Iterator[None]:
    """Prefix the messages of errors raised in this context with the setting that caused them.

    Args:
        setting: ``key=value``.
        kinds: Exceptions that are converted to a ``ConfigError``.

    Raises:
        ConfigError: In place of a ``ConfigError``, or of one of ``kinds``.
    """
    caught: tuple[type[Exception], ...] = (ConfigError, *kinds)
    try:
        yield
    except caught as error:
        key, _, value = setting.partition("=")
        texts = error.args if isinstance(error, ConfigError) else [str(error)]
        raise ConfigError(
            *(text if f"{key}=" in text else f"{setting}: {text.removeprefix(f'{value}: ')}" for text in texts)
        ) from error
