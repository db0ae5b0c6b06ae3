"""What a try says, in words: before the first run, after each pair, and at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from boltcutter.analysis.scale import Scale
from boltcutter.report.template import format_duration
from boltcutter.run.metrics import Mode
from boltcutter.tries.measurements import describe_load, format_value
from boltcutter.tries.pairs import Outcome, Pairs
from boltcutter.tries.question import Constraint, Question
from boltcutter.tries.sign_flips import (
    ALPHA,
    Verdict,
    detectable,
    failures_not_excluded,
    first_look,
    power,
)

PERCENT = round(100 * ALPHA)


def opening(id: str, question: Question, pairs: Pairs) -> Iterator[str]:
    """What is tried."""
    direction = "larger" if question.mode == "max" else "smaller"
    of = " of the baseline's value" if question.effect.is_relative else ""
    yield f"try {id}: {pairs.change.label} against {pairs.baseline.label}"
    least = f"by more than {question.margin}" if question.margin.value else "at all"
    yield (
        f"{question.metric} ({direction} is better): accepted if it is better {least}, rejected if it improves by less "
        f"than {question.effect}{of}; at most {question.budget} pairs, seeds {_ranges(pairs.seeds)}"
    )
    for constraint in question.constraints:
        yield f"accepted only if {constraint.metric} is not worse by more than {constraint.tolerance}"
    if question.is_measured:
        yield "both sides of each pair are run now, one at a time; who is first is drawn, as machines drift"


def _ranges(seeds: Sequence[int]) -> str:
    if seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def forecast(question: Question, effect: float, spread: float, scale: Scale, source: str) -> str:
    """What the budget can see.

    Args:
        question: The question.
        effect: The effect in units of the metric.
        spread: Standard deviation of the differences of pairs.
        scale: How differences are written.
        source: Where the spread is from.
    """
    if not spread:
        return f"forecast: the spread of {source} is 0, so it says nothing"
    size = effect / spread
    seen, share = detectable(question.budget)
    own = power(round(min(size, 4.0), 2), round(min(size, 4.0), 2), question.budget)
    return (
        f"forecast: an effect of {scale.size(effect)} is {size:.2g} standard deviations of {source}: {question.budget} "
        f"pairs accept it in {own.accepted:.0%}, after {own.pairs:.1f} pairs on average; {scale.size(seen * spread)} "
        f"would be accepted in {share:.0%}"
    )


def progress(question: Question, pairs: Sequence[tuple[Outcome, Outcome]], verdict: Verdict, scale: Scale) -> str:
    """A line after a pair."""
    baseline, change = pairs[-1]
    values = ", ".join(
        f"{metric} " * (metric != question.metric)
        + " → ".join("failed" if side.is_lost else format_value(metric, side.of(metric)) for side in (baseline, change))
        for metric in question.metrics
    )
    line = f"pair {len(pairs)} of ≤ {question.budget}: {values}, difference so far {scale.signed(verdict.difference)}"
    if verdict.word != "continue":
        return line
    if len(pairs) < first_look():
        return f"{line}; no verdict before pair {first_look()}"
    return f"{line}, {interval(verdict, scale)}"


def interval(verdict: Verdict, scale: Scale) -> str:
    """The interval that is valid whenever a try stops."""
    has_low, has_high = math.isfinite(verdict.low), math.isfinite(verdict.high)
    if has_low and has_high:
        return f"{scale.interval((verdict.low, verdict.high))}{scale.unit}"
    if has_low:
        return f"more than {scale.signed(verdict.low)}"
    return f"less than {scale.signed(verdict.high)}" if has_high else "no interval yet"


def explanation(
    question: Question,
    pairs: Sequence[tuple[Outcome, Outcome]],
    verdict: Verdict,
    effect: float,
    scale: Scale,
    askings: int,
    is_stopped: bool,
) -> Iterator[str]:
    """The verdict, and what it does and does not say."""
    used = pairs[: verdict.pairs]
    count = f"{verdict.pairs} pair{'' if verdict.pairs == 1 else 's'}"
    shown = f"{scale.signed(verdict.difference)} in {count}" if used else "no pair is complete"
    is_broken = any(kept.is_broken for kept in verdict.kept)
    reason = "another metric is worse" if is_broken else f"improves by less than {scale.size(effect)}"
    yield {
        "accepted": f"accepted: better than the baseline, {shown}",
        "rejected": f"rejected: {reason}, {shown}",
    }.get(verdict.word, f"undecided: {'stopped before its end' if is_stopped else 'the budget is spent'}, {shown}")
    if verdict.word == "rejected" and verdict.low > 0 and not is_broken:
        yield "  it is better, but by less than was asked for"
    if math.isfinite(verdict.low) or math.isfinite(verdict.high):
        yield (
            f"  interval: {interval(verdict, scale)}; each end is wrong in at most {PERCENT} of 100 tries, "
            "whenever they stop"
        )
    yield (
        f"  had the change done nothing, at most {PERCENT} of 100 such tries would be accepted, however often one "
        "looks and whatever seeds do; this needs pairs that could as well have run under swapped names"
    )
    yield (
        f"  had it improved the metric by {scale.size(effect)}, at most {PERCENT} of 100 would be rejected, if "
        "differences are symmetric about that"
    )
    if askings > 1:
        yield (
            f"  asked {askings} times: a change that does nothing is accepted in one of them in up to "
            f"{askings * PERCENT} of 100, not {PERCENT}"
        )
    if verdict.word == "accepted":
        yield "  the difference at the moment of acceptance is lucky: rely on the interval"
    yield from _failures(used)


def constraints(
    question: Question,
    verdict: Verdict,
    pairs: Sequence[tuple[Outcome, Outcome]],
    tolerance: Callable[[Constraint], float | None],
    scale_of: Callable[[str, Mode], Scale],
) -> Iterator[str]:
    """Whether the metrics that must not get worse do."""
    for constraint, kept in zip(question.constraints, verdict.kept, strict=True):
        scale, size = scale_of(constraint.metric, constraint.mode), tolerance(constraint)
        limit = scale.size(size or 0)
        found = f"worse by more than {limit}" if kept.is_broken else f"not worse by more than {limit}"
        if not (kept.is_broken or kept.is_shown):
            found = f"open whether it is worse by more than {limit}"
        sign = 1 if constraint.mode == "max" else -1
        mean = "" if math.isnan(kept.difference) else f", {scale.signed(sign * kept.difference)} on average"
        low, high = sorted((sign * kept.low, sign * kept.high))
        ends = Verdict("continue", verdict.pairs, kept.difference, low, high)
        yield f"  {constraint.metric}: {found}{mean}, {interval(ends, scale)}"


def load_line(pairs: Pairs) -> str:
    """What other processes used while speed was measured; empty if it is little."""
    loads = [outcome.load for outcome in pairs.outcomes.values()]
    if not loads or not (text := describe_load(*(max(ends) for ends in zip(*loads, strict=True)))):
        return ""
    return f"{text} while these ran: the verdict stays valid, as the order of each pair was drawn, but needs more pairs"


def _failures(pairs: Sequence[tuple[Outcome, Outcome]]) -> Iterator[str]:
    for name, side in (("baseline", 0), ("change", 1)):
        lost = [pair[side] for pair in pairs if pair[side].is_lost]
        if lost:
            yield f"  {name}: {len(lost)} of {len(pairs)} runs lost their pairs, the first by: {lost[0].error}"
    if pairs and not any(side.is_lost for pair in pairs for side in pair):
        yield (
            f"  {len(pairs)} pairs without a failure do not exclude that the change fails in up to "
            f"{failures_not_excluded(len(pairs)):.0%} of seeds, nor that its mean is worse by rare failures"
        )


def cost(pairs: Pairs) -> str:
    """How much was trained."""
    outcomes = pairs.outcomes.values()
    trained = [outcome for outcome in outcomes if not outcome.is_reused]
    reused = len(outcomes) - len(trained)
    return (
        f"{len(trained)} runs, {format_duration(sum(outcome.seconds for outcome in trained))}"
        + f", and {reused} of the baseline that existed" * bool(reused)
    )
