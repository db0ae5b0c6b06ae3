"""The errors of a configuration: what the user wrote, why it is wrong and how to correct it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

# Kinds of mistakes, which --json names. They are stable; a new kind of mistake gets a new one.
Kind = Literal[
    "invalid_override",
    "invalid_file",
    "unknown_flag",
    "unknown_command",
    "unknown_option",
    "unknown_key",
    "secret",
    "unresolved_reference",
    "not_installed",
    "unknown_class",
    "missing_value",
    "wrong_type",
    "unknown_run",
    "conflict",
    "invalid_value",  # any other
]


class Parts(NamedTuple):
    """A mistake: ``setting=value: problem; remedy``."""

    setting: str | None
    value: str | None
    problem: str | None
    remedy: str | None

    def __str__(self) -> str:
        value = "" if self.value is None else f"={self.value}"
        return f"{self.setting}{value}: {self.problem}{'' if self.remedy is None else f'; {self.remedy}'}"


class Mistake(str):
    """What the user wrote wrong, in one line: ``setting=value: problem; remedy``.

    Args:
        line: The line; what it quotes is escaped.
        kind: What kind of mistake it is, whatever the line quotes.

    Attributes:
        parts: What the line consists of, where ``of`` has made it; None if only the line is known.
    """

    kind: Kind
    parts: Parts | None

    def __new__(cls, line: object, kind: Kind = "invalid_value", parts: Parts | None = None) -> Mistake:
        """Make a text with a kind."""
        made = super().__new__(cls, quoted(str(line)))
        made.kind, made.parts = kind, parts
        return made

    @classmethod
    def of(
        cls,
        setting: str,
        problem: str,
        remedy: str | None = None,
        *,
        value: object = None,
        kind: Kind = "invalid_value",
    ) -> Mistake:
        """Make the line from its parts, so that nobody has to look for these in what the user wrote.

        Args:
            setting: Key, flag or file.
            problem: Why it is wrong.
            remedy: What to do.
            value: As the user wrote it; None if the setting itself is wrong.
            kind: What kind of mistake it is.
        """
        parts = Parts(*(None if part is None else quoted(str(part)) for part in (setting, value, problem, remedy)))
        return cls(str(parts), kind, parts)

    @property
    def setting(self) -> str:
        """Key, flag or file that is wrong, as far as it is known."""
        return (self.parts and self.parts.setting) or self.partition("=")[0].partition(":")[0]

    def mapped(self, change: Callable[[str], str]) -> Mistake:
        """The mistake with another text, which ``change`` returns for the line and each of its parts."""
        parts = self.parts and Parts(*(part and change(part) for part in self.parts))
        return Mistake(change(str(self)), self.kind, parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Mistake, (str(self), self.kind, self.parts)


class ConfigError(Exception):
    """Mistakes in what the user wrote, each of which is reported in one line.

    Args:
        mistakes: The lines.
        kind: What kind of mistakes those are that do not say it.

    Attributes:
        mistakes: The lines, each with its kind.
    """

    def __init__(self, *mistakes: object, kind: Kind = "invalid_value") -> None:
        self.mistakes = [line if isinstance(line, Mistake) else Mistake(line, kind) for line in mistakes]
        super().__init__(*self.mistakes)

    def __str__(self) -> str:
        return "\n".join(self.mistakes)


def suggestion(word: str, known: Iterable[Any], cutoff: float = 0.6) -> str | None:
    """``did you mean …?`` where something known is at least as similar to ``word`` as ``cutoff``, else None."""
    near = difflib.get_close_matches(word, map(str, known), 1, cutoff)
    return f"did you mean {near[0]}?" if near else None


def hint(word: str, known: Iterable[Any], cutoff: float = 0.6) -> str:
    """``suggestion`` as the end of a line; nothing if there is none."""
    near = suggestion(word, known, cutoff)
    return f"; {near}" if near else ""


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
        kind: Kind = "not_installed" if isinstance(error, ImportError) else "invalid_value"
        raise ConfigError(one_line(error), kind=kind) from error


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
        raise ConfigError(
            *(
                line if f"{key}=" in line else Mistake(f"{setting}: {line.removeprefix(f'{value}: ')}", line.kind)
                for line in (error.mistakes if isinstance(error, ConfigError) else [Mistake(error)])
            )
        ) from error
