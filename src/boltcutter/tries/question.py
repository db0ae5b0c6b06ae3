"""What a try asks: which change, against which baseline, by which metric, and how large an improvement matters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from boltcutter.config.errors import ConfigError, hint
from boltcutter.formatting import parse_count
from boltcutter.run.metrics import Mode, infer_mode, parse_name
from boltcutter.tries.measurements import is_measured
from boltcutter.tries.sign_flips import BUDGET, check_budget, first_look

FLAGS = {
    "--final": "allow a metric of the test split, which is for the last comparison",
    "--confirm": "run all that was accepted together once more, on fresh seeds",
    "--again": "ask a question once more that was not decided, with fresh seeds",
}
KEYS = ("against", "metric", "mode", "effect", "budget", "margin", "not_worse", "split", "parallel", "gpus")
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
                f"{key}={text}: not a size; give it in units of the metric, or as {key}=0.5% of its value",
                kind="wrong_type",
            )
        return cls(value / 100 if is_relative else value, is_relative)

    def resolve(self, reference: float) -> float:
        """The size in units of the metric, for this value of the baseline."""
        return self.value * abs(reference) if self.is_relative else self.value

    def __str__(self) -> str:
        return f"{self.value * 100:g}%" if self.is_relative else f"{self.value:g}"


@dataclass(frozen=True)
class Constraint:
    """A metric in which the change must not be worse by more than a tolerance."""

    metric: str
    mode: Mode
    tolerance: Size

    def __str__(self) -> str:
        return f"{self.metric}:{self.tolerance}"


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
        constraints: Metrics in which the change must not be worse.
    """

    metric: str
    mode: Mode
    effect: Size
    budget: int = BUDGET
    margin: Size = Size(0.0, is_relative=False)
    split: str | None = None
    constraints: tuple[Constraint, ...] = ()

    @property
    def metrics(self) -> list[str]:
        """The metric, and those of the constraints."""
        return [self.metric, *(constraint.metric for constraint in self.constraints)]

    @property
    def is_final(self) -> bool:
        """Whether it reads the test split."""
        return any(parse_name(metric).stage == "test" for metric in self.metrics)

    @property
    def is_measured(self) -> bool:
        """Whether it depends on speed or memory, which each run has to measure anew."""
        return any(map(is_measured, self.metrics))

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
    launch: tuple[str, ...] = ()  # overrides of the launcher; empty: this machine
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
    launch = tuple(argument for argument in rest if argument.lstrip("+~").startswith(("launch=", "launch.")))
    change = [argument for argument in rest if argument not in (*common, *launch)]
    for key, example in (("metric", "val/accuracy"), ("effect", "0.5%")):
        if not given.get(key):
            raise ConfigError(f"{key} is not set; give {key}={example}", kind="missing_value")
    question = _parse_question(given)
    if question.is_final and "--final" not in flags:
        raise ConfigError(
            f"metric={question.metric}: the test split is for the last comparison; try a metric of val, or add --final",
            kind="missing_value",
        )
    seeds = [parse_count(argument.partition("=")[2]) for argument in common if argument.startswith("seed=")]
    if None in seeds:
        raise ConfigError("seed: not a number; give the seed of the first pair, such as seed=0", kind="wrong_type")
    if launch and not any(argument.startswith("launch=") for argument in launch):
        raise ConfigError(f"{launch[0]}: no launcher; add launch=slurm, or remove it", kind="missing_value")
    if launch and (question.is_measured or "gpus" in given):
        measured = next(filter(is_measured, question.metrics), "")
        setting = f"gpus={given['gpus']}" if "gpus" in given else measured
        reason = "the job has the GPUs of trainer.devices" if "gpus" in given else "jobs may run on different machines"
        raise ConfigError(f"{setting}: {reason}; remove it, or {launch[0]}", kind="conflict")
    parallel = parse_count(given.get("parallel", str(2 * first_look()) if launch else "1"))
    if not parallel:
        raise ConfigError(
            f"parallel={given['parallel']}: not a number of runs at a time; try parallel=1", kind="wrong_type"
        )
    if parallel > 1 and question.is_measured:
        raise ConfigError(
            f"parallel={parallel}: runs at the same time slow each other down, which would be measured; try parallel=1",
            kind="conflict",
        )
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
        launch=launch,
    )


def _parse_question(given: dict[str, str]) -> Question:
    metric, text, split = given["metric"], given.get("mode"), given.get("split")
    if text not in MODES:
        raise ConfigError(f"mode={text}: neither min nor max; say which values of {metric} are better")
    if (mode := _mode(f"metric={metric}", metric, MODES[text])) is None:
        raise ConfigError(
            f"metric={metric}: its name does not say which values are better; add mode=min or mode=max",
            kind="missing_value",
        )
    if split is not None and split not in SPLITS:
        raise ConfigError(
            f"split={split}: no such split{hint(split, SPLITS)} (there are: {', '.join(SPLITS)})", kind="unknown_option"
        )
    effect, margin = Size.parse("effect", given["effect"]), Size.parse("margin", given.get("margin", "0"))
    if not effect.value:
        raise ConfigError(f"effect={given['effect']}: not positive; give the smallest improvement that is worth having")
    if margin.value and margin.is_relative != effect.is_relative:
        raise ConfigError(
            f"margin={margin}: its unit is not that of effect={effect}; give both in the same unit", kind="conflict"
        )
    if margin.value >= effect.value:
        raise ConfigError(f"margin={margin}: not below effect={effect}; try margin=0")
    budget = parse_count(given.get("budget", str(BUDGET)))
    if budget is None:
        raise ConfigError(f"budget={given['budget']}: not a number of pairs; try budget={BUDGET}", kind="wrong_type")
    try:
        check_budget(budget)
    except ValueError as error:
        raise ConfigError(error) from error
    return Question(metric, mode, effect, budget, margin, split, _parse_constraints(given.get("not_worse", ""), metric))


def _mode(setting: str, metric: str, given: Mode | None = None) -> Mode | None:
    """Which values of a metric are better; None if its name does not say."""
    if metric.startswith("throughput/"):
        raise ConfigError(f"{setting}: speed is measured as time/step, memory as memory/peak; use one of these")
    if is_measured(metric) and given == "max":
        raise ConfigError(f"mode=max: less {metric} is better; remove it", kind="conflict")
    return "min" if is_measured(metric) else given or infer_mode(metric)


def _parse_constraints(text: str, of: str) -> tuple[Constraint, ...]:
    found = list[Constraint]()
    for part in filter(None, text.split(",")):
        metric, colon, size = part.rpartition(":")
        setting = f"not_worse={part}"
        if not colon or not metric:
            raise ConfigError(f"{setting}: no tolerance; give not_worse={part.rstrip(':')}:2%, or one in its units")
        if metric in (of, *(constraint.metric for constraint in found)):
            raise ConfigError(f"{setting}: {metric} is already asked for; name another metric", kind="conflict")
        if (mode := _mode(setting, metric)) is None:
            raise ConfigError(f"{setting}: its name does not say which values are better; choose another metric")
        tolerance = Size.parse("not_worse", size)
        if not tolerance.value:
            raise ConfigError(f"{setting}: not even equal runs would show that; give a tolerance, such as {metric}:2%")
        found.append(Constraint(metric, mode, tolerance))
    return tuple(found)


def _number(key: str, text: str, what: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise ConfigError(f"{key}={text}: not a number {what}", kind="wrong_type")
