"""The page of a try: its pairs as dots in their order, with interval and boundary after each, and its cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.checkpoint.atomic import write_text
from boltcutter.report.template import format_duration, load_template
from boltcutter.tries import describe
from boltcutter.tries.measurements import format_value
from boltcutter.tries.pairs import Outcome
from boltcutter.tries.plan import Try
from boltcutter.tries.sign_flips import expected_pairs, first_look, paired_differences

PAGE = run_files.REPORT
WIDTH, HEIGHT, MARGIN, LEFT = 860.0, 320.0, 56.0, 96.0  # of the chart; left of it are the names of its lines
TONES = {"accepted": "good", "rejected": "bad", "undecided": "warn"}


def write_try(tried: Try, lines: Sequence[str] = ()) -> Path:
    """Write the page in the folder of a try.

    Args:
        tried: The try.
        lines: Its verdict and what it says, once it has ended.
    """
    path, complete = tried.folder / PAGE, tried.pairs.complete()
    verdict = tried.verdict()
    rows = [row(tried, complete, count) for count in range(1, len(complete) + 1)]
    page = load_template(Path(__file__).with_name("page.html")).render(
        title=f"{tried.pairs.change.label} against {tried.pairs.baseline.label}",
        id=tried.id,
        metric=tried.question.metric,
        unit=tried.scale().unit,
        verdict="running" if verdict.word == "continue" and not lines else verdict.word,
        tone=TONES.get(verdict.word, "busy"),
        opening=list(describe.opening(tried.id, tried.question, tried.pairs))[1:],
        lines=lines,
        notes=tried.notes,
        rows=rows,
        constraints=tried.question.metrics[1:],
        chart=chart(rows, tried),
        cost=describe.cost(tried.pairs),
        expected=expected(tried),
    )
    write_text(path, page.encode(errors="replace").decode())
    return path


def row(tried: Try, complete: Sequence[tuple[Outcome, Outcome]], count: int) -> dict[str, Any]:
    """A pair, and what the pairs up to it show."""
    verdict, scale, effect = tried.verdict(count), tried.scale(), tried.effect() or tried.question.effect.value
    sides = zip(*complete[:count], strict=True)
    baseline, change = ([tried.question.turned(side.value) for side in each] for each in sides)
    last = complete[count - 1]
    return {
        "number": count,
        "seed": last[0].seed,
        "baseline": last[0],
        "change": last[1],
        "difference": float(paired_differences(baseline, change, effect)[-1]) * scale.factor,
        "is_lost": last[0].is_lost or last[1].is_lost,
        "ends": [end * scale.factor if math.isfinite(end) else None for end in (verdict.low, verdict.high)],
        "others": [
            " → ".join("" if side.is_lost else format_value(metric, side.of(metric)) for side in last)
            for metric in tried.question.metrics[1:]
        ],
        "interval": describe.interval(verdict, scale) if count >= first_look() else "",
    }


def chart(rows: Sequence[dict[str, Any]], tried: Try) -> dict[str, Any] | None:
    """The positions of dots, intervals and boundaries, in units of the drawing."""
    if not rows:
        return None
    factor = tried.scale().factor
    effect = (tried.effect() or tried.question.effect.value) * factor
    margin = effect * tried.question.margin.value / tried.question.effect.value
    values = [row["difference"] for row in rows] + [effect, margin, 0.0]
    low, high = min(values), max(values)
    pad = 0.25 * (high - low)
    low, high = low - pad, high + pad
    step = (WIDTH - LEFT - MARGIN / 2) / tried.question.budget

    def x(number: int) -> float:
        return round(LEFT + (number - 0.5) * step, 1)

    def y(value: float) -> float:
        share: float = (min(max(value, low), high) - low) / (high - low)
        return round(HEIGHT - MARGIN / 2 - share * (HEIGHT - MARGIN), 1)

    drawn = []
    for each in rows:
        ends = [
            low if each["ends"][0] is None else each["ends"][0],
            high if each["ends"][1] is None else each["ends"][1],
        ]
        has_interval = each["ends"] != [None, None]
        drawn.append(
            {
                "x": x(each["number"]),
                "y": y(each["difference"]),
                "ends": [y(end) for end in ends] if has_interval else None,
                "is_lost": each["is_lost"],
                "text": f"pair {each['number']}, seed {each['seed']}: {each['difference']:+.4g}{tried.scale().unit}",
            }
        )
    lines = [{"y": y(effect), "text": f"effect {effect:+.3g}"}, {"y": y(margin), "text": f"{margin:.3g}"}]
    ticks = [{"x": x(number), "text": str(number)} for number in range(1, tried.question.budget + 1)]
    first = round(LEFT + (first_look() - 1) * step, 1)
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "margin": LEFT,
        "dots": drawn,
        "lines": lines,
        "ticks": ticks,
        "first": first,
    }


def expected(tried: Try) -> str:
    """The expected cost to the end; empty if it has ended, or nothing is known."""
    complete, effect = tried.pairs.complete(), tried.effect()
    if len(complete) < 2 or effect is None or tried.verdict().word != "continue":
        return ""
    sides = zip(*complete, strict=True)
    baseline, change = ([tried.question.turned(side.value) for side in each] for each in sides)
    pairs = expected_pairs(paired_differences(baseline, change, effect), effect, tried.question.budget)
    seconds = sum(outcome.seconds for outcome in tried.pairs.outcomes.values()) / len(complete)
    left = max(pairs - len(complete), 0.0)
    return f"about {left:.1f} more pairs, {format_duration(left * seconds)}, if they are like those so far"
