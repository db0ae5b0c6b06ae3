import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from boltcutter.search.repeats import (
    Statistics,
    format_runs,
    format_statistics,
    half_width,
    summarize,
    summarize_runs,
)

FOLDS = {"fold 0": 0.90, "fold 1": 0.92, "fold 2": 0.88, "fold 3": 0.94, "fold 4": 0.91}


def runs() -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {
        name: {"val/accuracy": value, "val/loss": 1 - value} for name, value in FOLDS.items()
    }
    return found | {"fold 3": {"val/accuracy": 0.94, "val/loss": math.nan}, "fold 4": {"val/accuracy": 0.91}}


def test_values_computed_by_hand() -> None:
    # Mean 0.91; squared deviations 1 + 1 + 9 + 9 + 0 (× 1e-4) = 2e-3, divided by 4: 5e-4.
    # t(4, 0.975) = 2.776445; plain: t √(5e-4 / 5) = 0.02776445; corrected: t √(5e-4 (1/5 + 1/4)) = 0.04164668.
    found = summarize(FOLDS, num_folds=5)
    assert (found.count, found.excluded) == (5, {})
    assert found.mean == pytest.approx(0.91, abs=1e-15)
    assert found.std == pytest.approx(math.sqrt(5e-4), rel=1e-12)
    assert found.interval == pytest.approx((0.91 - 0.02776445, 0.91 + 0.02776445), abs=1e-8)
    assert found.corrected == pytest.approx((0.91 - 0.04164668, 0.91 + 0.04164668), abs=1e-8)
    assert summarize(FOLDS).corrected is None


@pytest.mark.parametrize("count", [2, 3, 10, 100])
def test_values_equal_those_of_scipy_and_numpy(count: int) -> None:
    values = np.random.default_rng(count).normal(1e6, 3, count)
    found = summarize({str(index): value for index, value in enumerate(values)})
    assert found.mean == pytest.approx(values.mean(), rel=1e-15)
    assert found.std == pytest.approx(values.std(ddof=1), rel=1e-9)
    assert found.interval == pytest.approx(
        stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values)), rel=1e-12
    )


def test_the_correction_by_its_formula() -> None:
    # Ten times ten-fold cross-validation: 100 values, whose variance of the mean is (1/100 + 1/9) s².
    assert half_width(2.0, 100, 10) == pytest.approx(stats.t.ppf(0.975, 99) * 2 * math.sqrt(0.01 + 10 / 90), rel=1e-12)
    assert half_width(2.0, 100) == pytest.approx(stats.t.ppf(0.975, 99) * 0.2, rel=1e-12)
    assert half_width(1.0, 5, 5) / half_width(1.0, 5) == pytest.approx(1.5)  # √(1 + 5/4)


def test_the_plain_interval_covers_the_mean_of_independent_runs() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        low, high = summarize(dict(enumerate(random.normal(0, 1, 5)))).interval or (0, 0)  # type: ignore[arg-type]
        covered += low <= 0 <= high
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_one_value_has_no_interval() -> None:
    found = summarize({"seed 0": 0.5}, num_folds=5)
    assert found == Statistics(1, 0.5)
    text = format_statistics({"val/loss": found})
    assert text.splitlines()[1].split() == ["val/loss", "1", "0.5", "–"]


def test_values_that_are_missing_or_not_finite_are_listed() -> None:
    found = summarize({"a": 1.0, "b": math.nan, "c": 3.0, "d": None, "e": -math.inf})
    assert (found.count, found.mean) == (2, 2.0)
    assert found.excluded == {"b": "nan", "d": "missing", "e": "-inf"}
    nothing = summarize({"a": math.inf})
    assert nothing == Statistics(0, excluded={"a": "inf"})
    text = format_statistics({"x": found, "y": nothing})
    assert "\nx excludes b (nan), d (missing), e (-inf)\n" in f"{text}\n"
    assert "\ny excludes a (inf)\n" in f"{text}\n"
    assert text.splitlines()[2].split() == ["y", "0", "–", "–"]


def test_equal_values_have_an_interval_without_width() -> None:
    found = summarize({"a": 0.25, "b": 0.25}, num_folds=2)
    assert (found.std, found.interval, found.corrected) == (0, (0.25, 0.25), (0.25, 0.25))
    assert " 0.25 ± 0 " in format_statistics({"x": found})


def test_all_metrics_of_all_runs_are_summarized() -> None:
    found = summarize_runs(runs(), num_folds=5)
    assert list(found) == ["val/accuracy", "val/loss"]
    assert found["val/accuracy"] == summarize(FOLDS, num_folds=5)
    assert found["val/loss"].excluded == {"fold 3": "nan", "fold 4": "missing"}
    assert summarize_runs({}) == {}


def test_the_tables_in_the_terminal() -> None:
    lines = format_statistics({"val/accuracy": summarize_runs(runs(), num_folds=5)["val/accuracy"]}).splitlines()
    header = [cell.strip() for cell in lines[0].split("  ") if cell.strip()]
    assert header[:3] == ["metric", "n", "mean ± std"]
    assert header[3:] == ["95% interval (Student's t)", "95% interval (corrected for folds)"]
    cells = [cell.strip() for cell in lines[1].split("  ") if cell]
    assert cells == ["val/accuracy", "5", "0.91 ± 0.022361", "0.88224 … 0.93776", "0.86835 … 0.95165"]
    assert "Nadeau and Bengio" in lines[2]
    both = format_statistics({"test/loss": summarize({"fold 0": 0.5}, 5)} | summarize_runs(runs(), num_folds=5))
    assert both.splitlines()[0].endswith("95% interval (corrected for folds)")  # although one metric has none
    plain = format_statistics(summarize_runs(runs()))
    assert "corrected" not in plain
    assert format_runs(runs()).splitlines()[0].split() == ["run", "val/accuracy", "val/loss"]
    assert format_runs(runs()).splitlines()[-2:] == [
        "fold 3  0.94          nan",
        "fold 4  0.91          –",
    ]


def test_scipy_is_imported_only_where_it_is_needed() -> None:
    code = "import sys, boltcutter.search.repeats; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("values", "is_questioned"), [((0.5, 0.5), True), ((0.5, 0.5 + 1e-9), False), ((0.5,), False)])
def test_a_metric_that_is_equal_in_all_runs_is_questioned(values: tuple[float, ...], is_questioned: bool) -> None:
    text = format_statistics(summarize_runs({str(seed): {"loss": value} for seed, value in enumerate(values)}))
    assert ("loss: exactly equal in all runs" in text) is is_questioned
