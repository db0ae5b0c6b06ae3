from __future__ import annotations

import math

from boltcutter.analysis.scale import Scale
from boltcutter.tries import describe
from boltcutter.tries.pairs import Outcome
from boltcutter.tries.question import Question, Size
from boltcutter.tries.sign_flips import Verdict, decide

QUESTION = Question("val/accuracy", "max", Size(0.01, is_relative=False))
SCALE = Scale(100.0, " points")


def outcomes(values: list[float]) -> list[tuple[Outcome, Outcome]]:
    return [(Outcome(i, "baseline", i, "a", 0.8), Outcome(i, "change", i, "b", v)) for i, v in enumerate(values)]


def explain(values: list[float], **more: object) -> str:
    verdict = decide([0.8] * len(values), values, 0.01)
    options = {"askings": 1, "is_stopped": False} | more
    return "\n".join(describe.explanation(QUESTION, outcomes(values), verdict, 0.01, SCALE, **options))  # type: ignore[arg-type]


def test_the_forecast_names_what_the_budget_sees() -> None:
    text = describe.forecast(QUESTION, 0.01, 0.02, SCALE, "pairs")
    assert "0.5 standard deviations" in text
    assert "12 pairs accept it in 3" in text
    assert "2 points" in text
    assert "spread" in describe.forecast(QUESTION, 0.01, 0.0, SCALE, "pairs")


def test_the_explanation_has_guarantees_and_limits() -> None:
    text = explain([0.82, 0.83, 0.84, 0.825, 0.835])
    assert text.startswith("accepted")
    assert "5 of 100" in text
    assert "45%" in text
    assert "lucky" in text
    assert "10 of 100" in explain([0.82] * 5, askings=2)
    lost = explain([0.82, 0.83, 0.84, 0.825, math.nan])
    assert "1 of 5 runs" in lost
    assert "45%" not in lost
    assert "stopped" in explain([0.82], is_stopped=True)


def test_the_interval_may_have_one_end() -> None:
    for low, high, text in (
        (0.01, 0.02, "1.00 to 2.00 points"),
        (0.01, math.inf, "more than +1.00 points"),
        (-math.inf, 0.02, "less than +2.0 points"),
        (-math.inf, math.inf, "no interval yet"),
    ):
        assert describe.interval(Verdict("continue", 5, 0.0, low, high), SCALE) == text
