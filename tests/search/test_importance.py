from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from boltcutter_search.importance import measure_importance
from boltcutter_search.results import Result


def make_results(count: int, sign: int = 1) -> list[Result]:
    """Trials whose loss depends on the logarithm of the learning rate, and a little on the optimizer."""
    random_ = random.Random(0)
    results = []
    for number in range(count):
        values: dict[str, Any] = {
            "lr": 10 ** random_.uniform(-5, -1),
            "optimizer": random_.choice(["adamw", "sgd"]),
            "size": random_.randint(1, 100),
            "compile": random_.random() < 0.5,
            "fixed": 1.0,
        }
        if values["optimizer"] == "sgd":
            values["momentum"] = random_.random()
        loss = (math.log10(values["lr"]) + 3) ** 2 + 0.2 * (values["optimizer"] == "sgd")
        results.append(Result(number, "complete", values, {"loss": sign * loss}, [], {}, 1.0, Path()))
    return results


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_the_value_that_decides_is_the_most_important(mode: Any, sign: int) -> None:
    found = measure_importance(make_results(100, sign), ("loss", mode), {"lr"})
    assert next(iter(found)) == "lr"
    assert sum(found.values()) == pytest.approx(1)
    assert {"optimizer", "size", "compile"} <= found.keys()
    assert "fixed" not in found


def test_it_says_why_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    results = make_results(20)
    same = [Result(n, "complete", {"lr": 0.1}, {"loss": float(n)}, [], {}, 1.0, Path()) for n in range(10)]
    equal = [Result(n, "complete", {"lr": n}, {"loss": 1.0}, [], {}, 1.0, Path()) for n in range(10)]
    for trials, why in [(results[:9], "at least 10"), (same, "no sampled value varies"), (equal, "the same loss")]:
        with pytest.raises(ValueError, match=why):
            measure_importance(trials, ("loss", "min"))
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match="Optuna is not installed"):
        measure_importance(results, ("loss", "min"))
