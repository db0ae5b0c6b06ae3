"""What a try asks: which change, against which baseline, by which metric, and how large an improvement matters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from boltcutter.config.errors import ConfigError, hint
from boltcutter.formatting import parse_count
from boltcutter.run.metrics import Mode, infer_mode, parse_name
from boltcutter.tries.sign_flips import BUDGET, check_budget

FLAGS = {
    "--final": "allow a metric of the test split, which is for the last comparison",
    "--confirm": "run all that was accepted together once more, on fresh seeds",
    "--again": "ask a question once more that was not decided, with fresh seeds",
}
KEYS = ("against", "metric", "mode", "effect", "budget", "margin", "split", "parallel", "gpus")
COMMON = ("runs", "seed")  # overrides of both sides
MODES: dict[str | None, Mode | None] = {None: None, "min": "min", "max": "max"}
SPLITS = ("by-seed", "fixed")


@dataclass(frozen=True)
class Size:
    """The size of a difference: in units of the metric, or as a share of the baseline's value."""

    value: float
    is_relative: bool

    @classmethod
    def parse(cls, key: str, text: str) -> Size:
        """Parse ``0.005`` or ``0.5%``.

        Raises:
            ConfigError: It is neither, or negative.
        """
        is_relative, value = text.endswith("%"), math.nan
        with suppress(ValueError):
            value = float(text.removesuffix("%"))
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{key}={text}: not a size; give it in units of the metric, or as {key}=0.5% of its value"
            )
        return cls(value / 100 if is_relative else value, is_relative)

    def resolve(self, reference: float) -> float:
        """The size in units of the metric, for this value of the baseline."""
        return self.value * abs(reference) if self.is_relative else self.value

    def __str__(self) -> str:
        return f"{self.value * 100:g}%" if self.is_relative else f"{self.value:g}"


@dataclass(frozen=True)
class Question:
    """What a try asks, without the change and the baseline.

    Args:
        metric: A metric of the runs.
        mode: Whether smaller or larger values are better.
        effect: The smallest improvement worth having.
        budget: The most pairs.
        margin: What an improvement has to exceed.
        split: How the seeds of pairs affect the split of the data; None: as the configuration says.
    """

    metric: str
    mode: Mode
    effect: Size
    budget: int = BUDGET
    margin: Size = Size(0.0, is_relative=False)
    split: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether it reads the test split."""
        return parse_name(self.metric).stage == "test"

    def turned(self, value: float) -> float:
        """A value of the metric with the sign that makes more better; and back."""
        return value if self.mode == "max" else -value


@dataclass(frozen=True)
class Request:
    """The arguments of the command."""

    question: Question
    against: str | None
    change: list[str]  # overrides of training, and at most one git ref or patch
    common: list[str]  # overrides of both sides
    seed: int | None  # of the first pair
    parallel: int
    gpus: float | None
    again: bool
    confirms: tuple[str, ...] = ()  # ids of tries


def parse_request(arguments: Sequence[str]) -> Request:
    """Parse the arguments of ``boltcutter try``.

    Raises:
        ConfigError: One is missing or wrong.
    """
    flags = [argument for argument in arguments if argument in FLAGS]
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments) if key in KEYS}
    rest = [a for a in arguments if a not in FLAGS and a.partition("=")[0] not in KEYS]
    common = [argument for argument in rest if argument.partition("=")[0] in COMMON and "=" in argument]
    change = [argument for argument in rest if argument not in common]
    for key, example in (("metric", "val/accuracy"), ("effect", "0.5%")):
        if not given.get(key):
            raise ConfigError(f"{key} is not set; give {key}={example}")
    question = _parse_question(given)
    if question.is_final and "--final" not in flags:
        raise ConfigError(
            f"metric={question.metric}: the test split is for the last comparison; try a metric of val, or add --final"
        )
    seeds = [parse_count(argument.partition("=")[2]) for argument in common if argument.startswith("seed=")]
    if None in seeds:
        raise ConfigError("seed: not a number; give the seed of the first pair, such as seed=0")
    parallel = parse_count(given.get("parallel", "1"))
    if not parallel:
        raise ConfigError(f"parallel={given['parallel']}: not a number of runs at a time; try parallel=1")
    gpus = _number("gpus", given["gpus"], "of each run, such as gpus=1") if "gpus" in given else None
    return Request(
        question=question,
        against=given.get("against") or None,
        change=change,
        common=[argument for argument in common if not argument.startswith("seed=")],
        seed=seeds[-1] if seeds else None,
        parallel=parallel,
        gpus=gpus,
        again="--again" in flags,
    )


def _parse_question(given: dict[str, str]) -> Question:
    metric, text, split = given["metric"], given.get("mode"), given.get("split")
    if metric.startswith("throughput/"):
        raise ConfigError(f"metric={metric}: speed depends on what else a machine does; try a metric of val")
    if text not in MODES:
        raise ConfigError(f"mode={text}: neither min nor max; say which values of {metric} are better")
    if (mode := MODES[text] or infer_mode(metric)) is None:
        raise ConfigError(f"metric={metric}: its name does not say which values are better; add mode=min or mode=max")
    if split is not None and split not in SPLITS:
        raise ConfigError(f"split={split}: no such split{hint(split, SPLITS)} (there are: {', '.join(SPLITS)})")
    effect, margin = Size.parse("effect", given["effect"]), Size.parse("margin", given.get("margin", "0"))
    if not effect.value:
        raise ConfigError(f"effect={given['effect']}: not positive; give the smallest improvement that is worth having")
    if margin.value and margin.is_relative != effect.is_relative:
        raise ConfigError(f"margin={margin}: its unit is not that of effect={effect}; give both in the same unit")
    if margin.value >= effect.value:
        raise ConfigError(f"margin={margin}: not below effect={effect}; try margin=0")
    budget = parse_count(given.get("budget", str(BUDGET)))
    if budget is None:
        raise ConfigError(f"budget={given['budget']}: not a number of pairs; try budget={BUDGET}")
    try:
        check_budget(budget)
    except ValueError as error:
        raise ConfigError(error) from error
    return Question(metric, mode, effect, budget, margin, split)


def _number(key: str, text: str, what: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise ConfigError(f"{key}={text}: not a number {what}")
