"""The search space: a distribution for each key of the configuration, written as text in YAML.

There are uniform, loguniform, int, logint (bounds included), choice and grid, with a condition on an earlier key, as in
``uniform(0, 0.99) if optimizer == sgd``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from boltcutter.config.errors import ConfigError, hint
from boltcutter.config.values import flatten, split_values

if TYPE_CHECKING:
    from optuna import Trial

PARAMETER = re.compile(r"\s*(\w+)\((.*)\)\s*(?:if\s+(\S+)\s*==\s*(.+?)\s*)?", re.S)
EXAMPLE = "loguniform(1e-5, 1e-1)"


@dataclass(frozen=True)
class Range:
    """A number between two bounds, both included; an integer if they are."""

    low: float
    high: float
    log: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether the values are integers."""
        return isinstance(self.low, int)

    def sample(self, trial: Trial, key: str) -> float:
        """Sample a value for a trial."""
        if self.is_integer:
            return trial.suggest_int(key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(key, self.low, self.high, log=self.log)

    def extremes(self) -> list[Any]:
        """Values that show whether the configuration accepts all of them."""
        between = [] if self.is_integer else [self.low + (self.high - self.low) / math.pi]  # is no integer
        return [self.low, *between, self.high]


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    options: tuple[str, ...]

    def sample(self, trial: Trial, key: str) -> str:
        """Sample a value for a trial."""
        value: str = trial.suggest_categorical(key, self.options)
        return value

    def extremes(self) -> list[Any]:
        """Values that show whether the configuration accepts all of them."""
        return list(self.options)


@dataclass(frozen=True)
class Grid(Choice):
    """Each of several values, in all combinations with other grids."""


Distribution = Range | Choice


@dataclass(frozen=True)
class Parameter:
    """A key of the configuration and its distribution."""

    key: str  # of an override, such as ``optimizer.lr`` or ``optimizer``
    text: str  # the distribution as it was written
    distribution: Distribution
    condition: tuple[str, str] | None = None  # another key, and the value that it must have for this one to be sampled

    @property
    def setting(self) -> str:
        """The parameter as messages name it."""
        return f"search.space.{self.key}={self.text}"

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Whether the parameter is sampled, given the values of earlier ones."""
        return self.condition is None or str(values.get(self.condition[0])) == self.condition[1]


class Space:
    """All parameters of a search, in the order of sampling."""

    def __init__(self, texts: Mapping[str, Any]) -> None:
        self.parameters: list[Parameter] = []
        for key, text in flatten(texts):
            if text is not None and text != {}:  # an experiment removes an inherited parameter by null
                self.parameters.append(_parse(key, text, self.parameters))

    def check(self, values: Mapping[str, Any], fixed: Sequence[Mapping[str, Any]] = ()) -> None:
        """Check that values may be of this space, since each becomes an override of a process.

        Raises:
            ConfigError: A key is not of the space, or a text is not one of its options.
        """
        options: dict[str, list[Any]] = defaultdict(list)
        for parameter in self.parameters:
            options[parameter.key] += getattr(parameter.distribution, "options", ())
        for key, value in (pair for given in fixed for pair in given.items()):
            options[key].append(value)
        for key, value in values.items():
            if key not in options or not (isinstance(value, int | float) or value in options[key]):
                raise ConfigError(f"the journal of the search has {key}={value}, which it does not sample; remove it")

    def sample(self, trial: Trial) -> dict[str, Any]:
        """Sample the values of a trial."""
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.applies(values):
                values[parameter.key] = parameter.distribution.sample(trial, parameter.key)
        return values

    def combinations(self) -> list[dict[str, str]]:
        """All combinations of the grids; a single empty one if there is no grid."""
        combined: list[dict[str, str]] = [{}]
        for p in self.parameters:
            if isinstance(p.distribution, Grid):
                options = [{p.key: option} for option in p.distribution.options]
                combined = [{**c, **option} for c in combined for option in (options if p.applies(c) else [{}])]
        return combined

    def probes(self) -> Iterator[tuple[Parameter, dict[str, Any]]]:
        """Values for which the configuration has to be valid: the extremes of each parameter, with its conditions."""
        known = {parameter.key: parameter for parameter in self.parameters}
        for parameter in self.parameters:
            given: dict[str, Any] = {}
            condition = parameter.condition
            while condition:
                given[condition[0]] = condition[1]
                condition = known[condition[0]].condition
            for value in parameter.distribution.extremes():
                yield parameter, {**given, parameter.key: value}

    @property
    def log_keys(self) -> set[str]:
        """Keys whose logarithm is sampled uniformly."""
        return {p.key for p in self.parameters if not isinstance(p.distribution, Choice) and p.distribution.log}


def _parse(key: str, text: Any, earlier: Sequence[Parameter]) -> Parameter:
    setting = f"search.space.{key}={text}"
    found = PARAMETER.fullmatch(str(text))
    if not found:
        raise ConfigError(f"{setting} is not a distribution; write one such as {EXAMPLE} or choice(a, b)")
    name, arguments, parent, option = found.groups()
    values = split_values(arguments)
    if name in ("choice", "grid"):
        if not all(values) or len(set(values)) < len(values):
            raise ConfigError(f"{setting}: values must be given and differ; write {name}(a, b)")
        distribution: Distribution = (Choice if name == "choice" else Grid)(tuple(values))
    else:
        distribution = _parse_range(setting, name, values)
    if parent is None:
        return Parameter(key, str(text), distribution)
    known = {parameter.key: parameter for parameter in earlier}
    if parent not in known:
        raise ConfigError(f"{setting}: {parent} is no earlier key of the space{hint(parent, known)}; list it before")
    parents = known[parent].distribution
    if not isinstance(parents, Choice):
        raise ConfigError(f"{setting}: {parent} is no choice; list its values, such as choice(a, b)")
    if option not in parents.options:
        raise ConfigError(f"{setting}: {parent} is never {option}; use one of {', '.join(parents.options)}")
    return Parameter(key, str(text), distribution, (parent, option))


def _parse_range(setting: str, name: str, values: Sequence[str]) -> Range:
    kinds: dict[str, Callable[[str], float]] = {"uniform": float, "loguniform": float, "int": int, "logint": int}
    if name not in kinds:
        known = [*kinds, "choice", "grid"]
        raise ConfigError(f"{setting}: no such distribution{hint(name, known)} (there are: {', '.join(known)})")
    try:
        low, high = map(kinds[name], values)
    except ValueError:
        numbers = "integers" if name.endswith("int") else "numbers"
        raise ConfigError(f"{setting}: expected two {numbers}; write {name}(low, high)", kind="wrong_type") from None
    log = name.startswith("log")
    if not low < high < math.inf or (log and low <= 0):
        kind = "of positive numbers " * log
        raise ConfigError(f"{setting}: the range {kind}is empty; give the smaller bound first")
    return Range(low, high, log)
