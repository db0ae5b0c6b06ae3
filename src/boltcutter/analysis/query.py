"""Filters of runs, such as ``val/accuracy>0.98 and model=resnet and age<7d``.

A filter consists of comparisons, ``and``, ``or``, ``not`` and parentheses. It is parsed, never executed.
"""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from boltcutter.analysis.record import KINDS, STATUSES, Run
from boltcutter.config.errors import ConfigError, hint, one_line
from boltcutter.config.values import format_value

FIELDS: dict[str, Callable[[Run], Any]] = {
    "id": lambda run: run.id,
    "name": lambda run: run.name,
    "status": lambda run: run.status,
    "age": lambda run: time.time() - run.started,
    "started": lambda run: run.started,
    "time": lambda run: run.seconds,
    "devices": lambda run: run.devices,
    "tag": lambda run: list(run.tags),
    "note": lambda run: run.note,
    "kind": lambda run: run.kind,
    "search": lambda run: run.parent,
    "folder": lambda run: run.folder,
}
DURATIONS = ("age", "time")
LISTED = {"status": STATUSES, "kind": KINDS}  # fields with a fixed set of values
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
OPERATORS = ("!=", "=", "~", *ORDERS)
QUOTED = r"""'[^']*'|"[^"]*\""""
TOKEN = re.compile(rf"""\s*({QUOTED}|[()]|!=|<=|>=|[=<>~]|[^\s()=<>~!'"]+|\S)""")
# A value may hold what a key cannot, as in name=a=b, and lists: data.shape=[1, 8, 8]
VALUE = re.compile(rf"""\s*({QUOTED}|\[[^\]]*\]|\$\{{[^}}]*\}}|[^\s()'"\[=<>!~][^\s()'"\[]*)""")
MAX_DEPTH = 100  # of parentheses

Test = Callable[[Run], bool]


@dataclass(frozen=True)
class Query:
    """A parsed filter, which can be called with a run."""

    test: Test
    keys: tuple[tuple[str, int], ...] = ()  # that it uses, with their positions in the text

    def __call__(self, run: Run) -> bool:
        """Return whether a run is selected."""
        return self.test(run)


def select(runs: Sequence[Run], text: str) -> list[Run]:
    """The runs that a filter selects, in their order; all of them for an empty one."""
    query = parse(text)
    for key, position in query.keys:
        if fault := find_fault(runs, key):
            raise _error(text, position, f"{key}: {fault}")
    return [run for run in runs if query(run)]


def parse(text: str) -> Query:
    """Parse a filter."""
    if not text.strip():
        return Query(lambda run: True)
    parser = _Parser(text)
    test = parser.either(0)
    if TOKEN.match(text, parser.at):
        raise parser.unexpected("and, or or the end was expected; quote values with spaces")
    return Query(test, tuple(parser.keys))


def find_fault(runs: Sequence[Run], key: str) -> str | None:
    """Why a key cannot be used for these runs, with what is near; None if at least one has it, or there are none."""
    names = dict.fromkeys(FIELDS)
    for run in runs:
        if key in FIELDS or key in run.metrics or key in run.settings or f"choices.{key}" in run.settings:
            return None
        names |= dict.fromkeys([*run.metrics, *(name.removeprefix("choices.") for name in run.settings)])
    ending = next((name for name in names if name.endswith((f".{key}", f"/{key}"))), None)
    near = f"; did you mean {ending}?" if ending else hint(key, names)
    remedy = near or f"; fields are {', '.join(FIELDS)}"
    return f"no metric, setting or field of these runs{remedy}" if runs else None


def value_of(run: Run, key: str) -> Any:
    """The value of a key: of a field, a metric, the option of a config group, or a setting; None if there is none."""
    if key in FIELDS:
        return FIELDS[key](run)
    if key in run.metrics:
        return run.metrics[key]
    choice = f"choices.{key}"
    return run.settings[choice] if choice in run.settings else run.settings.get(key)


class _Parser:
    """A recursive descent over a filter."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.keys: list[tuple[str, int]] = []

    def either(self, depth: int) -> Test:
        return self.joined("or", any, lambda: self.joined("and", all, lambda: self.negated(depth)))

    def joined(self, word: str, combine: Callable[[Iterable[bool]], bool], part: Callable[[], Test]) -> Test:
        tests = [part()]
        while self.takes(word):
            tests.append(part())
        return lambda run: combine(test(run) for test in tests)

    def negated(self, depth: int) -> Test:
        if depth > MAX_DEPTH:
            raise self.error(self.at, f"more than {MAX_DEPTH} levels; simplify it")
        if self.takes("not"):
            test = self.negated(depth + 1)
            return lambda run: not test(run)
        if self.takes("("):
            test = self.either(depth + 1)
            if not self.takes(")"):
                raise self.unexpected(") was expected; close the parenthesis")
            return test
        return self.comparison()

    def comparison(self) -> Test:
        match = TOKEN.match(self.text, self.at)
        if match is None or match[1] in (*OPERATORS, *"()!\"'", "and", "or"):
            raise self.unexpected("a comparison was expected; write <key>=<value>")
        key, self.at = _unquoted(match[1]), match.end()
        self.keys.append((key, match.start(1)))
        sign = self.takes(*OPERATORS)
        if not sign:
            raise self.unexpected(f"an operator was expected; one of {' '.join(OPERATORS)} must follow {key}")
        value = VALUE.match(self.text, self.at)
        if value is None:
            raise self.unexpected(f"a value was expected; write {key}{sign}<value>")
        self.at = value.end()
        return self.compare(key, sign, _unquoted(value[1]), value.start(1))

    def compare(self, key: str, sign: str, text: str, position: int) -> Test:
        """The test of a comparison."""
        if sign == "~":
            try:
                pattern = re.compile(text)
            except (re.error, RecursionError, OverflowError) as error:
                raise self.error(position, f"{text} is no regular expression ({one_line(error)}); correct it") from None
            return lambda run: any(pattern.search(_text(value)) for value in _each(value_of(run, key)))
        wanted = self.number(key, text, position)
        if sign in ("=", "!="):
            if text not in (known := LISTED.get(key, [text])):
                raise self.error(position, f"{text} is no {key}{hint(text, known)} (there are: {', '.join(known)})")
            return lambda run: any(_equals(value, text, wanted) for value in _each(value_of(run, key))) == (sign == "=")
        if wanted is None:
            raise self.error(position, f"{text} is not a number; {sign} compares numbers, ages as 7d and dates")
        return lambda run: _is_number(value := value_of(run, key)) and ORDERS[sign](value, wanted)

    def number(self, key: str, text: str, position: int) -> float | None:
        """The number that a value stands for, which is a duration or date for some keys; None if it is none."""
        if key in DURATIONS:
            match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)([smhdw]?)", text)
            if not match:
                raise self.error(position, f"{text} is not a duration; write one as 30s, 10m, 3h, 7d or 2w")
            return float(match[1]) * UNITS[match[2] or "s"]
        try:
            number = datetime.fromisoformat(text).timestamp() if key == "started" else float(text)
        except ValueError:
            if key == "started":
                raise self.error(position, f"{text} is not a date; write one as 2026-01-31") from None
            return None
        return None if math.isnan(number) else number

    def takes(self, *tokens: str) -> str:
        """The next token, which is then passed, if it is one of these; otherwise nothing."""
        match = TOKEN.match(self.text, self.at)
        if match is None or match[1] not in tokens:
            return ""
        self.at = match.end()
        return match[1]

    def unexpected(self, expected: str) -> ConfigError:
        match = TOKEN.match(self.text, self.at)
        return self.error(self.at, f"{match[1] if match else 'nothing'} where {expected}")

    def error(self, position: int, message: str) -> ConfigError:
        spaces = len(self.text[position:]) - len(self.text[position:].lstrip())
        return _error(self.text, position + spaces, message)


def equals(run: Run, key: str) -> str:
    """The comparison of a filter that selects the value of a run."""
    value = value_of(run, key)
    text = value if isinstance(value, str) else _text(value)
    quote = next((sign for sign in "\"'" if sign not in text), "") if not VALUE.fullmatch(text) else ""
    if quote or VALUE.fullmatch(text):
        return f"{key}={quote}{text}{quote}"
    pattern = re.escape(text).replace('"', ".")  # a text with both quotes
    return f'{key}~"^{pattern}$"'


def _error(text: str, position: int, message: str) -> ConfigError:
    return ConfigError(f"filter={text}: position {position + 1}: {message}")


def _each(value: Any) -> list[Any]:
    """A value, and what is in a list of texts, such as that of tags."""
    return [value, *(item for item in value if isinstance(item, str))] if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    return "" if value is None else format_value(value)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] in "'\"" else text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equals(value: Any, text: str, number: float | None) -> bool:
    if _is_number(value):
        return bool(value == number)
    if value is None or value == []:
        return text in ("null", "")
    return str(value) == text if isinstance(value, str) else "".join(_text(value).split()) == "".join(text.split())
